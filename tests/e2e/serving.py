"""A real `hexllm serve` as a subprocess, and a small client for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Served:
    """A running server.

    Attributes:
        url: Its address.
        process: The process.
        log: Where its output goes.
    """

    url: str
    process: subprocess.Popen
    log: Path

    def post(self, path, body, **options):
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def complete(self, **body):
        """Return the one choice of a completion; its text is assembled if it is streamed."""
        if not body.get("stream"):
            answer = self.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]
        choice = {"text": ""}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for part in event["choices"]:
                        choice["text"] += part["text"]
                        choice["finish_reason"] = part["finish_reason"]
        return choice

    def metric(self, name, label=""):
        """Return a metric, summed over its labels, or over those that hold ``label``."""
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        found = [
            line for line in lines if line.startswith((name + "{", name + " ")) and label in line
        ]
        assert found, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def wait_for(self, condition, seconds=10.0):
        """Wait until ``condition()`` is true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen\n" + self.log.read_text()[-2000:]
            time.sleep(0.02)

    def engine_pid(self):
        """Return the engine process's id: the child of the server that runs the spawned main."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in children.split():
            if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
        raise AssertionError("no engine process")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**extra):
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **extra}


@contextlib.contextmanager
def serve(tmp_path, *flags, command=("-m", "hexllm", "serve"), env=None):
    """Run a server until the block ends, and see that it ends cleanly."""
    port = free_port()
    log = tmp_path / f"serve-{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *command, "--host=127.0.0.1", f"--port={port}", *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env or environment(),
            start_new_session=True,
        )
    served = Served(f"http://127.0.0.1:{port}", process, log)
    try:
        served.wait_for(lambda: is_ready(served), seconds=400)
        yield served
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()[-2000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_ready(served):
    assert served.process.poll() is None, served.log.read_text()[-3000:]
    try:
        return httpx.get(served.url + "/ping", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
