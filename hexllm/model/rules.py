"""How a checkpoint's tensors become a family's parameters, and how that is undone.

A family's parameter paths are Hugging Face's names, so most families need no rule. Each rule takes
a piece of the checkpoint (at first a whole tensor under its own name) and gives the pieces it turns
into; rules run in order, each on what the one before it gave.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence


#: numpy arrays by name.
Arrays: TypeAlias = "dict[str, np.ndarray]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a tensor on its way to a parameter.

    Attributes:
        name: The parameter's path, as far as the rules have come.
        tensor: The tensor's name in the checkpoint.
        index: Where the piece lies in the tensor: one slice (with start and stop) a dimension.
        position: Its place in a stacked parameter's first dimension; None is the whole parameter.
        is_transposed: Whether the last two dimensions change places once the piece is read.
    """

    name: str
    tensor: str
    index: tuple[slice, ...]
    position: int | None = None
    is_transposed: bool = False

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...]) -> Piece:
        """Return all of a tensor under its own name."""
        return cls(tensor, tensor, tuple(slice(0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The piece's dimensions, as the parameter will have them."""
        return tuple(self.index[axis].stop - self.index[axis].start for axis in self._axes)

    def cut(self, axis: int, start: int, stop: int) -> Piece:
        """Return the part from ``start`` to ``stop`` of the piece's dimension ``axis``."""
        index = list(self.index)
        at = self._axes[axis]
        first = index[at].start
        index[at] = slice(first + start, first + stop)
        return replace(self, index=tuple(index))

    def read_index(self, bounds: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """Return where the slice ``bounds`` of the piece lies in the tensor."""
        piece = self
        for axis, (start, stop) in enumerate(bounds):
            piece = piece.cut(axis, start, stop)
        return piece.index

    @property
    def _axes(self) -> tuple[int, ...]:
        """The tensor's dimension of each of the piece's."""
        axes = list(range(len(self.index)))
        if self.is_transposed:
            axes[-2:] = axes[:-3:-1]
        return tuple(axes)


class Rule(Protocol):
    """Turns a piece into pieces; one that the rule does not concern comes back as it is.

    Attributes:
        undo: Turns arrays by the names that the rule gives into arrays by the names that it takes,
            for making checkpoints: ``undo`` and then ``apply`` change nothing.
    """

    def apply(self, piece: Piece) -> tuple[Piece, ...]:
        """Return what becomes of ``piece``; nothing drops it."""
        ...

    def undo(self, arrays: Arrays) -> Arrays:
        """Return what the rule would turn into ``arrays``."""
        ...


@dataclass(frozen=True, slots=True)
class Rename:
    r"""Replaces ``pattern`` (a regular expression, searched for) by ``replacement`` in names.

    Attributes:
        pattern: A regular expression.
        replacement: May use its groups (``\1``).
        inverse: The pattern and replacement that undo it; None where a name that the rule gives
            passes through it unchanged.
    """

    pattern: str
    replacement: str
    inverse: tuple[str, str] | None = None

    def apply(self, piece: Piece) -> tuple[Piece, ...]:
        """Return the piece under its new name."""
        return (replace(piece, name=re.sub(self.pattern, self.replacement, piece.name)),)

    def undo(self, arrays: Arrays) -> Arrays:
        """Return the arrays under names that the rule turns into theirs."""
        if self.inverse is None:
            return arrays
        return {re.sub(*self.inverse, name): array for name, array in arrays.items()}


@dataclass(frozen=True, slots=True)
class Drop:
    """Leaves out the tensors whose whole name matches ``pattern``, on purpose.

    Attributes:
        pattern: A regular expression.
        reason: Why, for the log: "images are not served"; None where nobody needs to be told.
    """

    pattern: str
    reason: str | None = None

    def apply(self, piece: Piece) -> tuple[Piece, ...]:
        """Return nothing for a match."""
        return () if re.fullmatch(self.pattern, piece.name) else (piece,)

    def undo(self, arrays: Arrays) -> Arrays:
        """Return the arrays as they are: what was dropped is not needed."""
        return arrays


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Leaves out the tensor ``tensor`` because it repeats the parameter ``of``.

    Loading compares the two: a tied head that was trained apart would give wrong text in silence.
    """

    tensor: str
    of: str

    def apply(self, piece: Piece) -> tuple[Piece, ...]:
        """Return nothing for the copy."""
        return () if piece.name == self.tensor else (piece,)

    def undo(self, arrays: Arrays) -> Arrays:
        """Return the arrays as they are: a checkpoint may leave the copy out."""
        return arrays


@dataclass(frozen=True, slots=True)
class Split:
    """Cuts a fused tensor.

    Attributes:
        fused: A run of components of its name, like ``self_attn.qkv_proj``; what stands before and
            after it stays, so that weight and bias are both cut.
        into: What takes the run's place in each part's name, in order; names of other parameters
            must not have these runs, or the rule cannot be undone.
        sizes: The parts' lengths along ``axis``; they must add up to the tensor's.
        axis: The dimension that is cut.
    """

    fused: str
    into: tuple[str, ...]
    sizes: tuple[int, ...]
    axis: int = 0

    def apply(self, piece: Piece) -> tuple[Piece, ...]:
        """Return the parts of a match.

        Raises:
            CheckpointError: The sizes do not add up to the tensor's.
        """
        match = _find_run(self.fused, piece.name)
        if match is None:
            return (piece,)
        names = [match.expand(rf"\g<before>{name}\g<after>") for name in self.into]
        if self.axis >= len(piece.shape) or piece.shape[self.axis] != sum(self.sizes):
            raise CheckpointError(
                f"Tensor {piece.tensor} has shape {list(piece.shape)}; dimension {self.axis} "
                f"should be {sum(self.sizes)} = {' + '.join(map(str, self.sizes))}, to be split "
                f"into {', '.join(names)}."
            )
        ends = itertools.accumulate(self.sizes)
        return tuple(
            replace(piece.cut(self.axis, end - size, end), name=name)
            for name, size, end in zip(names, self.sizes, ends, strict=True)
        )

    def undo(self, arrays: Arrays) -> Arrays:
        """Return the arrays with the parts of each fused tensor put together."""
        out = dict(arrays)
        for name in arrays:
            match = _find_run(self.into[0], name)
            if match is not None:
                names = [match.expand(rf"\g<before>{part}\g<after>") for part in self.into]
                if missing := [part for part in names if part not in out]:
                    raise ValueError(f"{self} cannot be undone without {', '.join(missing)}.")
                fused = match.expand(rf"\g<before>{self.fused}\g<after>")
                out[fused] = np.concatenate([out.pop(part) for part in names], axis=self.axis)
        return out


@dataclass(frozen=True, slots=True)
class Stack:
    """Stacks tensors into one parameter along a new first dimension.

    Attributes:
        each: A run of components of their names; a ``*`` in it is the position: ``experts.*.w1``.
        into: What takes the run's place in the parameter's name.
    """

    each: str
    into: str

    def apply(self, piece: Piece) -> tuple[Piece, ...]:
        """Return a match as one place of the stacked parameter."""
        match = _find_run(self.each, piece.name)
        if match is None:
            return (piece,)
        name = match.expand(rf"\g<before>{self.into}\g<after>")
        return (replace(piece, name=name, position=int(match["position"])),)

    def undo(self, arrays: Arrays) -> Arrays:
        """Return the arrays with each stacked one taken apart."""
        out = {}
        for name, array in arrays.items():
            match = _find_run(self.into, name)
            if match is None:
                out[name] = array
                continue
            for i, part in enumerate(array):
                each = self.each.replace("*", str(i))
                out[match.expand(rf"\g<before>{each}\g<after>")] = part
        return out


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swaps the last two dimensions of tensors that a checkpoint holds as [in, out].

    Attributes:
        run: A run of components of their names.
    """

    run: str

    def apply(self, piece: Piece) -> tuple[Piece, ...]:
        """Return a match transposed."""
        if _find_run(self.run, piece.name) is None:
            return (piece,)
        return (replace(piece, is_transposed=not piece.is_transposed),)

    def undo(self, arrays: Arrays) -> Arrays:
        """Return the arrays with the matches transposed."""
        return {
            name: array.swapaxes(-1, -2) if _find_run(self.run, name) else array
            for name, array in arrays.items()
        }


def _find_run(run: str, name: str) -> re.Match[str] | None:
    """Find a run of whole components in a dotted name: groups before, position, after."""
    pattern = re.escape(run).replace(r"\*", r"(?P<position>\d+)")
    return re.fullmatch(rf"(?P<before>(?:.*\.)?){pattern}(?P<after>(?:\..*)?)", name)


#: Buffers that old transformers saved and that are computed here.
DROP_BUFFERS = Drop(r".*rotary_emb\.inv_freq|.*(self_attn|attention)\.masked_bias")


def undo_rules(rules: Sequence[Rule], arrays: Arrays) -> Arrays:
    """Return the tensors of a checkpoint that ``rules`` turn into the parameters ``arrays``.

    Args:
        rules: The family's, in order.
        arrays: Each parameter, by path.

    Returns:
        Each tensor, by the checkpoint's name.
    """
    for rule in reversed(rules):
        arrays = rule.undo(arrays)
    return arrays
