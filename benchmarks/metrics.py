"""Turns stamped streams into figures, by rules that are the same for every server.

- Output tokens are the server's own ``usage.completion_tokens``; where it sends no usage, the
  chunks with text in them.
- Time to first token: from sending the request to the first chunk with text.
- Inter-token latency: the gap between two chunks with text. A server that sends several tokens a
  chunk shows it here, not in TPOT.
- TPOT (time per output token) of a request: first text to last text, by the tokens after the first.
- Throughput: all tokens of a round by the time from the first request to the last response.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.sse import DONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.load import Round
    from benchmarks.sse import Exchange
    from benchmarks.workloads import Workload

MILLI = 1e3


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request, read.

    Attributes:
        sent: When it was sent.
        ended: When its response ended.
        stamps: Arrival of each chunk with text in it.
        prompt_tokens: By the server, None when it does not say.
        completion_tokens: By the server, else the number of chunks.
        text: All of it.
    """

    sent: float
    ended: float
    stamps: tuple[float, ...]
    prompt_tokens: int | None
    completion_tokens: int
    text: str


def read_completion(exchange: Exchange) -> Completion | str:
    """Read the events of one exchange, or say why it does not count."""
    if exchange.failure is not None or exchange.ended is None:
        return _last_error(exchange) or exchange.failure or "unfinished"
    stamps: list[float] = []
    pieces: list[str] = []
    prompt_tokens = completion_tokens = None
    for stamp, raw in exchange.events:
        if raw == DONE:
            break
        try:
            event: dict[str, Any] = json.loads(raw)
        except ValueError:
            return f"an event that is no JSON: {raw[:100]!r}"
        if event.get("error"):
            return f"an error in the stream: {event['error']}"[:300]
        usage = event.get("usage")
        if usage:
            prompt_tokens = usage.get("prompt_tokens", prompt_tokens)
            completion_tokens = usage.get("completion_tokens", completion_tokens)
        for choice in event.get("choices") or ():
            if choice.get("text"):
                stamps.append(stamp)
                pieces.append(choice["text"])
    if not stamps:
        return "no text"
    return Completion(
        sent=exchange.sent,
        ended=exchange.ended,
        stamps=tuple(stamps),
        prompt_tokens=prompt_tokens,
        completion_tokens=len(stamps) if completion_tokens is None else completion_tokens,
        text="".join(pieces),
    )


def _last_error(exchange: Exchange) -> str | None:
    """Return the error that the last event tells of: it says more than the end after it."""
    if exchange.events and exchange.events[-1][1].startswith(b'{"error"'):
        return f"an error in the stream: {exchange.events[-1][1].decode(errors='replace')}"[:300]
    return None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile with linear interpolation, None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize(result: Round, workload: Workload) -> dict[str, Any]:
    """Return one round's figures by name; times in milliseconds, None where there is no value."""
    read = [read_completion(exchange) for exchange in result.exchanges]
    done = [completion for completion in read if isinstance(completion, Completion)]
    failures = [failure for failure in read if isinstance(failure, str)]
    figures: dict[str, Any] = {
        "requests": len(read),
        "failed": len(failures),
        "failures": sorted(set(failures))[:3],
        "client_lag_ms_p99": _milli(percentile(result.lags, 99)),
        "client_lag_ms_max": _milli(max(result.lags, default=None)),
    }
    if not done:
        return figures
    seconds = max(c.ended for c in done) - min(c.sent for c in done)
    output_tokens = sum(c.completion_tokens for c in done)
    # Where the server does not count the prompt, its length is the one that was built.
    prompt_lens = [
        workload.prompt_len if c.prompt_tokens is None else c.prompt_tokens for c in done
    ]
    ttft = [c.stamps[0] - c.sent for c in done]
    gaps = [b - a for c in done for a, b in zip(c.stamps, c.stamps[1:], strict=False)]
    tpot = [
        (c.stamps[-1] - c.stamps[0]) / (c.completion_tokens - 1)
        for c in done
        if c.completion_tokens > 1
    ]
    return figures | {
        "seconds": seconds,
        "output_tok_s": output_tokens / seconds,
        "total_tok_s": (output_tokens + sum(prompt_lens)) / seconds,
        "requests_s": len(done) / seconds,
        "ttft_ms_p50": _milli(percentile(ttft, 50)),
        "ttft_ms_p99": _milli(percentile(ttft, 99)),
        "itl_ms_p50": _milli(percentile(gaps, 50)),
        "itl_ms_p99": _milli(percentile(gaps, 99)),
        "tpot_ms_p50": _milli(percentile(tpot, 50)),
        "tpot_ms_p99": _milli(percentile(tpot, 99)),
        "prompt_tokens_min": min(prompt_lens),
        "prompt_tokens_max": max(prompt_lens),
        "output_tokens_min": min(c.completion_tokens for c in done),
        "output_tokens_max": max(c.completion_tokens for c in done),
        "chunks": sum(len(c.stamps) for c in done),
    }


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * MILLI


def find_doubts(figures: dict[str, Any], workload: Workload) -> list[str]:
    """Return the reasons, as sentences, why a round's figures may not be what they seem."""
    doubts = []
    if figures["failed"]:
        what = "; ".join(figures["failures"])
        doubts.append(f"{figures['failed']} of {figures['requests']} requests failed: {what}")
    for name, asked in (("prompt", workload.prompt_len), ("output", workload.output_len)):
        least, most = figures.get(f"{name}_tokens_min"), figures.get(f"{name}_tokens_max")
        if least is not None and (least, most) != (asked, asked):
            doubts.append(f"{name} tokens were {least} to {most}, {asked} were asked for")
    lag, gap = figures["client_lag_ms_p99"], figures.get("itl_ms_p50")
    if lag is not None and gap is not None and lag > max(5.0, gap / 2):
        doubts.append(
            f"the client itself was {lag:.0f} ms late (p99): it lacks CPU time, and the latencies "
            "are its own"
        )
    return doubts


def median_of_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median over the rounds of every figure that is a number in each of them."""
    names = [
        name
        for name, value in rounds[0].items()
        if all(isinstance(r.get(name), int | float) for r in rounds) and value is not None
    ]
    return {name: statistics.median(r[name] for r in rounds) for name in names}
