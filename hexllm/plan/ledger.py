"""What a program's execution is made of: time and bytes by kind of work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hexllm.plan.collectives import Collective

#: Type and shape of an array.
ArrayKind = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Operation:
    """An instruction as it ran.

    Attributes:
        name: In its module.
        category: As in ``Ledger.seconds``.
        op_name: Where in the traced program it comes from.
        seconds: One run.
        hbm_bytes: One run.
        times: How often it ran.
    """

    name: str
    category: str
    op_name: str
    seconds: float
    hbm_bytes: float
    times: int = 1


@dataclass
class Ledger:
    """Time and bytes of one run of a computation.

    Attributes:
        seconds: By category: ``matmul``, ``fusion``, ``pallas``, ``copy``, ``copy wait``,
            ``collective``, ``collective wait``, or an opcode.
        hbm_bytes: By the same, and ``async copy``.
        counts: How often something of a category ran.
        flops: Of matrix products.
        matmul_seconds: What they take at the chip's peak.
        collectives: How often each communication ran.
        copies: How often a whole array was copied to another place of HBM, by its kind.
        unpriced: Kernels without a price, which count as their operands' bytes; loops that run
            until data says so, which count once; and opcodes that XLA gives no time and that move
            nothing to or from HBM (sorts in VMEM), which count as nothing.
        operations: All that took time.
    """

    seconds: Counter[str] = field(default_factory=Counter)
    hbm_bytes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    flops: float = 0.0
    matmul_seconds: float = 0.0
    collectives: Counter[Collective] = field(default_factory=Counter)
    copies: Counter[ArrayKind] = field(default_factory=Counter)
    unpriced: Counter[str] = field(default_factory=Counter)
    operations: list[Operation] = field(default_factory=list)

    @property
    def total_hbm_bytes(self) -> float:
        """Bytes to and from HBM, of all categories."""
        return sum(self.hbm_bytes.values())

    def add(self, operation: Operation) -> None:
        """Enter an instruction."""
        category = operation.category
        self.seconds[category] += operation.seconds  # type: ignore[assignment]
        self.hbm_bytes[category] += operation.hbm_bytes  # type: ignore[assignment]
        self.counts[category] += operation.times
        if operation.seconds > 0:
            self.operations.append(operation)

    def merge(self, other: Ledger, times: int = 1) -> None:
        """Enter all that another computation did, so many times."""
        for mine, theirs in (
            (self.seconds, other.seconds),
            (self.hbm_bytes, other.hbm_bytes),
            (self.counts, other.counts),
            (self.collectives, other.collectives),
            (self.copies, other.copies),
            (self.unpriced, other.unpriced),
        ):
            for key, value in theirs.items():
                mine[key] += value * times  # type: ignore[index]
        self.flops += other.flops * times
        self.matmul_seconds += other.matmul_seconds * times
        self.operations += [
            Operation(
                each.name,
                each.category,
                each.op_name,
                each.seconds,
                each.hbm_bytes,
                each.times * times,
            )
            for each in other.operations
        ]

    def top(self, count: int = 10) -> list[Operation]:
        """Return the operations that took longest, all their runs together."""
        return sorted(self.operations, key=lambda each: -each.seconds * each.times)[:count]
