"""A real server that is told to stop, and one whose engine hangs."""

import json
import os
import signal
import threading
import time

import httpx
import pytest

from tests.e2e.serving import serve
from tests.e2e.test_faults import FLAGS, WIDE, is_idle
from tests.server.conftest import write_tokenizer

ENDLESS = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(WIDE))
    write_tokenizer(folder)
    return folder


class Asking:
    """Requests in threads, and their answers in the order they were asked."""

    def __init__(self, served, *bodies):
        self.answers = [None] * len(bodies)
        self._threads = [
            threading.Thread(target=self._ask, args=(served, i, body))
            for i, body in enumerate(bodies)
        ]
        for thread in self._threads:
            thread.start()
        served.wait_for(lambda: served.metric("vllm:num_requests_running") == len(bodies), 60)

    def _ask(self, served, i, body):
        self.answers[i] = served.post("/v1/completions", body)

    def join(self):
        for thread in self._threads:
            thread.join(60)
        return self.answers


def status(served, path):
    return httpx.get(served.url + path).status_code


def test_a_signal_lets_open_requests_finish(model, tmp_path):
    flags = ("--load_format=dummy", "--no-warmup", "--drain_seconds=120", *FLAGS)
    with serve(tmp_path, f"--model={model}", *flags) as served:
        body = {**ENDLESS, "max_tokens": 60}
        expected = served.complete(**body)
        asking = Asking(served, body, body)
        served.process.send_signal(signal.SIGTERM)
        served.wait_for(lambda: status(served, "/ping") == 503)
        assert status(served, "/health") == 200
        for answer in asking.join():
            assert answer.json()["choices"] == [expected]
        # Not after 120 s: nothing is open any more.
        assert served.process.wait(20) == 0
    assert "Traceback" not in served.log.read_text()


def test_what_is_not_finished_in_time_ends_with_an_error(model, tmp_path):
    flags = ("--load_format=dummy", "--no-warmup", "--drain_seconds=0.5", *FLAGS)
    with serve(tmp_path, f"--model={model}", *flags) as served:
        asking = Asking(served, ENDLESS)
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        (answer,) = asking.join()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_stopping"
        assert served.process.wait(20) == 0
        assert time.monotonic() - began < 0.5 + 10
    assert "Traceback" not in served.log.read_text()


def test_an_engine_that_hangs_is_seen_and_one_that_goes_on_serves_again(model, tmp_path):
    flags = ("--load_format=dummy", "--no-warmup", "--hung_engine_seconds=3", *FLAGS)
    with serve(tmp_path, f"--model={model}", *flags) as served:
        body = {**ENDLESS, "max_tokens": 60}
        expected = served.complete(**body)
        served.wait_for(lambda: status(served, "/health") == 200, 60)  # compiling took its time
        engine = served.engine_pid()
        asking = Asking(served, body)
        os.kill(engine, signal.SIGSTOP)
        try:
            served.wait_for(lambda: status(served, "/health") == 503, 20)
            assert httpx.get(served.url + "/health").json()["status"] == "hung"
            assert status(served, "/ping") == 503
            refused = served.post("/v1/completions", ENDLESS)
            assert refused.json()["error"]["code"] == "server_hung"
        finally:
            os.kill(engine, signal.SIGCONT)
        served.wait_for(lambda: status(served, "/health") == status(served, "/ping") == 200, 20)
        assert asking.join()[0].json()["choices"] == [expected]
        served.wait_for(lambda: is_idle(served))
