"""From settings to a ready engine and tokenizer, while the HTTP server already answers /ping."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from hexllm.core.manifest import compare_manifests
from hexllm.server.tokenizer import Tokenizer, check_tokenizer_fits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hexllm.core.plugins import Plugins
    from hexllm.core.settings import Settings
    from hexllm.engine.client import EngineClient
    from hexllm.engine.messages import EngineInfo
    from hexllm.server.state import ServerState

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PROGRESS_SECONDS = 2.0


def tokenizer_directory(settings: Settings, plugins: Plugins) -> Path:
    """Return a local directory with the tokenizer's files, fetched if need be.

    Raises:
        HexllmError: There is no such checkpoint, or nothing that can open it.
    """
    revision = settings.revision if settings.tokenizer == settings.model else None
    checkpoint = plugins.open_checkpoint(settings.tokenizer, revision, settings.options)
    return checkpoint.directory()


async def start_engine(state: ServerState, plugins: Plugins) -> EngineInfo:
    """Start the engine, load the tokenizer beside it, and make the server ready.

    Raises:
        HexllmError: For a reason that the user can mend.
    """
    settings, client = state.settings, state.client
    # Before the engine: a wrong name fails in a second, and nothing is fetched twice at a time.
    directory = await _in_thread(lambda: tokenizer_directory(settings, plugins))
    reporter = asyncio.create_task(_report_progress(client))
    engine = asyncio.create_task(client.start())
    tokenizer = asyncio.create_task(
        _in_thread(
            lambda: Tokenizer.from_directory(
                directory,
                mode=settings.tokenizer_mode,
                trust_remote_code=settings.trust_remote_code,
            )
        )
    )
    try:
        info, loaded = await asyncio.gather(engine, tokenizer)
    finally:
        for task in (reporter, engine, tokenizer):
            task.cancel()
        await asyncio.gather(reporter, engine, tokenizer, return_exceptions=True)
    compare_manifests(plugins.manifest(), info.manifest)
    check_tokenizer_fits(loaded, info.vocab_size, settings.tokenizer)
    state.tokenizer = loaded
    return info


async def _in_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, made in a daemon thread.

    Not ``asyncio.to_thread``: the process waits for those threads at its end, and a signal to stop
    must not wait for a download.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            outcome = functools.partial(future.set_exception, error)
        else:
            outcome = functools.partial(future.set_result, result)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled meanwhile
            outcome()

    threading.Thread(target=run, name="hexllm-startup", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _report_progress(client: EngineClient) -> None:
    phase, since, reported = "", time.monotonic(), None
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            progress = client.progress
            if progress is None or progress == reported:
                continue
            reported = progress
            if progress.phase != phase:
                phase, since = progress.phase, time.monotonic()
            share = progress.done / progress.total if progress.total else 0.0
            elapsed = time.monotonic() - since
            left = (
                f", about {elapsed / share - elapsed:.0f} s left"
                if share > 0.05 and elapsed > 1
                else ""
            )
            logger.info("%s: %.0f %%%s", progress.phase.capitalize(), 100 * share, left)


class EngineStatsNotifier:
    """Passes the engine's counters to the plugins about once a second."""

    def __init__(self, state: ServerState, interval: float = 1.0) -> None:
        self._state = state
        self._interval = interval
        self._next = 0.0

    def __call__(self, stats: object) -> None:
        """Take the newest counters; most calls do nothing."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval
            self._state.notifier.notify("hexllm_engine_stats", stats=stats)
