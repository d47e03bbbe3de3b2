"""Sends one round of a workload: a closed loop that keeps so many requests open."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.sse import Exchange, exchange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.workloads import Workload

#: How often the client asks whether it is itself late, in seconds.
HEARTBEAT = 0.02


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what is in each besides the prompt.

    Attributes:
        host: A loopback address.
        port: Its port.
        model: The ``model`` field.
        extra: Further fields of the body, for one server's dialect.
    """

    host: str
    port: int
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def request(self, prompt: str, output_len: int) -> bytes:
        """Return the bytes of one streaming, greedy completion request of a forced length."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        payload = json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{self.port}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + payload


def parse_loopback(url: str) -> tuple[str, int]:
    """Return host and port of an ``http`` URL on this machine.

    Raises:
        ValueError: It is another machine's, or no such URL. Load is not sent over a network.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.path.rstrip("/"):
        raise ValueError(f"{url!r} is not of the form http://127.0.0.1:7080")
    if parts.hostname == "localhost":
        return "127.0.0.1", parts.port or 80
    is_loopback = False
    with suppress(ValueError):
        is_loopback = ipaddress.ip_address(parts.hostname).is_loopback
    if not is_loopback:
        raise ValueError(
            f"{url!r} is not on this machine: only addresses like 127.0.0.1 are measured"
        )
    return parts.hostname, parts.port or 80


@dataclass(slots=True)
class Round:
    """What one round gave.

    Attributes:
        exchanges: One a request, in the order of the prompts.
        lags: How late the client woke each time, in seconds: a client that gets no CPU time reads
            tokens in bursts, and then its latencies tell nothing about the server.
    """

    exchanges: list[Exchange]
    lags: list[float]


async def run_round(
    target: Target, workload: Workload, prompts: Sequence[str], max_seconds: float
) -> Round:
    """Send every prompt, ``workload.concurrency`` at once, for at most ``max_seconds``."""
    requests = [target.request(prompt, workload.output_len) for prompt in prompts]
    result = Round([Exchange() for _ in prompts], [])
    queue = iter(list(zip(requests, result.exchanges, strict=True)))

    async def work() -> None:
        for request, into in queue:
            await exchange(target.host, target.port, request, into)

    async def beat() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(HEARTBEAT)
            result.lags.append(time.perf_counter() - start - HEARTBEAT)

    heart = asyncio.create_task(beat())
    workers = [asyncio.create_task(work()) for _ in range(workload.concurrency)]
    try:
        done, open_ = await asyncio.wait(workers, timeout=max_seconds)
        for worker in open_:
            worker.cancel()
        await asyncio.gather(*open_, return_exceptions=True)
        for worker in done:
            worker.result()
    finally:
        heart.cancel()
    return result
