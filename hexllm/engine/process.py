"""The engine's own process, and the server's handle on it.

The server never imports JAX: this module does so only inside the process that it spawns.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import importlib.util
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from hexllm.core import errors
from hexllm.core.errors import EngineDeadError, HexllmError
from hexllm.core.events import EngineStats
from hexllm.core.logs import configure_logging
from hexllm.core.plugins import load_plugins
from hexllm.engine.messages import (
    AbortRequests,
    EngineFailed,
    EngineInfo,
    GenerateRequest,
    RequestOutput,
    Shutdown,
    StartProgress,
    StepOutputs,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from multiprocessing.connection import Connection

    from hexllm.core.settings import Settings
    from hexllm.engine.messages import FromEngine, StepSeconds, ToEngine

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 5.0


def spawn_engine(settings: Settings) -> ProcessClient:
    """Return a client whose ``start`` spawns the engine process."""
    return ProcessClient(settings)


class ProcessClient:
    """An ``hexllm.engine.client.EngineClient`` over a pipe to a spawned process."""

    def __init__(self, settings: Settings) -> None:
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.progress: StartProgress | None = None
        self.failure: str | None = None
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_steps: Callable[[tuple[StepSeconds, ...]], None] | None = None
        self.on_failure: Callable[[str], None] | None = None
        self._settings = settings
        self._process: Any = None
        self._pipe: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._queues: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._is_stopping = False
        # What the engine has not answered yet, whether or not anybody still waits for it.
        self._owed: set[str] = set()
        self._last_sign = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether requests are served now."""
        return self.info is not None and self.failure is None and not self._is_stopping

    @property
    def silence(self) -> float:
        """Seconds without a sign of life (see ``EngineClient.silence``)."""
        return time.monotonic() - self._last_sign if self._owed else 0.0

    @property
    def pid(self) -> int | None:
        """The engine process's id, None before it is spawned."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> EngineInfo:
        """Spawn the process and wait until it is ready (see ``EngineClient.start``)."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=run_engine, args=(self._settings, theirs), name="hexllm-engine", daemon=True
        )
        self._process.start()
        theirs.close()
        threading.Thread(target=self._read, name="engine-reader", daemon=True).start()
        threading.Thread(target=self._write, name="engine-writer", daemon=True).start()
        return await asyncio.shield(self._started)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Yield a sequence's outputs (see ``EngineClient.generate``)."""
        self._raise_if_gone()
        outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._queues[request.request_id] = outputs
        is_finished = False
        try:
            self._owe(request.request_id)
            self._outbox.put(request)
            while not is_finished:
                output = await outputs.get()
                if output is None:
                    is_finished = True
                    self._raise_if_gone()
                    raise EngineDeadError("The engine stopped while the request was open.")
                is_finished = output.finish_reason is not None
                yield output
        finally:
            del self._queues[request.request_id]
            if not is_finished:
                self._outbox.put(AbortRequests((request.request_id,)))

    def abort(self, request_id: str) -> None:
        """Drop a request (see ``EngineClient.abort``)."""
        waiting = self._queues.get(request_id)
        if waiting is not None:
            self._outbox.put(AbortRequests((request_id,)))
            waiting.put_nowait(RequestOutput(request_id, finish_reason="abort"))

    async def shutdown(self) -> None:
        """End the process, by force after a few seconds."""
        self._is_stopping = True
        if self._process is None:
            return
        is_loaded = self.info is not None and self.failure is None
        if is_loaded:
            self._outbox.put(Shutdown())
            await asyncio.to_thread(self._process.join, _SHUTDOWN_SECONDS)
        if self._process.is_alive():
            # A start cannot be interrupted otherwise; nothing of worth is lost.
            self._process.kill()
            await asyncio.to_thread(self._process.join, _SHUTDOWN_SECONDS)
        self._outbox.put(None)
        self._end_queues()

    def _owe(self, request_id: str) -> None:
        if not self._owed:
            self._last_sign = time.monotonic()
        self._owed.add(request_id)

    def _raise_if_gone(self) -> None:
        if self.failure is not None:
            raise EngineDeadError(f"The engine has died: {self.failure}")
        if self._is_stopping:
            raise EngineDeadError("The server is stopping.")

    def _read(self) -> None:
        """Hand everything the engine says to the event loop; runs on a thread of its own."""
        assert self._pipe is not None
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop closed first: nobody listens any more
            while True:
                try:
                    message = self._pipe.recv()
                except (EOFError, OSError):
                    break
                self._loop.call_soon_threadsafe(self._on_message, message)
            self._process.join(_SHUTDOWN_SECONDS)
            self._loop.call_soon_threadsafe(self._on_end)

    def _write(self) -> None:
        """Send what is in the outbox: on a thread, because a full pipe must not stop the loop."""
        assert self._pipe is not None
        with contextlib.suppress(OSError):  # the reader tells of a pipe that is gone
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(outputs, stats, steps):
                self.stats = stats
                self._last_sign = time.monotonic()
                for output in outputs:
                    if output.finish_reason is not None:
                        self._owed.discard(output.request_id)
                    waiting = self._queues.get(output.request_id)
                    if waiting is not None:
                        waiting.put_nowait(output)
                if self.on_stats is not None:
                    self.on_stats(stats)
                if self.on_steps is not None and steps:
                    self.on_steps(steps)
            case StartProgress():
                self.progress = message
            case EngineInfo():
                self.info = message
                self.stats = EngineStats(
                    num_blocks=message.num_blocks, num_free_blocks=message.num_blocks
                )
                if self._started is not None and not self._started.done():
                    self._started.set_result(message)
            case EngineFailed():
                self._fail(_as_error(message))

    def _on_end(self) -> None:
        if self.failure is None and not self._is_stopping:
            code = self._process.exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with status {code}"
            self._fail(EngineDeadError(f"its process ended {how}"))
        self._end_queues()

    def _fail(self, error: HexllmError) -> None:
        if self.failure is not None:
            return
        self.failure = str(error)
        self._end_queues()
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        elif self.on_failure is not None and not self._is_stopping:
            self.on_failure(self.failure)

    def _end_queues(self) -> None:
        for waiting in self._queues.values():
            waiting.put_nowait(None)


