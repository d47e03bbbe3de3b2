"""Goes through one computation of a schedule with a clock; ``schedule.py`` has the model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hexllm.plan.collectives import collective_of
from hexllm.plan.costs import FREE, FREE_TARGETS
from hexllm.plan.ledger import Ledger, Operation

if TYPE_CHECKING:
    import re

    from hexllm.plan.chips import Chip
    from hexllm.plan.costs import Costs
    from hexllm.plan.hlo import Computation, Instruction, Module

#: The target of the custom call that a Pallas kernel is.
PALLAS = "tpu_custom_call"

_SMALL_COPY = 2**20
_COPY_LATENCY_S = 1e-6
_REGISTER = 4096  # bytes of a vector register: what fits one takes a few cycles


@dataclass(frozen=True)
class KernelPrice:
    """What one call of a Pallas kernel takes; its time is the longer of the two.

    Attributes:
        issue_us: Microseconds to issue its instructions (``bundles.py``).
        hbm_bytes: Bytes it moves to and from HBM.
    """

    issue_us: float
    hbm_bytes: float


@dataclass(frozen=True)
class Rules:
    """What stays the same over all computations of a program.

    Attributes:
        module: The program.
        chip: It runs on.
        costs: Of its instructions.
        kernels: Prices of Pallas calls, by what their names match.
        branches: Which branch of a conditional runs, by the same.
        loops: How often a loop runs of which the program does not say it, by the same.
        with_xla: Whether XLA's cycles count where they are more.
        dearest: Whether the dearest branch runs where none is said, or the cheapest.
    """

    module: Module
    chip: Chip
    costs: Costs
    kernels: tuple[tuple[re.Pattern[str], KernelPrice], ...]
    branches: tuple[tuple[re.Pattern[str], int], ...]
    loops: tuple[tuple[re.Pattern[str], int], ...]
    with_xla: bool
    dearest: bool


@dataclass
class _Copy:
    """A copy in flight: what is left of it, and before when it cannot have ended."""

    left: float
    earliest: float


class _Copies:
    """Asynchronous copies, served in turn by the bandwidth that others leave."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._by_name: dict[str, _Copy] = {}
        self._small: deque[_Copy] = deque()
        self._large: deque[_Copy] = deque()

    def start(self, name: str, size: float, now: float) -> None:
        """Queue a copy of so many bytes of HBM."""
        copy = _Copy(size, 0.0)
        if size <= _SMALL_COPY:
            copy.earliest = now + _COPY_LATENCY_S + size / self._rate
        self._by_name[name] = copy
        (self._small if size <= _SMALL_COPY else self._large).append(copy)

    def advance(self, seconds: float) -> None:
        """Let the copies have the whole bandwidth for a time."""
        budget = seconds * self._rate
        for queue in (self._small, self._large):
            while queue and budget > 0:
                served = min(queue[0].left, budget)
                queue[0].left -= served
                budget -= served
                if queue[0].left > 0:
                    break
                queue.popleft()

    def wait(self, name: str, now: float) -> float:
        """Return how many seconds are left until a copy has ended."""
        copy = self._by_name.pop(name)
        ahead = 0.0
        for each in (*self._small, *self._large):
            ahead += each.left
            if each is copy:
                return max(ahead / self._rate, copy.earliest - now, 0.0)
        return max(copy.earliest - now, 0.0)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name


