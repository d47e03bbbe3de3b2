"""Overloads a server: requests at a multiple of its capacity, some clients hanging up midway.

    python benchmarks/overload.py --launch "hexllm serve --model=MODEL --port=7081" --seconds=120
    python benchmarks/overload.py --url http://127.0.0.1:7080 --pid PID --factor=2 --drop=0.33

First a closed loop measures the capacity, in whole requests a second. Then requests come on a
schedule that does not wait for answers, and a share of the clients hangs up at a random moment:
in the queue, in the prompt or between tokens. A server passes when every other request is either
whole or a 429, its memory does not grow, and afterwards it holds nothing any more.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in {None, ""}:
    # Run as a script: the siblings get the same dotted names as in the tests.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.load import Target, parse_loopback
from benchmarks.metrics import Completion, percentile, read_completion
from benchmarks.processes import LaunchError, launch, tree_memory
from benchmarks.sse import Exchange, exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What a server that does nothing says of itself in /metrics: each of these is 0.
IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "hexllm:requests_in_flight",
)
#: How much more memory than in the first third of the time is growth.
MAX_GROWTH = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent.

    Attributes:
        seconds: How long requests come.
        factor: Requests a second, as a multiple of the capacity.
        drop: Share of the clients that hang up before the end.
        concurrency: Requests kept open while the capacity is measured.
        capacity_seconds: How long it is measured.
        prompt_words: The longest prompt; lengths are drawn evenly from 1 up.
        output_len: The longest output in tokens; likewise.
        seed: Of everything that is drawn.
    """

    seconds: float = 120.0
    factor: float = 2.0
    drop: float = 1 / 3
    concurrency: int = 32
    capacity_seconds: float = 10.0
    prompt_words: int = 64
    output_len: int = 64
    seed: int = 0


