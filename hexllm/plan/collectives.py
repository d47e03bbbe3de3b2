"""What communication between chips costs, by the usual model of rings: latency and bandwidth.

XLA shows no times of its own for collectives, so these rest on assumed links (``chips.py``). The
formulas are the textbook's (Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective
communication operations in MPICH"), for a ring whose members send both ways at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hexllm.plan.chips import Chip
    from hexllm.plan.hlo import Array, Instruction, Module

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


@dataclass(frozen=True)
class Collective:
    """A communication.

    Attributes:
        kind: One of ``KINDS``.
        group_size: Devices that take part.
        num_bytes: Of the whole array: what an all-reduce adds up, an all-gather gives, a
            reduce-scatter takes, and what each device sends in the other kinds.
    """

    kind: str
    group_size: int
    num_bytes: int

    def seconds(self, chip: Chip) -> float:
        """Return how long it takes on its own."""
        n, size = self.group_size, self.num_bytes
        if n < 2 and self.kind != "collective-permute":
            return 0.0
        # In a ring of three and more the two directions halve the number of hops.
        hops = (n - 1) * chip.hop_s / (2 if n > 2 else 1)
        share = (n - 1) / n * size / chip.ring_bytes_per_s
        if self.kind == "all-reduce":
            return 2 * (share + hops)
        if self.kind in ("all-gather", "reduce-scatter"):
            return share + hops
        if "all-to-all" in self.kind:
            # Half of the data crosses the middle of a torus whose side has about sqrt(n) links.
            return max(2.0, math.sqrt(n)) / 4 * size / chip.ici_bytes_per_s + n / 2 * chip.hop_s
        return size / chip.ici_bytes_per_s + chip.hop_s


def collective_of(module: Module, instruction: Instruction) -> Collective | None:
    """Return the communication that an instruction is, starts, or has fused into it, if any."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        return Collective(kind, instruction.group_size, _whole_bytes(kind, instruction))
    if instruction.opcode not in ("fusion", "async-start"):
        return None
    for inner in _inside(module, instruction):
        found = collective_of(module, inner)
        if found is None:
            continue
        if inner.opcode == "all-reduce" and "reduce-scatter" in "".join(instruction.called):
            # "%all-reduce-scatter": written as an all-reduce of which each device keeps a part.
            return Collective("reduce-scatter", found.group_size, found.num_bytes)
        return found
    return None


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    for name in instruction.called:
        for inner in module.computations.get(name, ()):
            if inner.opcode not in ("parameter", "constant"):
                yield inner


def _whole_bytes(kind: str, instruction: Instruction) -> int:
    arrays: tuple[Array, ...] = instruction.arrays
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        # (operands, results, context), as many operands as results; an all-reduce has results only.
        data = [array for array in arrays if array.dims]
        arrays = tuple(data[len(data) // 2 :])
    total = sum(array.num_bytes for array in arrays)
    return total * instruction.group_size if kind == "reduce-scatter" else total
