"""Estimates how long a compiled program takes, by going through its schedule.

The model, which is the chip's at its datasheet's rates and nothing measured:

- one TensorCore runs the instructions in the module's order;
- one HBM serves them and the asynchronous copies: an instruction has the bandwidth first, copies
  in flight get what it leaves, in the order of their start, except that those of up to 1 MiB
  overtake; so no byte is moved for nothing, and no second of bandwidth is used twice;
- an instruction takes the longer of its products at the peak rate and its bytes at the bandwidth
  (``roof``), or that and XLA's own cycles (``xla``, which is too high where memory is the limit);
- a loop is as many times its body; of a conditional the branch that is said, or else the dearest
  (and the cheapest, for the total beside it); a Pallas kernel, of which XLA knows nothing, is what
  the caller says of it.

Left out: instruction overheads, waits inside kernels, contention on the links, the host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hexllm.plan.costs import Costs
from hexllm.plan.walk import PALLAS, KernelPrice, Rules, Walk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hexllm.plan.chips import Chip
    from hexllm.plan.hlo import Computation, Module
    from hexllm.plan.ledger import Ledger


@dataclass(frozen=True)
class Estimate:
    """Three times of a program, and what they are made of.

    Attributes:
        chip: On which it would run.
        floor_us: Nothing can be faster: the larger of the bytes that must be read over the
            bandwidth and the products over the peak.
        roof_us: The schedule at the datasheet's rates, with each conditional's dearest branch.
        xla_us: The schedule with XLA's own cycles, likewise.
        cheapest_roof_us: ``roof_us`` with each conditional's cheapest branch.
        cheapest_xla_us: ``xla_us`` likewise.
        ledger: What ``roof_us`` is made of.
        xla_ledger: What ``xla_us`` is made of.
    """

    chip: Chip
    floor_us: float
    roof_us: float
    xla_us: float
    cheapest_roof_us: float
    cheapest_xla_us: float
    ledger: Ledger
    xla_ledger: Ledger

    @property
    def ratio(self) -> float:
        """The roof over the floor: 1 is as fast as can be."""
        return self.roof_us / self.floor_us if self.floor_us else float("inf")

    def copies_of(self, dims: tuple[int, ...], dtype: str | None = None) -> int:
        """Return how often a whole array of this shape is copied from HBM to HBM in a run.

        Args:
            dims: Its shape.
            dtype: Its type as HLO names it (``bf16``), or None for any.
        """
        kinds = self.ledger.copies.items()
        return sum(n for kind, n in kinds if kind[1] == dims and dtype in (None, kind[0]))


def simulate(
    module: Module,
    chip: Chip,
    *,
    kernels: Mapping[str, KernelPrice | tuple[float, float]] | None = None,
    branches: Mapping[str, int] | None = None,
    loops: Mapping[str, int] | None = None,
    floor_bytes: float | None = None,
) -> Estimate:
    """Return a program's estimated times.

    Args:
        module: The program.
        chip: On which every device runs it.
        kernels: What a call of a Pallas kernel takes, by a regular expression that is searched in
            ``"<instruction's name> <op_name>"``; the first that is found counts. Kernels without
            a price cost their operands' and results' bytes and stand in ``Ledger.unpriced``.
        branches: Which branch (0 is that of False) of a conditional runs, by a regular expression
            as above.
        loops: How often a loop runs whose end depends on data, by the same. Those that nothing is
            said of count once, and stand in ``Ledger.unpriced``.
        floor_bytes: Bytes that must be moved in any case. When None: what the program reads of its
            parameters, each byte once, plus the kernels' bytes; a cache that the program holds
            more of than it reads needs the caller's own number.
    """
    prices = tuple(
        (re.compile(text), price if isinstance(price, KernelPrice) else KernelPrice(*price))
        for text, price in (kernels or {}).items()
    )
    chosen = tuple((re.compile(text), index) for text, index in (branches or {}).items())
    counts = tuple((re.compile(text), times) for text, times in (loops or {}).items())
    costs = Costs(module, chip)

    def walk(with_xla: bool, dearest: bool) -> Walk:
        rules = Rules(module, chip, costs, prices, chosen, counts, with_xla, dearest)
        return Walk(rules, module.entry).run()

    roof, xla = walk(with_xla=False, dearest=True), walk(with_xla=True, dearest=True)
    if floor_bytes is None:
        floor_bytes = parameter_bytes(module, costs) + roof.ledger.hbm_bytes["pallas"]
    floor = max(floor_bytes / chip.hbm_bytes_per_s, roof.ledger.matmul_seconds)
    return Estimate(
        chip=chip,
        floor_us=floor * 1e6,
        roof_us=roof.now * 1e6,
        xla_us=xla.now * 1e6,
        cheapest_roof_us=walk(with_xla=False, dearest=False).now * 1e6,
        cheapest_xla_us=walk(with_xla=True, dearest=False).now * 1e6,
        ledger=roof.ledger,
        xla_ledger=xla.ledger,
    )


def parameter_bytes(module: Module, costs: Costs) -> int:
    """Return the bytes of HBM that a program reads of its parameters, each counted once.

    What only Pallas kernels read counts as nothing: their prices say what that is.
    """
    entry = module.entry
    return sum(
        _read_once(entry, each.name, each.hbm_bytes, costs) for each in entry.parameters.values()
    )


def _read_once(entry: Computation, name: str, full: int, costs: Costs) -> int:
    total = 0
    for user, index in entry.users.get(name, ()):
        if user.opcode == "bitcast":
            total += _read_once(entry, user.name, full, costs)
        elif user.opcode == "slice-start":
            total += user.arrays[1].num_bytes
        elif user.target != PALLAS and not (user.opcode == "tuple" and user.is_root):
            total += costs.read_by(entry, user, index, full)
    return min(total, full)
