"""How a checkpoint's tensors become a family's parameters, with both ends checked.

A family's parameter paths are Hugging Face's names, so most families need no rule. Each rule takes
a piece of the checkpoint (at first a whole tensor under its own name) and gives the pieces it turns
into; rules run in order, each on what the one before it gave.
"""

from __future__ import annotations

import difflib
import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hexllm.core.checkpoint import TensorInfo
    from hexllm.model.specs import ParamSpec

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


def match_tensors(
    rules: Sequence[Rule],
    tensors: Mapping[str, TensorInfo],
    params: Mapping[str, ParamSpec],
    *,
    uri: str,
    family: str,
) -> dict[str, tuple[Piece, ...]]:
    """Find where each parameter comes from, and check that nothing is left at either end.

    Args:
        rules: The family's, in order.
        tensors: The checkpoint's headers.
        params: The specs to fill, by path.
        uri: The checkpoint's, for messages.
        family: The family's name, for messages.

    Returns:
        Each parameter's pieces, by path: one, or one for each place of a stacked parameter.

    Raises:
        CheckpointError: A parameter is missing, doubled or of another shape, or a tensor is
            neither used nor dropped on purpose.
    """
    found: dict[str, list[Piece]] = {}
    for tensor, info in tensors.items():
        pieces: tuple[Piece, ...] = (
            Piece(tensor, tensor, tuple(slice(0, size) for size in info.shape)),
        )
        for rule in rules:
            pieces = tuple(out for piece in pieces for out in rule.apply(piece))
        for piece in pieces:
            found.setdefault(piece.name, []).append(piece)

    missing = [path for path in params if path not in found]
    unused = [piece for path in found if path not in params for piece in found[path]]
    _check_ends(missing, unused, uri=uri, family=family)
    for path, spec in params.items():
        _check_pieces(path, spec, found[path], tensors, uri=uri, family=family)
    return {path: tuple(sorted(found[path], key=lambda p: p.position or 0)) for path in params}


def _check_ends(missing: list[str], unused: list[Piece], *, uri: str, family: str) -> None:
    if not missing and not unused:
        return
    tensors = list(dict.fromkeys(piece.tensor for piece in unused))
    problems = []
    if missing:
        problems.append(f"{_count(missing, 'parameter')} missing ({_first(missing)})")
    if tensors:
        problems.append(f"{_count(tensors, 'tensor')} unused ({_first(tensors)})")
    hints = []
    names = [piece.name for piece in unused]
    for fused in ("gate_up_proj", "qkv_proj", "query_key_value", "experts"):
        if any(fused in name for name in names):
            hints.append(f"The checkpoint has {fused} tensors: choose a family that reads them.")
            break
    else:
        for path in missing[:3]:
            close = difflib.get_close_matches(path, names[:1000], n=1, cutoff=0.8)
            hints += [f"Is {name} meant to be {path}?" for name in close]
    if "lm_head.weight" in missing:
        hints.append("Set tie_word_embeddings in config.json if the model has no head of its own.")
    message = f"Checkpoint {uri} does not fit family {family!r}: {', '.join(problems)}."
    raise CheckpointError(" ".join([message, *hints]))


def _check_pieces(
    path: str,
    spec: ParamSpec,
    pieces: list[Piece],
    tensors: Mapping[str, TensorInfo],
    *,
    uri: str,
    family: str,
) -> None:
    is_stacked = any(piece.position is not None for piece in pieces)
    shape = spec.shape[1:] if is_stacked else spec.shape
    for piece in pieces:
        if piece.shape != shape:
            raise CheckpointError(
                f"Checkpoint {uri} does not fit family {family!r}: tensor {piece.tensor} in "
                f"{tensors[piece.tensor].file} gives {path} the shape {list(piece.shape)}, but "
                f"config.json asks for {list(shape)}."
            )
    places = [piece.position for piece in pieces]
    expected = list(range(spec.shape[0])) if is_stacked else [None]
    if sorted(places, key=lambda place: -1 if place is None else place) != expected:
        gaps = [str(place) for place in expected if place not in places]
        lacking = f"; number {_first(gaps)} is missing" if is_stacked and gaps else ""
        raise CheckpointError(
            f"Checkpoint {uri} does not fit family {family!r}: {path} takes "
            f"{_count(expected, 'tensor')}, and {len(pieces)} came "
            f"({_first([piece.tensor for piece in pieces])}){lacking}."
        )


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _first(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
