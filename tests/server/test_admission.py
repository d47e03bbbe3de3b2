"""A bounded queue and a deadline, over HTTP, with an engine that follows a script."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from hexllm.core.settings import Settings
from hexllm.server.app import create_app
from tests.server.conftest import LiveServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.server.fake_engine import FakeEngine

#: The scripted engine runs 8 sequences at once.
PLACES = 8
BODY = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture
def serve(engine: FakeEngine, tokenizer: Any) -> Iterator[Callable[..., LiveServer]]:
    servers: list[LiveServer] = []

    def start(**changes: Any) -> LiveServer:
        settings = Settings(model="tiny/model", served_model_name="tiny", **changes)
        server = LiveServer(create_app(settings, engine, tokenizer))
        servers.append(server)
        return server.__enter__()

    yield start
    for server in servers:
        server.__exit__()


@pytest.fixture
def hold(engine: FakeEngine) -> Iterator[Callable[[str, int], None]]:
    """Keep requests open until the test ends."""
    streams: list[Any] = []

    def open_streams(url: str, count: int, **fields: Any) -> None:
        before = len(engine.open)
        for _ in range(count):
            body = {**BODY, "stream": True, **fields}
            stream = httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30)
            answer = stream.__enter__()
            assert answer.status_code == 200
            streams.append(stream)
        assert len(engine.open) == before + count * fields.get("n", 1)

    engine.eos, engine.delay = None, 0.05
    yield open_streams
    for stream in streams:
        stream.__exit__(None, None, None)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(name + "{")]
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_beyond_the_queue_is_429_and_says_when_to_come_back(
    serve, hold, engine, error_of, path, stream
):
    url = serve(max_queued_requests=2).url
    hold(url, PLACES + 2)
    asked = len(engine.requests)
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    body.pop("messages" if path != "/v1/chat/completions" else "prompt")
    refused = httpx.post(url + path, json=body)
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "max_queued_requests" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert len(engine.requests) == asked
    assert metric(url, "hexllm:requests_refused_total") == 1
    # It is not the health routes' matter.
    assert httpx.get(f"{url}/ping").status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 200


def test_a_place_that_becomes_free_is_given_again(serve, hold, engine):
    url = serve(max_queued_requests=0).url
    hold(url, PLACES - 1)
    body = {**BODY, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as last:
        assert last.status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 429
    until(lambda: len(engine.open) == PLACES - 1)
    answer = httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 2})
    assert answer.status_code == 200


def test_every_choice_takes_a_place(serve, hold, error_of):
    url = serve(max_queued_requests=0).url
    hold(url, 1, n=PLACES - 1)
    error_of(httpx.post(f"{url}/v1/completions", json={**BODY, "n": 2}), 429)
    assert httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 1}).status_code == 200


def test_a_request_with_more_choices_than_places_is_served_when_it_is_alone(serve):
    url = serve(max_queued_requests=0).url
    body = {**BODY, "n": PLACES + 5, "max_tokens": 2}
    for _ in range(2):
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert len(answer.json()["choices"]) == PLACES + 5


def test_without_a_bound_nothing_is_refused(serve, hold):
    url = serve(max_queued_requests=None).url
    hold(url, 3 * PLACES)


@pytest.mark.parametrize("n", [1, 3])
def test_the_deadline_ends_a_request_with_504(serve, engine, error_of, n):
    engine.eos, engine.delay = None, 0.05
    url = serve(request_timeout_seconds=0.3).url
    began = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json={**BODY, "n": n})
    assert 0.3 <= time.monotonic() - began < 2
    error = error_of(answer, 504)
    assert error["code"] == "request_timeout"
    assert "0.3 s" in error["message"]
    assert engine.open == set()
    assert metric(url, "hexllm:requests_timed_out_total") == 1
    assert metric(url, "hexllm:requests_in_flight") == 0


def test_the_deadline_ends_a_stream_with_an_error_event(serve, engine):
    engine.eos, engine.delay = None, 0.05
    url = serve(request_timeout_seconds=0.3).url
    body = {**BODY, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        events = [line for line in answer.iter_lines() if line]
    assert len(events) > 3
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["error"]["code"] == "request_timeout"
    until(lambda: not engine.open)


def test_a_request_in_time_is_whole(serve, engine):
    url = serve(request_timeout_seconds=0.3).url
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    time.sleep(0.4)  # its timer went with it
    assert metric(url, "hexllm:requests_timed_out_total") == 0
    assert engine.aborted == []


def test_an_engine_that_never_answers_does_not_hold_a_request_beyond_its_deadline(serve, engine):
    engine.delay = 3600
    url = serve(request_timeout_seconds=0.2, max_queued_requests=0).url
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(httpx.post(f"{url}/v1/completions", json=BODY).status_code)

    threads = [threading.Thread(target=ask) for _ in range(PLACES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert statuses == [504] * PLACES