@dataclass(slots=True)
class Report:
    """What happened. Times in seconds, memory in bytes.

    Attributes:
        capacity: Requests a second of the closed loop.
        sent: Requests of the open loop.
        completed: Of these, those answered in full.
        refused: Those answered 429.
        dropped: Those whose client hung up.
        errors: How each other one failed.
        ttft_p99: From sending to the first text, over the completed.
        latency_p50: From sending to the end, over the completed.
        latency_p99: Likewise.
        memory: Resident bytes of the server's processes, a sample a second.
        held: What the server still held at the end, by metric; empty when nothing.
    """

    capacity: float = 0.0
    sent: int = 0
    completed: int = 0
    refused: int = 0
    dropped: int = 0
    errors: list[str] = field(default_factory=list)
    ttft_p99: float | None = None
    latency_p50: float | None = None
    latency_p99: float | None = None
    memory: list[int] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)

    @property
    def growth(self) -> float:
        """Growth of memory from the first third to the last, by their medians."""
        third = max(1, len(self.memory) // 3)
        if len(self.memory) < 2 or not self.memory[0]:
            return 0.0
        first, last = self.memory[:third], self.memory[-third:]
        return statistics.median(last) / statistics.median(first) - 1

    def faults(self) -> list[str]:
        """Return what the server did wrong, as sentences."""
        faults = [f"{len(self.errors)} requests failed, e.g.: {e}" for e in self.errors[:1]]
        if not self.refused:
            faults.append("nothing was refused: this was no overload")
        if self.growth > MAX_GROWTH:
            faults.append(f"memory grew by {self.growth:.0%}")
        faults += [f"{name} is still {value:g}" for name, value in self.held.items()]
        return faults


class _Load:
    """Draws requests and sends them."""

    def __init__(self, target: Target, plan: Plan) -> None:
        self._target = target
        self._plan = plan
        self._random = random.Random(plan.seed)

    async def send(self, *, is_long: bool = False) -> Exchange:
        words = self._random.randint(1, self._plan.prompt_words)
        prompt = " ".join(self._random.choice(("red", "ox", "sun", "sea")) for _ in range(words))
        shortest = self._plan.output_len if is_long else 1
        length = self._random.randint(shortest, self._plan.output_len)
        request = self._target.request(prompt, length)
        into = Exchange()
        await exchange(self._target.host, self._target.port, request, into)
        return into

    async def capacity(self) -> tuple[float, float]:
        """Return requests a second of a closed loop, and the median seconds of one."""
        end = time.perf_counter() + self._plan.capacity_seconds
        durations: list[float] = []

        async def work() -> None:
            while time.perf_counter() < end:
                done = read_completion(await self.send())
                if isinstance(done, Completion) and done.ended <= end:
                    durations.append(done.ended - done.sent)

        await asyncio.gather(*(work() for _ in range(self._plan.concurrency)))
        if not durations:
            raise LaunchError("No request was answered while the capacity was measured.")
        return len(durations) / self._plan.capacity_seconds, statistics.median(durations)

    async def overload(self, rate: float, typical: float) -> list[Exchange | None]:
        """Send at ``rate`` a second whatever comes back; None stands for a client that left."""

        async def one(patience: float | None) -> Exchange | None:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    # Whoever leaves asked for much: a short answer would be whole before that.
                    return await self.send(is_long=patience is not None)
            return None

        tasks = []
        start = time.perf_counter()
        for i in range(int(rate * self._plan.seconds)):
            await asyncio.sleep(max(0.0, start + i / rate - time.perf_counter()))
            leaves = self._random.random() < self._plan.drop
            patience = self._random.uniform(0, typical) if leaves else None
            tasks.append(asyncio.create_task(one(patience)))
        return await asyncio.gather(*tasks)


async def _watch_memory(pid: int, into: list[int]) -> None:
    while True:
        into.append(tree_memory(pid, with_shares=False)[0])
        await asyncio.sleep(1.0)


async def overload(target: Target, plan: Plan, pid: int | None) -> Report:
    """Run ``plan`` against a server; memory is that of ``pid`` and all that it started."""
    load, report = _Load(target, plan), Report()
    report.capacity, typical = await load.capacity()
    watch = None if pid is None else asyncio.create_task(_watch_memory(pid, report.memory))
    exchanges = await load.overload(plan.factor * report.capacity, typical)
    if watch is not None:
        watch.cancel()
    _count(exchanges, report)
    report.held = await _wait_until_idle(target)
    return report


def _count(exchanges: Sequence[Exchange | None], report: Report) -> None:
    done: list[Completion] = []
    report.sent = len(exchanges)
    for each in exchanges:
        if each is None:
            report.dropped += 1
        elif each.failure is not None and each.failure.startswith("HTTP 429"):
            report.refused += 1
        elif each.failure is not None:
            report.errors.append(each.failure)
        else:
            report.completed += 1
            read = read_completion(each)
            # A tokenizer may show no text for the few tokens that were asked for.
            if isinstance(read, Completion):
                done.append(read)
    latencies = [completion.ended - completion.sent for completion in done]
    report.ttft_p99 = percentile([c.stamps[0] - c.sent for c in done], 99)
    report.latency_p50 = percentile(latencies, 50)
    report.latency_p99 = percentile(latencies, 99)


async def _wait_until_idle(target: Target, seconds: float = 10.0) -> dict[str, float]:
    end = time.monotonic() + seconds
    while (held := await asyncio.to_thread(read_held, target)) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return held


def read_held(target: Target) -> dict[str, float]:
    """Return what the server says that it holds: the metrics of IDLE that are not 0."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=10.0)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    found = dict.fromkeys(IDLE, 0.0)
    for line in lines:
        name = line.split("{")[0].split(" ")[0]
        if name in found:
            found[name] += float(line.rsplit(" ", 1)[1])
    return {name: value for name, value in found.items() if value}


def main(argv: Sequence[str] | None = None) -> int:
    """Overload a server and print what happened; 1 when it did anything wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server on this machine, such as http://127.0.0.1:7080")
    where.add_argument("--launch", help="the command of a server to start, with its --port=N")
    parser.add_argument("--pid", type=int, help="the process whose memory counts, with --url")
    parser.add_argument("--port", type=int, default=7081, help="the port of --launch")
    parser.add_argument("--model", default="", help="the model field of the requests")
    for name, value in asdict(Plan()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    given = parser.parse_args(argv)
    plan = Plan(**{name: getattr(given, name) for name in asdict(Plan())})
    with ExitStack() as stack:
        host, port = parse_loopback(given.url) if given.url else ("127.0.0.1", given.port)
        pid = given.pid
        if given.launch:
            pid, _ = stack.enter_context(launch(given.launch, host, port, 600.0))
        report = asyncio.run(overload(Target(host, port, given.model), plan, pid))
    print(json.dumps({**asdict(report), "growth": report.growth}))
    for fault in report.faults():
        print(fault, file=sys.stderr)
    return 1 if report.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
