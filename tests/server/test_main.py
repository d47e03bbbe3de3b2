"""``hexllm serve`` as a process: its start, its failures, its signals and its exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from hexllm.core.errors import ConfigError
from hexllm.server.main import open_listener
from tests.server.conftest import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
BODY = {"prompt": "x", "max_tokens": 100}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text("{}")
    return folder


class Serving:
    """A running ``hexllm serve``."""

    def __init__(self, model: Path, port: int, orders: dict[str, Any], *flags: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.server.fake_serve", f"--model={model}"),
                *("--host=127.0.0.1", f"--port={port}", *flags),
            ],
            cwd=ROOT,
            env={**os.environ, "HEXLLM_FAKE_ENGINE": json.dumps(orders)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ping(self) -> int | None:
        try:
            return httpx.get(f"{self.url}/ping", timeout=2).status_code
        except httpx.TransportError:
            return None

    def wait_for_ping(self, status: int, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self.ping() != status:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.05)

    def end(self, seconds: float) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


@pytest.fixture
def start(model_folder: Path, free_port: int) -> Iterator[Any]:
    running: list[Serving] = []

    def begin(orders: dict[str, Any] | None = None, *flags: str, model: Any = None) -> Serving:
        serving = Serving(model or model_folder, free_port, orders or {}, *flags)
        running.append(serving)
        return serving

    yield begin
    for serving in running:
        if serving.process.poll() is None:
            serving.process.kill()
            serving.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_a_signal_ends_it_with_0(start, number):
    serving = start({"start_seconds": 1.0})
    serving.wait_for_ping(503)
    loading = httpx.post(f"{serving.url}/v1/completions", json=BODY)
    assert (loading.status_code, "retry-after" in loading.headers) == (503, True)
    serving.wait_for_ping(200)
    answer = httpx.post(f"{serving.url}/v1/completions", json={**BODY, "max_tokens": 2})
    assert answer.json()["usage"]["completion_tokens"] == 2
    serving.process.send_signal(number)
    status, out, err = serving.end(5)
    assert status == 0, err
    assert "engine shut down" in out
    # One line of ours, and none of uvicorn's or of transformers without torch.
    assert [line for line in err.splitlines() if " INFO server: Compiling" not in line] == [
        line for line in err.splitlines() if "Serving" in line or "Stopping" in line
    ]
    assert "Serving" in err


def test_an_open_request_is_finished_before_a_signal_ends_the_server(start):
    serving = start({"delay": 0.02})
    serving.wait_for_ping(200)
    answers: list[httpx.Response] = []
    body = {**BODY, "max_tokens": 50}  # a second
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{serving.url}/v1/completions", json=body))
    )
    asking.start()
    time.sleep(0.3)
    serving.process.terminate()
    asking.join(10)
    assert answers[0].json()["usage"]["completion_tokens"] == 50
    assert serving.end(5)[0] == 0


def test_an_endless_request_does_not_hold_the_server_up(start):
    serving = start({"delay": 0.5}, "--drain_seconds=2")
    serving.wait_for_ping(200)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{serving.url}/v1/completions", json=BODY, timeout=30)
        )
    )
    asking.start()
    with httpx.stream(
        "POST", f"{serving.url}/v1/completions", json={**BODY, "stream": True}, timeout=30
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        began = time.monotonic()
        serving.process.terminate()
        # Not ready, still alive, and nothing new is taken.
        serving.wait_for_ping(503)
        health = httpx.get(f"{serving.url}/health")
        assert (health.status_code, health.json()) == (200, {"status": "stopping"})
        refused = httpx.post(f"{serving.url}/v1/completions", json=BODY)
        assert refused.json()["error"]["code"] == "server_stopping"
        assert time.monotonic() - began < 1.5
        rest = [line for line in lines if line]
        status, out, err = serving.end(12)
    assert status == 0, err
    assert 2 <= time.monotonic() - began < 5
    assert "engine shut down" in out
    assert rest[-1] == "data: [DONE]"
    asking.join(5)
    assert answers[0].status_code == 503
    cut_off = json.loads(rest[-2].removeprefix("data: "))["error"]
    for error in (cut_off, answers[0].json()["error"]):
        assert error["code"] == "server_stopping"
        assert "--drain_seconds" in error["message"]


def test_a_second_signal_does_not_wait(start):
    serving = start({"delay": 60}, "--drain_seconds=60")
    serving.wait_for_ping(200)
    asking = threading.Thread(
        target=lambda: httpx.post(f"{serving.url}/v1/completions", json=BODY, timeout=30)
    )
    asking.start()
    time.sleep(0.3)
    serving.process.terminate()
    serving.wait_for_ping(503)
    began = time.monotonic()
    serving.process.terminate()
    assert serving.end(10)[0] == 0
    assert time.monotonic() - began < 4
    asking.join(5)


def test_a_signal_while_loading_ends_it_at_once_with_0(start):
    serving = start({"start_seconds": 60})
    serving.wait_for_ping(503)
    serving.process.terminate()
    status, _, err = serving.end(4)
    assert status == 0, err
    assert "Traceback" not in err


def test_the_engine_s_death_ends_the_server_with_1_and_every_request_with_an_error(start):
    serving = start({"die_seconds": 0.2, "delay": 30})
    serving.wait_for_ping(200)
    answer = httpx.post(f"{serving.url}/v1/completions", json=BODY, timeout=30)
    died = time.monotonic()
    assert answer.status_code == 503
    assert "signal 9" in answer.json()["error"]["message"]
    status, _, err = serving.end(5)
    assert status == 1
    assert time.monotonic() - died < 2
    assert "hexllm: The engine has died: its process ended by signal 9" in err
    assert "Traceback" not in err


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_a_start_that_fails_is_one_sentence_and_1(start):
    serving = start({"start_error": "Checkpoint x does not fit."})
    status, _, err = serving.end(30)
    assert status == 1
    assert last_line(err) == "hexllm: Checkpoint x does not fit."
    assert "Traceback" not in err


def test_a_model_that_is_not_there_is_one_sentence_and_1(start, tmp_path):
    status, _, err = start(model=tmp_path / "nothing").end(30)
    assert status == 1
    assert str(tmp_path / "nothing") in last_line(err)
    assert "Traceback" not in err


def test_a_model_without_a_tokenizer_is_one_sentence_and_1(start, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    status, _, err = start({"start_seconds": 60}, model=tmp_path).end(30)
    assert status == 1
    assert "tokenizer" in last_line(err)
    assert "Traceback" not in err


def test_another_set_of_plugins_in_the_engine_is_one_sentence_and_1(start):
    status, _, err = start({"manifest": [["hexllm-extra", "1.0", "extra"]]}).end(30)
    assert status == 1
    assert "hexllm-extra" in last_line(err)
    assert "Traceback" not in err


def test_a_flag_that_does_not_exist_is_one_sentence_and_2(start):
    status, _, err = start({}, "--prot=1").end(30)
    assert status == 2
    assert "prot" in err
    assert "Traceback" not in err


def test_a_port_in_use_is_one_sentence_and_1(start, free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        status, _, err = start().end(30)
    assert status == 1
    assert f"Port {free_port} is in use" in last_line(err)
    assert "Traceback" not in err


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"Cannot listen on 192\.0\.2\.1, port 0"):
        open_listener("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="no-such-host"):
        open_listener("no-such-host.invalid", 0)
    with open_listener("localhost", 0) as listener:
        assert listener.getsockname()[1] > 0
