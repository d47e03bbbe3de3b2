"""Calls the notify hooks in a thread of their own, so that no plugin can slow a response."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexllm.core.plugins import Plugins

logger = logging.getLogger(__name__)

#: Events kept for slow plugins; more are dropped, with a warning.
_MAX_WAITING = 10_000


class Notifier:
    """Hands events to the plugins' notify hooks, in order, without making the caller wait."""

    def __init__(self, plugins: Plugins | None) -> None:
        self._plugins = plugins
        self._events: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._num_dropped = 0

    def notify(self, hook: str, **arguments: Any) -> None:
        """Have ``hook`` called with ``arguments`` soon; never blocks and never raises."""
        if self._plugins is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hexllm-notify", daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait((hook, arguments))
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                logger.warning(
                    "A plugin's notify hook is too slow: events are dropped from now on."
                )

    def close(self, timeout: float = 1.0) -> None:
        """Call what is still waiting, for at most ``timeout`` seconds, and end the thread."""
        if self._thread is None:
            return
        try:
            self._events.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        assert self._plugins is not None
        while (event := self._events.get()) is not None:
            hook, arguments = event
            try:
                self._plugins.notify(hook, **arguments)
            except Exception:
                logger.exception("The hook %s failed", hook)
