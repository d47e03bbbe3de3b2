"""Counts the cycles of a Pallas kernel from its final instructions, as the TPU compiler dumps them.

XLA gives a Pallas call no cost, but libtpu prints the program that it becomes: one line a bundle of
instructions, which issue together in a cycle (``dump.py`` has it print them). Its loops and the
regions that branches skip are found here; how often each runs is for the caller to say, since the
text does not. What it takes to issue a kernel is then the sum of bundles times runs, where a
region's bundles count at least as many cycles as its matrix products keep their busiest unit.

Waits for copies and semaphores are in no bundle: a kernel takes at least the larger of this and its
bytes over the bandwidth.

A unit of 128 rows and columns (v4, v5e, v5p) takes a row a cycle and one of 256 two, so that a
``vmatmul`` of 8 sublanes, which hold 16 rows of bfloat16 or 8 of float32, keeps it 16 or 8 cycles
(8 or 4); loading a tile of 8 sublanes of weights (``vmatpush``) takes 4. These are the rates at
which the peaks of ``chips.py`` are reached.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hexllm.plan.chips import Chip

    #: How often regions run each time that what they are inside of runs.
    Trips = Mapping[str, float] | Callable[["Region"], float | None]

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s*(LH|LB|LE|PB|PF|CT|)\s*:\s*>*\s*\{")
_BRANCH = re.compile(r"\bsbr\.\w+ [^;]*?target = \$region(\d+)")
_PRODUCT = re.compile(r"\b(vmatmul|vlatmul|vmatpush)\d?\.([\w.\[\]]*?)\.?mxu(\d)")
_PUSH_CYCLES = 4

#: Bundles after a branch that still run before it jumps, seen in the dumps of each generation.
_DELAY = 4
_DELAYS = {"v4": 1, "tpu7x": 1}

#: Opcodes that ``Region.counts`` has, by what they are counted as.
_COUNTED = {
    "dma": re.compile(r"\bdma\.(?!done)\w+"),
    "dma wait": re.compile(r"\bdma\.done"),
    "matmul": re.compile(r"\bv[lm]atmul\."),
    "spill store": re.compile(r"\b[sv]st\b[^;]*_spill"),
    "spill load": re.compile(r"\b[sv]ld\b[^;]*_spill"),
}


@dataclass(eq=False)
class Region:
    """A loop's body, what a branch skips, or the whole kernel.

    Attributes:
        name: ``kernel``; ``L1`` is its first loop or branch, ``L1.2`` the second one in that.
            A branch is a ``B``.
        first: Address of its first bundle.
        last: Address of its last bundle.
        bundles: Its own, without those of its children.
        products: Cycles that its own matrix products keep each unit.
        counts: How many of its own instructions are a ``dma`` (start of a copy), ``dma wait``,
            ``matmul``, ``spill store`` or ``spill load``.
        children: Loops and branches inside, in order.
        parent: What it is inside of.
    """

    name: str
    first: int
    last: int
    bundles: int = 0
    products: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    children: list[Region] = field(default_factory=list)
    parent: Region | None = None

    def __iter__(self) -> Iterator[Region]:
        """Go through this region and all inside it."""
        yield self
        for child in self.children:
            yield from child

    @property
    def is_loop(self) -> bool:
        """Whether it can run more than once."""
        return self.name.rpartition(".")[2].startswith("L")

    @property
    def cycles(self) -> int:
        """Cycles of one run of its own bundles."""
        return max(self.bundles, *self.products.values(), 0)

    def total(self, kind: str) -> int:
        """Return how many instructions of a kind it and all inside it have; see ``counts``."""
        return sum(region.counts[kind] for region in self)

    def issue_cycles(self, trips: Trips | None = None) -> float:
        """Return the cycles of one run of this region with all inside it, or of the kernel.

        Args:
            trips: How often a region runs each time that what it is inside of runs: by its name,
                or by a rule that takes the region and returns None where it does not know. What
                neither says runs once: loops are one step, and all branches are taken, those that
                exclude each other too, which for branches is never too little.
        """
        total = self.cycles + 0.0
        for child in self.children:
            total += _times(child, trips) * child.issue_cycles(trips)
        return total

    def issue_us(self, chip: Chip, trips: Trips | None = None) -> float:
        """Return ``issue_cycles`` as microseconds of one core."""
        return self.issue_cycles(trips) / chip.clock_hz * 1e6

    def table(self, trips: Trips | None = None) -> str:
        """Return a line for each region: bundles, busiest unit, runs and counts."""
        lines = []
        for region in self:
            counts = " ".join(f"{kind}={n}" for kind, n in sorted(region.counts.items()) if n)
            lines.append(
                f"{region.name:14} {region.first:#7x}..{region.last:<#7x} "
                f"bundles {region.bundles:5} products {max(region.products.values(), default=0):5} "
                f"runs {_times(region, trips):g} {counts}".rstrip()
            )
        return "\n".join(lines)


def _times(region: Region, trips: Trips | None) -> float:
    if trips is None or region.parent is None:
        return 1.0
    found = trips(region) if callable(trips) else trips.get(region.name)
    return 1.0 if found is None else float(found)


@dataclass(frozen=True)
class _Bundle:
    address: int
    is_loop_body: bool
    text: str


def parse_bundles(text: str, chip: Chip) -> Region:
    """Return a kernel's tree of loops and branches.

    Args:
        text: A ``*-final_bundles.txt``.
        chip: For which it was compiled.

    Raises:
        ValueError: It has no bundles, or branches and loops that do not fit together.
    """
    bundles = list(_bundles(text))
    if not bundles:
        raise ValueError("this is no dump of final bundles: no line of it is a bundle")
    spans = _spans(bundles, _DELAYS.get(chip.name, _DELAY))
    root = Region("kernel", bundles[0].address, bundles[-1].address)
    # A bundle belongs to the innermost span that holds it; an outer one starts first or ends last.
    stack = [root]
    waiting = sorted(spans, key=lambda span: (span[0], -span[1]))
    fast = chip.mxu_size == 256
    for bundle in bundles:
        while bundle.address > stack[-1].last:
            stack.pop()
        while waiting and waiting[0][0] <= bundle.address:
            first, last, kind = waiting.pop(0)
            parent = stack[-1]
            if last > parent.last:
                continue  # it leaves what it started in: counted there, as taken
            prefix = "" if parent is root else f"{parent.name}."
            child = Region(f"{prefix}{kind}{len(parent.children) + 1}", first, last, parent=parent)
            parent.children.append(child)
            stack.append(child)
        _count(stack[-1], bundle.text, fast)
    return root


def _bundles(text: str) -> Iterator[_Bundle]:
    """Take the text apart; comments of a bundle may run over many lines."""
    head: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found and head:
            yield _Bundle(int(head[1], 0), head[2] == "LB", "\n".join(lines))
        if found:
            head, lines = found, []
        if head:
            lines.append(line)
    if head:
        yield _Bundle(int(head[1], 0), head[2] == "LB", "\n".join(lines))


def _spans(bundles: list[_Bundle], delay: int) -> list[tuple[int, int, str]]:
    """Return first and last address of each loop (``L``) and of what each branch skips (``B``)."""
    starts: dict[int, int] = {}  # of regions, which are what branches name
    for bundle in bundles:
        for number in re.findall(r"Start(?:/End empty)? region (\d+)", bundle.text):
            starts.setdefault(int(number), bundle.address)
    found: dict[tuple[int, int], str] = {}
    heads = {bundle.address for bundle in bundles if bundle.is_loop_body}
    for bundle in bundles:
        for text in _BRANCH.findall(bundle.text):
            if int(text) not in starts:
                raise ValueError(f"the branch at {bundle.address:#x} goes to an unknown place")
            target, after = starts[int(text)], bundle.address + delay + 1
            if target <= bundle.address:
                found[target, after - 1] = "L"
                heads.discard(target)
            elif target > after:
                found[after, target - 1] = "B"
    if heads:
        where = ", ".join(f"{address:#x}" for address in sorted(heads))
        raise ValueError(f"no branch goes back to the loops at {where} of these final bundles")
    return [(first, last, kind) for (first, last), kind in found.items()]


def _count(region: Region, text: str, fast: bool) -> None:
    region.bundles += 1
    for kind, pattern in _COUNTED.items():
        if found := len(pattern.findall(text)):
            region.counts[kind] += found
    for opcode, rest, unit in _PRODUCT.findall(text):
        rows = 8 if ".f32" in f".{rest}" else 16
        cycles = _PUSH_CYCLES if opcode == "vmatpush" else rows // 2 if fast else rows
        region.products[int(unit)] += cycles
