"""What benchmarks/overload.py counts, and what it calls a fault; the load is in tests/e2e."""

from __future__ import annotations

import pytest

from benchmarks.overload import Report, _count
from benchmarks.sse import DONE, Exchange


def whole() -> Exchange:
    text = b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}'
    return Exchange(sent=1.0, ended=3.0, events=[(2.0, text), (3.0, DONE)], failure=None)


def failed(failure: str) -> Exchange:
    return Exchange(sent=1.0, ended=2.0, failure=failure)


def test_every_request_is_counted_once():
    report = Report()
    exchanges = [whole(), whole(), None, failed("HTTP 429: full"), failed("HTTP 500: oh")]
    _count(exchanges, report)
    assert (report.sent, report.completed, report.dropped, report.refused) == (5, 2, 1, 1)
    assert report.errors == ["HTTP 500: oh"]
    assert (report.ttft_p99, report.latency_p50, report.latency_p99) == (1.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"errors": ["HTTP 500: oh"]}, "1 requests failed"),
        ({"refused": 0}, "no overload"),
        ({"memory": [100, 100, 100, 110, 120, 120]}, "grew by 20%"),
        ({"memory": [100, 130, 100, 100, 105, 105]}, None),
        ({"held": {"vllm:kv_cache_usage_perc": 0.1}}, "vllm:kv_cache_usage_perc is still 0.1"),
    ],
)
def test_what_is_a_fault(changes, fault):
    faults = Report(**{"sent": 9, "completed": 6, "refused": 3, "memory": [100] * 6, **changes})
    found = faults.faults()
    assert (fault is None) == (found == []), found
    assert fault is None or fault in found[0]
