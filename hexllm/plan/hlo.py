"""Reads a scheduled HLO module's text (``compiled.as_text()``): what runs, in which order, on what.

The text of a program for a TPU says more than JAX's own analyses do: the order is the order of
execution, an array's layout says whether it lies in HBM or in VMEM (``S(1)``), and a fusion carries
the compiler's own estimate of its cycles. Only what estimates need is taken apart; attributes are
searched when they are asked for, because most of a module's megabytes are attributes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bits of an element. ``E(4)`` in a layout overrides them.
_BITS = {
    **dict.fromkeys(("token", "opaque"), 0),
    **dict.fromkeys(("pred", "s4", "u4", "s2", "u2", "s8", "u8"), 8),
    **dict.fromkeys(("f8e4m3fn", "f8e5m2", "f8e4m3b11fnuz", "f8e4m3", "f8e8m0fnu"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
}

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=?]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|async_computation|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"%([\w.\-]+)")

HBM, VMEM = 0, 1


@dataclass(frozen=True)
class Array:
    """One array of a shape, as it lies in memory.

    Attributes:
        dtype: HLO's name: ``bf16``.
        dims: Its logical shape.
        layout: The text of its layout: ``1,0:T(8,128)(2,1)S(1)``.
        space: The memory it lies in: ``HBM``, ``VMEM``, or another number (semaphores, scalars).
        num_bytes: What it takes, the padding of its tiles included.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str
    space: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Elements, without padding."""
        return math.prod(self.dims)

    @property
    def hbm_bytes(self) -> int:
        """Bytes when it lies in HBM, else 0."""
        return self.num_bytes if self.space == HBM else 0


@lru_cache(maxsize=65536)
def parse_shape(text: str) -> tuple[Array, ...]:
    """Return the arrays of a shape in their order, those of nested tuples too."""
    return tuple(_array(*found) for found in _ARRAY.findall(text) if found[0] in _BITS)


def _array(dtype: str, dims_text: str, layout: str) -> Array:
    dims = tuple(int(part.strip("<=?")) for part in dims_text.split(",") if part)
    space = re.search(r"S\((\d+)\)", layout)
    bits = re.search(r"E\((\d+)\)", layout)
    width = int(bits[1]) if bits else _BITS[dtype]
    size = math.ceil(math.prod(_padded(dims, layout)) * width / 8)
    return Array(dtype, dims, layout, int(space[1]) if space else HBM, size)


def _padded(dims: tuple[int, ...], layout: str) -> list[int]:
    """Return the dimensions rounded up to whole tiles, which cover the minor-most ones."""
    padded = list(dims)
    order = [int(part) for part in layout.partition(":")[0].split(",") if part.isdigit()]
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile is None or len(order) != len(dims):
        return padded
    sizes = [int(part) for part in tile[1].split(",")]
    for axis, size in zip(order, reversed(sizes), strict=False):
        padded[axis] = -(-padded[axis] // size) * size
    return padded


@dataclass(eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Unique in its module.
        opcode: HLO's name of what it does: ``fusion``.
        shape: The text of its result's shape.
        operands: Names of its operands, in order.
        arguments: The text between its parentheses (a parameter's number, a constant's value).
        attributes: The text after them.
        is_root: Whether it is its computation's result.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result."""
        return parse_shape(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its result, wherever it lies."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """Bytes of its result that lie in HBM."""
        return sum(array.hbm_bytes for array in self.arrays)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations it names, other than a conditional's branches."""
        return tuple(_CALLED.findall(self.attributes))

    @cached_property
    def body(self) -> str:
        """The computation that a loop repeats; empty for all else."""
        found = re.search(r"\bbody=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """A conditional's branches: that of index 0 (or of False) first."""
        if found := _BRANCHES.search(self.attributes):
            return tuple(_NAME.findall(found[1]))
        return tuple(
            name
            for side in ("false", "true")
            for name in re.findall(rf"{side}_computation=%?([\w.\-]+)", self.attributes)
        )

    @cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate, where it has one (fusions and convolutions)."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        cycles = int(found[1]) if found else 0
        return cycles if 0 < cycles < 2**60 else None  # 2**63 stands for "unknown"

    @cached_property
    def op_name(self) -> str:
        """Where in the traced program it comes from: ``jit(step)/layers/dot_general``."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @cached_property
    def target(self) -> str:
        """A custom call's target."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @cached_property
    def group_size(self) -> int:
        """How many devices take part in one group of a collective; 1 when it names none."""
        text = self.attributes
        if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
            return found[1].count(",") + 1
        if found := re.search(r"replica_groups=\[\d+,(\d+)\]", text):
            return int(found[1])
        if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
            sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
            return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'([^']+)'", found[2]))
        if found := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
            return len(set(re.findall(r"\d+", found[1])))
        return 1

    @cached_property
    def known_trip_count(self) -> int | None:
        """How often a loop runs, where its attributes say so."""
        found = re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', self.attributes)
        return int(found[1]) if found else None


