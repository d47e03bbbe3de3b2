"""Figures from streams whose every arrival is known."""

from __future__ import annotations

import json

import pytest

from benchmarks.load import Round
from benchmarks.metrics import (
    find_doubts,
    median_of_rounds,
    percentile,
    read_completion,
    summarize,
)
from benchmarks.sse import DONE, Exchange
from benchmarks.workloads import Workload

WORKLOAD = Workload(requests=2, concurrency=2, input_len=10, output_len=4)


def stream(sent, stamps, usage=None, pieces=None, failure=None):
    pieces = pieces or ["x"] * len(stamps)
    events = [
        (stamp, json.dumps({"choices": [{"text": piece}], "usage": None}).encode())
        for stamp, piece in zip(stamps, pieces, strict=True)
    ]
    end = stamps[-1] if stamps else sent
    events.append(
        (end, json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}).encode())
    )
    if usage:
        events.append((end, json.dumps({"choices": [], "usage": usage}).encode()))
    events.append((end, DONE))
    return Exchange(sent=sent, ended=end + 0.5, events=events, failure=failure)


def usage(prompt, completion):
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def test_every_figure_of_two_known_streams():
    first = stream(1.0, [2.0, 3.0, 4.0, 6.0], usage(10, 4))
    second = stream(1.5, [4.5, 5.0, 5.5, 6.0], usage(10, 4))
    figures = summarize(Round([first, second], [0.001, 0.003]), WORKLOAD)
    # From the first request (1.0) to the last response (6.5): 8 tokens out and 20 in.
    assert figures["seconds"] == pytest.approx(5.5)
    assert figures["output_tok_s"] == pytest.approx(8 / 5.5)
    assert figures["total_tok_s"] == pytest.approx(28 / 5.5)
    assert figures["requests_s"] == pytest.approx(2 / 5.5)
    assert figures["ttft_ms_p50"] == pytest.approx(2000)  # of 1 s and 3 s
    assert figures["ttft_ms_p99"] == pytest.approx(2980)
    assert figures["itl_ms_p50"] == pytest.approx(750)  # of 0.5, 0.5, 0.5, 1, 1, 2
    assert figures["itl_ms_p99"] == pytest.approx(1950)
    assert figures["tpot_ms_p50"] == pytest.approx((4000 / 3 + 500) / 2)
    assert figures["client_lag_ms_max"] == pytest.approx(3)
    assert figures["failed"] == 0
    assert find_doubts(figures, WORKLOAD) == []


def test_tokens_are_counted_by_usage_not_by_chunks():
    bundled = stream(0.0, [1.0, 2.0], usage(10, 4))
    completion = read_completion(bundled)
    assert completion.completion_tokens == 4
    assert len(completion.stamps) == 2
    figures = summarize(Round([bundled], []), WORKLOAD)
    assert figures["tpot_ms_p50"] == pytest.approx(1000 / 3)
    assert figures["itl_ms_p50"] == pytest.approx(1000)


def test_without_usage_chunks_with_text_count():
    completion = read_completion(stream(0.0, [1.0, 2.0, 3.0], pieces=["a", "", "b"]))
    assert completion.completion_tokens == 2
    assert completion.stamps == (1.0, 3.0)
    assert completion.text == "ab"


def test_a_failed_request_counts_in_nothing_but_the_failures():
    good = stream(0.0, [1.0, 2.0, 3.0, 4.0], usage(10, 4))
    bad = stream(0.0, [100.0], failure="HTTP 500: no")
    never = Exchange(sent=0.0)
    figures = summarize(Round([good, bad, never], []), WORKLOAD)
    assert figures["failed"] == 2
    assert figures["seconds"] == pytest.approx(4.5)
    (doubt,) = find_doubts(figures, WORKLOAD)
    assert doubt.startswith("2 of 3 requests failed: HTTP 500: no; unfinished")


def test_an_error_event_and_an_empty_stream_are_failures():
    event = (1.0, b'{"error": {"message": "the engine is gone"}}')
    broken = Exchange(sent=0.0, ended=1.0, events=[event, (1.0, DONE)], failure=None)
    assert "the engine is gone" in read_completion(broken)
    assert read_completion(stream(0.0, [], usage(10, 0))) == "no text"
    odd = Exchange(sent=0.0, ended=1.0, events=[(1.0, b"<html>"), (1.0, DONE)], failure=None)
    assert "no JSON" in read_completion(odd)


def test_lengths_other_than_asked_and_a_late_client_are_doubts():
    short = stream(0.0, [1.0, 1.01, 1.02], usage(11, 3))
    figures = summarize(Round([short], [0.2, 0.2]), WORKLOAD)
    doubts = find_doubts(figures, WORKLOAD)
    assert doubts[0] == "prompt tokens were 11 to 11, 10 were asked for"
    assert doubts[1] == "output tokens were 3 to 3, 4 were asked for"
    assert "200 ms late" in doubts[2]


def test_no_figure_where_nothing_finished():
    figures = summarize(Round([Exchange(sent=0.0)], []), WORKLOAD)
    assert "output_tok_s" not in figures
    assert figures["failed"] == 1


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([3], 99, 3), ([3, 1, 2], 50, 2), ([0, 10], 25, 2.5), ([1, 2], 100, 2)],
)
def test_percentile(values, percent, expected):
    assert percentile(values, percent) == expected


def test_median_of_rounds_leaves_out_what_a_round_lacks():
    rounds = [{"a": 1.0, "b": 5, "c": None}, {"a": 3.0, "c": None}, {"a": 2.0, "b": 6, "c": 1.0}]
    assert median_of_rounds(rounds) == {"a": 2.0}