class Walk:
    """One run of a computation.

    Attributes:
        now: Seconds since its start.
        ledger: What has been done.
    """

    def __init__(self, rules: Rules, computation: Computation) -> None:
        self._rules = rules
        self._computation = computation
        self._copies = _Copies(rules.chip.hbm_bytes_per_s)
        self._collectives: dict[str, float] = {}  # when those in flight end
        self._alias: dict[str, str] = {}  # "…-update" to the "…-start" it is of
        self.now = 0.0
        self.ledger = Ledger()

    def run(self) -> Walk:
        """Go through the computation and return this walk."""
        for instruction in self._computation:
            if instruction.opcode not in FREE and instruction.target not in FREE_TARGETS:
                self._step(instruction)
        return self

    def _step(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self._loop(instruction)
        elif opcode == "call":
            self._nested([instruction.called[0]])
        elif opcode == "conditional":
            self._nested(self._choices(instruction))
        elif opcode in ("async-update", "call-update"):
            self._update(instruction)
        elif opcode.endswith("-done"):
            self._done(instruction)
        elif found := collective_of(self._rules.module, instruction):
            self.ledger.collectives[found] += 1
            seconds = found.seconds(self._rules.chip)
            if opcode.endswith("-start"):
                self._collectives[instruction.name] = self.now + seconds
            else:
                self._work("collective", instruction, seconds)
        elif opcode.endswith("-start"):
            self._start(instruction)
        elif instruction.target == PALLAS:
            self._kernel(instruction)
        else:
            self._compute(instruction)

    def _spend(self, seconds: float, hbm_bytes: float) -> None:
        """Let time pass in which so many bytes are moved first, copies after them."""
        self.now += seconds
        self._copies.advance(seconds - hbm_bytes / self._rules.chip.hbm_bytes_per_s)

    def _enter(self, category: str, instruction: Instruction, seconds: float, size: float) -> None:
        self._spend(seconds, size)
        self.ledger.add(Operation(instruction.name, category, instruction.op_name, seconds, size))

    def _work(self, category: str, instruction: Instruction, least: float) -> None:
        """Run an instruction that takes so long if its bytes do not take longer."""
        rules = self._rules
        cost = rules.costs.of(self._computation, instruction)
        seconds = max(least, cost.matmul_s, cost.hbm_bytes / rules.chip.hbm_bytes_per_s)
        self.ledger.flops += cost.flops
        self.ledger.matmul_seconds += cost.matmul_s
        self._enter(category, instruction, seconds, cost.hbm_bytes)

    def _compute(self, instruction: Instruction) -> None:
        rules = self._rules
        cost = rules.costs.of(self._computation, instruction)
        cycles = instruction.estimated_cycles
        is_small = instruction.num_bytes <= _REGISTER
        if not cost.hbm_bytes and not cost.flops and cycles is None and not is_small:
            self.ledger.unpriced[instruction.target or instruction.opcode] += 1
        if kind := rules.costs.copied(self._computation, instruction):
            self.ledger.copies[kind] += 1
        category = "matmul" if cost.flops else instruction.opcode
        xla = cycles / rules.chip.clock_hz if cycles and rules.with_xla else 0.0
        self._work(category, instruction, xla)

    def _kernel(self, instruction: Instruction) -> None:
        name = f"{instruction.name} {instruction.op_name}"
        rate = self._rules.chip.hbm_bytes_per_s
        for pattern, price in self._rules.kernels:
            if pattern.search(name):
                seconds = max(price.issue_us * 1e-6, price.hbm_bytes / rate)
                self._enter("pallas", instruction, seconds, price.hbm_bytes)
                return
        self.ledger.unpriced[name] += 1
        size = self._rules.costs.operand_bytes(self._computation, instruction)
        size += instruction.hbm_bytes
        self._enter("pallas", instruction, size / rate, size)

    def _start(self, instruction: Instruction) -> None:
        size = self._rules.costs.async_bytes(self._computation, instruction)
        self._copies.start(instruction.name, size, self.now)
        self.ledger.hbm_bytes["async copy"] += size  # type: ignore[assignment]
        self.ledger.counts["async copy"] += 1
        if kind := self._rules.costs.copied(self._computation, instruction):
            self.ledger.copies[kind] += 1

    def _update(self, instruction: Instruction) -> None:
        """Follow ``…-update``, which passes on what a ``…-start`` began."""
        if instruction.operands:
            first = instruction.operands[0]
            self._alias[instruction.name] = self._alias.get(first, first)

    def _done(self, instruction: Instruction) -> None:
        started = instruction.operands[0] if instruction.operands else ""
        started = self._alias.get(started, started)
        if started in self._copies:
            wait = self._copies.wait(started, self.now)
            self._enter("copy wait", instruction, wait, 0)
        elif started in self._collectives:
            wait = max(0.0, self._collectives.pop(started) - self.now)
            self._enter("collective wait", instruction, wait, 0)

    def _loop(self, instruction: Instruction) -> None:
        times = self._rules.module.trip_count(instruction)
        if times is None:
            name = f"{instruction.name} {instruction.op_name}"
            said = (n for pattern, n in self._rules.loops if pattern.search(name))
            times = next(said, None)
        if times is None:
            self.ledger.unpriced[f"while {instruction.op_name}"] += 1
        self._nested([instruction.body], 1 if times is None else times)

    def _choices(self, instruction: Instruction) -> list[str]:
        name = f"{instruction.name} {instruction.op_name}"
        branches = list(instruction.branches)
        for pattern, index in self._rules.branches:
            if pattern.search(name) and index < len(branches):
                return [branches[index]]
        return branches

    def _nested(self, names: list[str], times: int = 1) -> None:
        """Run one of some computations so often: the dearest, or the cheapest."""
        module = self._rules.module
        walks = [Walk(self._rules, module.computations[name]).run() for name in names]
        pick = max if self._rules.dearest else min
        ran = pick(walks, key=lambda walk: walk.now)
        self.ledger.merge(ran.ledger, times)
        self._spend(ran.now * times, ran.ledger.total_hbm_bytes * times)