@dataclass(eq=False)
class Computation:
    """A list of instructions in the order of their execution.

    Attributes:
        name: Unique in its module.
        instructions: In order.
    """

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by their names."""
        return {each.name: each for each in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction that is its result."""
        return next((each for each in self.instructions if each.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by their numbers."""
        found = (each for each in self.instructions if each.opcode == "parameter")
        return {int(each.arguments): each for each in found}

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Who uses each instruction, and as which operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {}
        for each in self.instructions:
            for index, operand in enumerate(each.operands):
                found.setdefault(operand, []).append((each, index))
        return found


@dataclass(eq=False)
class Module:
    """A scheduled program.

    Attributes:
        name: Of the traced function: ``jit_step``.
        computations: By name.
        entry: The one that runs first.
    """

    name: str
    computations: dict[str, Computation]
    entry: Computation

    def __iter__(self) -> Iterator[Instruction]:
        """Go through the instructions of every computation, fused ones too."""
        for computation in self.computations.values():
            yield from computation

    def trip_count(self, loop: Instruction) -> int | None:
        """Return how often a ``while`` runs, or None where its text does not say it.

        Where its attributes do not, its condition does if that is no more than a counter's
        comparison with a number: JAX counts from 0 in steps of 1.
        """
        if loop.known_trip_count is not None:
            return loop.known_trip_count
        found = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)
        if found is None:
            return None
        where = self.computations[found[1]]
        while where.root.opcode == "fusion":
            where = self.computations[where.root.called[0]]
        compared = [where.by_name[name] for name in where.root.operands]
        is_scalar = all(not array.dims for each in compared for array in each.arrays)
        limits = [int(each.arguments) for each in compared if each.arguments.strip().isdigit()]
        if where.root.opcode != "compare" or not is_scalar or compared[1].opcode != "constant":
            return None
        return limits[-1] if limits and "direction=LT" in where.root.attributes else None


def parse_module(text: str) -> Module:
    """Take a module's text apart.

    Args:
        text: As ``compiled.as_text()`` or an HLO dump has it.

    Raises:
        ValueError: It is no scheduled HLO module.
    """
    header = re.match(r"\s*HloModule ([^\s,]+)([^\n]*)", text)
    if header is None or "is_scheduled=true" not in header[2]:
        raise ValueError("this is no text of a scheduled HLO module")
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if line.startswith("  "):
            if current is not None and " = " in line:
                current.instructions.append(_instruction(line))
        elif line.endswith("{") and (found := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
            current = computations.setdefault(found[2], Computation(found[2]))
            entry = current if found[1] else entry
        elif line.startswith("}"):
            current = None
    if entry is None:
        raise ValueError(f"HLO module {header[1]} has no ENTRY computation")
    return Module(header[1], computations, entry)


def _instruction(line: str) -> Instruction:
    left, _, rest = line.strip().partition(" = ")
    is_root = left.startswith("ROOT ")
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end + 1 :]
    start = rest.index("(")
    end = _closing(rest, start)
    arguments = rest[start + 1 : end - 1]
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=rest[:start],
        shape=shape,
        operands=tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=rest[end:],
        is_root=is_root,
    )


def _closing(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at ``start``."""
    depth, at = 0, start
    while True:
        closing = text.index(")", at) + 1
        depth += text.count("(", at, closing) - 1
        at = closing
        if depth == 0:
            return closing
