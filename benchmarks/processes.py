"""The server's processes: how much memory they hold, and starting and ending them."""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

STOP_SECONDS = 20.0


class LaunchError(Exception):
    """The server could not be started, or ended before its time."""


def tree_memory(pid: int, *, with_shares: bool) -> tuple[int, int]:
    """Return resident bytes of a process and all that it started, and their proportional share.

    Resident memory counts a page that two processes share twice. The proportional share (PSS)
    counts it once, but walks every page: it is 0 where it is not asked for, or not known.
    """
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    resident = share = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            resident += process.memory_info().rss
            if with_shares:
                share += getattr(process.memory_full_info(), "pss", 0)
    return resident, share


class MemoryWatch:
    """Samples a process tree in a thread while its ``with`` block runs.

    Attributes:
        peak_rss: Most resident bytes seen.
        peak_pss: Most proportional bytes seen, 0 where the system does not tell.
    """

    def __init__(self, pid: int, period_s: float = 0.5, shares_every: int = 20) -> None:
        self.peak_rss = 0
        self.peak_pss = 0
        self._pid = pid
        self._period_s = period_s
        self._shares_every = shares_every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._sample(with_shares=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample(with_shares=True)

    def _watch(self) -> None:
        count = 0
        while not self._stop.wait(self._period_s):
            count += 1
            self._sample(with_shares=count % self._shares_every == 0)

    def _sample(self, *, with_shares: bool) -> None:
        resident, share = tree_memory(self._pid, with_shares=with_shares)
        self.peak_rss = max(self.peak_rss, resident)
        self.peak_pss = max(self.peak_pss, share)


def is_ready(host: str, port: int) -> bool:
    """Whether the server answers that it takes requests.

    hexllm says so at ``/ping``, vLLM and llama.cpp at ``/health``; a server that knows neither is
    ready when it lists its models.
    """
    unknown = 0
    for path in ("/ping", "/health", "/v1/models"):
        status = _get_status(host, port, path)
        if path == "/v1/models":
            return unknown == 2 and status == 200
        if status == 200:
            return True
        unknown += status in {404, 405}
    return False


def _get_status(host: str, port: int, path: str) -> int:
    """Return the status of one GET, 0 when nothing answers."""
    connection = http.client.HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@contextmanager
def launch(command: str, host: str, port: int, timeout_s: float) -> Iterator[tuple[int, float]]:
    """Start a server, wait until it is ready, and end it and all it started afterwards.

    Yields:
        Its process id and the seconds from its start until it was ready.

    Raises:
        LaunchError: Its address is taken, or it ended, or it was not ready in time; the text ends
            with its last words.
    """
    if _get_status(host, port, "/"):
        raise LaunchError(
            f"Something answers on port {port} already; it would be measured instead."
        )
    with tempfile.TemporaryDirectory(prefix="hexllm-bench-") as folder:
        log = Path(folder) / "server.log"
        started = time.monotonic()
        with log.open("wb") as sink:
            try:
                # A group of its own, so that what it starts can be ended with it.
                process = subprocess.Popen(
                    shlex.split(command),
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"{command!r} cannot be started: {error}") from error
        try:
            while not is_ready(host, port):
                ended = process.poll()
                if ended is not None:
                    raise LaunchError(f"The server ended with status {ended}.{_last_words(log)}")
                if time.monotonic() - started > timeout_s:
                    raise LaunchError(f"Not ready after {timeout_s:.0f} s.{_last_words(log)}")
                time.sleep(0.1)
            yield process.pid, time.monotonic() - started
            ended = process.poll()
            if ended is not None:
                raise LaunchError(f"The server ended with status {ended}.{_last_words(log)}")
        finally:
            _end(process)


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n")
    return "\n".join([" Its last words:", *[f"  {line}" for line in lines if line.strip()][-20:]])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, then kill whatever is left of its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
