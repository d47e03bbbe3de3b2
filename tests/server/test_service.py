"""Health, metrics, models, plugin hooks, and requests whose client goes away."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

import hexllm
from hexllm.core.events import EngineStats, RequestFinished
from hexllm.core.settings import Settings
from hexllm.engine.messages import StartProgress, StepSeconds
from hexllm.server.app import create_app
from hexllm.server.notifier import Notifier
from tests.server.conftest import AppClient, LiveServer

REQUEST = {"prompt": "x", "max_tokens": 100}


def until(condition, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("path", ["/ping", "/health"])
def test_ready_is_200(client, path):
    response = client.get(path)
    assert response.status_code == 200
    assert response.json() == {"status": "ready"}


def test_while_loading_everything_waits_and_ping_says_how_far_it_is(client, engine, error_of):
    engine.info = None
    engine.progress = StartProgress("compiling", 3, 8, "decode 16")
    response = client.get("/ping")
    assert response.status_code == 503
    assert response.json() == {
        "status": "loading",
        "progress": {"phase": "compiling", "done": 3, "total": 8, "detail": "decode 16"},
    }
    refused = client.post("/v1/completions", json=REQUEST)
    assert error_of(refused, 503)["code"] == "server_loading"
    assert int(refused.headers["retry-after"]) > 0
    assert client.get("/v1/models").status_code == 503
    assert client.get("/version").json() == {"version": hexllm.__version__}
    assert client.get("/metrics").status_code == 200


def test_an_engine_without_a_tokenizer_is_not_ready(settings, engine):
    client = AppClient(create_app(settings, engine))
    assert client.get("/ping").status_code == 503


def test_after_the_engine_s_death_ping_is_503(client, engine, error_of):
    engine.die("out of memory")
    response = client.get("/ping")
    assert response.status_code == 503
    assert response.json() == {"status": "failed", "error": "out of memory"}
    assert "out of memory" in error_of(client.post("/generate", json=REQUEST), 503)["message"]


def test_a_hung_engine_is_seen_and_given_nothing_more(client, engine, settings, error_of):
    engine.silence = settings.hung_engine_seconds - 1
    assert client.get("/health").status_code == client.get("/ping").status_code == 200
    engine.silence = settings.hung_engine_seconds + 1
    for path in ("/health", "/ping"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.json() == {"status": "hung", "silent_seconds": 121.0}
    assert samples(client)["hexllm:engine_silence_seconds{}"] == 121.0
    error = error_of(client.post("/v1/completions", json=REQUEST), 503)
    assert error["code"] == "server_hung"
    assert "121.0 s" in error["message"]
    assert engine.requests == []
    engine.silence = 0.5  # it was slow, not dead
    assert client.post("/v1/completions", json=REQUEST).status_code == 200


def test_without_a_bound_no_engine_counts_as_hung(engine, tokenizer):
    settings = Settings(model="tiny/model", hung_engine_seconds=None)
    engine.silence = 1e9
    assert AppClient(create_app(settings, engine, tokenizer)).get("/health").status_code == 200


def test_a_server_that_drains_is_alive_and_not_ready(app, client, error_of):
    app.state.server.is_stopping = True
    assert client.get("/ping").status_code == 503
    response = client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "stopping"})
    refused = client.post("/v1/completions", json=REQUEST)
    assert error_of(refused, 503)["code"] == "server_stopping"
    assert refused.headers["connection"] == "close"


def test_health_is_ping_where_it_is_the_readiness_route(engine, tokenizer):
    settings = Settings(model="tiny/model", health_route="/health")
    app = create_app(settings, engine, tokenizer)
    app.state.server.is_stopping = True
    assert AppClient(app).get("/health").status_code == 503


def test_steps_are_counted_by_share(app, client):
    app.state.server.metrics.observe_steps((StepSeconds(0.002, 0.03), StepSeconds(0.004, 0.05)))
    found = samples(client)
    for share, seconds in (("host", 0.006), ("device", 0.08)):
        assert found[f'hexllm:step_seconds_count{{"share": "{share}"}}'] == 2
        assert found[f'hexllm:step_seconds_sum{{"share": "{share}"}}'] == pytest.approx(seconds)
    assert found['hexllm:step_seconds_bucket{"le": "0.005", "share": "host"}'] == 2
    assert found['hexllm:step_seconds_bucket{"le": "0.005", "share": "device"}'] == 0


def test_models(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny"
    assert card["object"] == "model"
    assert card["root"] == "tiny/model"
    assert card["max_model_len"] == 128
    assert client.get("/v1/models/tiny").json() == card
    assert client.get("/v1/models/tiny/model").json() == card
    assert client.get("/v1/models/other").status_code == 404


def test_the_openapi_document_has_every_route_and_body(client):
    document = client.get("/openapi.json").json()
    assert {"/generate", "/ping", "/v1/completions", "/v1/chat/completions"} <= set(
        document["paths"]
    )
    assert "max_tokens" in document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "Message" in document["components"]["schemas"]


def samples(client) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        sample.name + json.dumps({k: v for k, v in sample.labels.items() if k not in LABELS}): (
            sample.value
        )
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.labels["model_name"] == "tiny"
    }


LABELS = ("model_name", "engine")


def test_metrics_have_vllm_s_names_and_the_right_numbers(client, engine, tokenizer):
    engine.stats = EngineStats(
        num_running=2, num_waiting=3, num_blocks=10, num_free_blocks=4, num_preemptions=5
    )
    client.post("/v1/completions", json={**REQUEST, "n": 2})
    client.post("/v1/completions", json={**REQUEST, "max_tokens": 3})
    engine.error = "broken"
    client.post("/v1/completions", json=REQUEST)
    found = samples(client)
    prompt, sentence = len(tokenizer.encode("x")), len(engine.script) + 1
    expected = {
        "vllm:num_requests_running{}": 2,
        "vllm:num_requests_waiting{}": 3,
        "vllm:kv_cache_usage_perc{}": 0.6,
        "vllm:num_preemptions_total{}": 5,
        "vllm:prompt_tokens_total{}": 3 * prompt,
        "vllm:generation_tokens_total{}": 2 * sentence + 3,
        'vllm:request_success_total{"finished_reason": "stop"}': 2,
        'vllm:request_success_total{"finished_reason": "length"}': 1,
        'vllm:request_success_total{"finished_reason": "abort"}': 0,
        'vllm:request_success_total{"finished_reason": "error"}': 1,
        "vllm:time_to_first_token_seconds_count{}": 3,
        "vllm:inter_token_latency_seconds_count{}": 2 * (sentence - 1) + 2,
        "vllm:e2e_request_latency_seconds_count{}": 2,
        "hexllm:requests_in_flight{}": 0,
        "hexllm:late_compiles_total{}": 0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


class RecordingPlugins:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def notify(self, hook: str, **arguments: Any) -> None:
        self.calls.append((hook, arguments))
        if len(self.calls) == 1:
            raise RuntimeError("the first call fails")


def test_plugins_learn_of_finished_requests(settings, engine, tokenizer, caplog):
    plugins = RecordingPlugins()
    app = create_app(settings, engine, tokenizer, plugins)
    client = AppClient(app)
    response = client.post("/v1/completions", json={**REQUEST, "user": "ann", "n": 2})
    client.post("/generate", json={"prompt": "x", "max_tokens": 2})
    engine.error = "broken"
    client.post("/v1/completions", json=REQUEST)
    app.state.server.notifier.close()
    events = [arguments["event"] for _, arguments in plugins.calls]
    assert {hook for hook, _ in plugins.calls} == {"hexllm_request_finished"}
    assert all(isinstance(event, RequestFinished) for event in events)
    first, second, third = events
    assert first.request_id == response.json()["id"]
    assert (first.route, first.finish_reason, first.user) == ("/v1/completions", "stop", "ann")
    assert first.num_prompt_tokens == len(tokenizer.encode("x"))
    assert first.num_output_tokens == 2 * (len(engine.script) + 1)
    assert first.duration >= first.time_to_first_token >= 0
    assert (second.route, second.finish_reason, second.num_output_tokens) == (
        "/generate",
        "length",
        2,
    )
    assert third.finish_reason == "error"
    assert "the first call fails" in caplog.text


def test_a_slow_plugin_delays_nobody():
    class Slow:
        release = threading.Event()

        def notify(self, hook: str, **arguments: Any) -> None:
            self.release.wait(5)

    notifier = Notifier(Slow())
    start = time.monotonic()
    for _ in range(20_000):
        notifier.notify("hexllm_request_finished", event=None)
    assert time.monotonic() - start < 2
    Slow.release.set()
    notifier.close()


def send_and_hang_up(port: int, path: str, body: dict[str, Any], wait_for: bytes | None) -> None:
    text = json.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall((head + text).encode())
        received = b""
        while wait_for is not None and wait_for not in received:
            received += connection.recv(4096)
        if wait_for is None:
            time.sleep(0.1)


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize(
    ("path", "body", "wait_for"),
    [
        ("/v1/completions", {**REQUEST, "n": 3}, None),
        ("/v1/completions", {**REQUEST, "stream": True}, b"data: "),
        ("/v1/completions", {**REQUEST, "stream": True, "n": 3}, b"data: "),
        ("/v1/chat/completions", CHAT, None),
        ("/v1/chat/completions", {**CHAT, "stream": True}, b"data: "),
        ("/generate", REQUEST, None),
        ("/generate", {**REQUEST, "streaming_tokens": 1}, b"predictions"),
        ("/generate", {"instances": [{**CHAT, "@requestFormat": "chatCompletions"}]}, None),
    ],
)
def test_a_dropped_connection_aborts_what_it_asked_for(app, engine, http, path, body, wait_for):
    if http == "httptools":
        pytest.importorskip("httptools")
    engine.eos, engine.delay = None, 0.02
    with LiveServer(app, http) as live:
        send_and_hang_up(live.port, path, body, wait_for)
        until(lambda: engine.requests and not engine.open)
        assert sorted(engine.aborted) == sorted(r.request_id for r in engine.requests)
        count = samples(AppClient(app))
        assert count['vllm:request_success_total{"finished_reason": "abort"}'] == len(
            engine.requests
        )


def test_a_connection_dropped_before_the_first_token_aborts_too(live, engine):
    engine.delay = 30.0
    send_and_hang_up(live.port, "/v1/completions", {**REQUEST, "stream": True}, None)
    until(lambda: engine.requests and not engine.open)
    assert len(engine.aborted) == 1


def test_a_client_gone_while_sending_leaves_nothing(live, engine):
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    time.sleep(0.1)
    assert engine.requests == []
    assert httpx.get(f"{live.url}/ping").status_code == 200


def test_the_engine_s_death_ends_every_open_request_at_once(live, engine):
    engine.delay = 30.0
    answers: list[Any] = []
    bodies = [REQUEST, {**REQUEST, "n": 3}, {**REQUEST, "stream": True}]
    threads = [
        threading.Thread(
            target=lambda body=body: answers.append(
                httpx.post(f"{live.url}/v1/completions", json=body, timeout=20)
            )
        )
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(engine.open) == 5)
    start = time.monotonic()
    # The engine's own loop is the server's, as with a real engine's reader.
    engine.loop.call_soon_threadsafe(engine.die, "killed by signal 9")
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - start < 1
    assert [answer.status_code for answer in answers] == [503] * 3
    assert all("signal 9" in answer.json()["error"]["message"] for answer in answers)
    assert httpx.get(f"{live.url}/ping").status_code == 503


def test_the_engine_s_death_ends_a_stream_that_has_begun(live, engine):
    engine.eos, engine.delay = None, 0.02
    body = {**REQUEST, "stream": True}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        engine.loop.call_soon_threadsafe(engine.die, "killed")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert "killed" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