def _as_error(failed: EngineFailed) -> HexllmError:
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, HexllmError):
        return kind(failed.message)
    if failed.traceback:
        logger.error("The engine process failed:\n%s", failed.traceback)
    return EngineDeadError(f"{failed.error}: {failed.message}")


def run_engine(settings: Settings, pipe: Connection) -> None:
    """Run the engine until it is told to stop or the server is gone. The process's whole life."""
    # Ctrl-C reaches the whole process group; when to end is the server's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        configure_logging(settings, "engine")
        plugins = load_plugins(settings.plugins)
        plugins.notify("hexllm_configure", settings=settings, process="engine")
        choose_platform(os.environ)
        from hexllm.engine.build import build_engine

        engine = build_engine(settings, plugins, pipe.send)
        pipe.send(engine.info)
        engine.run(lambda wait: _receive(pipe, wait), pipe.send)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the server is gone or going
    except BaseException as error:
        is_expected = isinstance(error, HexllmError)
        trace = "" if is_expected else traceback.format_exc()
        with contextlib.suppress(OSError):
            pipe.send(EngineFailed(type(error).__name__, str(error), trace))
        sys.exit(1)


def choose_platform(environ: Any) -> None:
    """Choose JAX's platform before it is imported, where the user has not.

    With libtpu installed on a machine without a TPU, JAX would spend minutes looking for one.
    """
    if environ.get("JAX_PLATFORMS"):
        return
    has_tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    has_gpu = any(
        importlib.util.find_spec(f"jax_{name}_plugin") for name in ("cuda12", "cuda13", "rocm7")
    )
    if not has_tpu and not has_gpu:
        environ["JAX_PLATFORMS"] = "cpu"
        environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def _receive(pipe: Connection, wait: bool) -> list[ToEngine]:
    messages: list[ToEngine] = []
    if wait:
        messages.append(pipe.recv())
    while pipe.poll():
        messages.append(pipe.recv())
    return messages


def _end_with_parent() -> None:
    """End this process when the server's ends in a way that closes nothing, such as kill -9."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
