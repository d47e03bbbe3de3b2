"""Who is let in: a bounded queue before the engine, and an end to what is open."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING

from hexllm.server.errors import QueueFullError

if TYPE_CHECKING:
    from hexllm.core.errors import RequestError
    from hexllm.core.settings import Settings
    from hexllm.engine.client import EngineClient
    from hexllm.server.generation import Generation

#: The longest that a refused client is told to wait, in seconds.
_LONGEST_WAIT = 60
#: How many of the last endings say how fast the queue moves.
_ENDINGS = 64


class Admission:
    """Counts what is open and refuses what would wait too far back.

    The engine computes ``max_running_seqs`` sequences at once and ``--max_queued_requests`` more
    may wait. The count is the server's own: the engine's is a step old, and a burst would pass it.

    Attributes:
        num_open: Sequences let in and not ended.
        num_refused: Counter of requests refused because the queue was full.
    """

    def __init__(self, settings: Settings, client: EngineClient) -> None:
        self.num_open = 0
        self.num_refused = 0
        self._max_queued = settings.max_queued_requests
        self._client = client
        self._open: set[Generation] = set()
        self._closed_by: RequestError | None = None
        self._endings: deque[float] = deque(maxlen=_ENDINGS)

    def check_room(self, num_sequences: int = 1) -> None:
        """Check that ``num_sequences`` more would find a place.

        One request with more choices than there are places is let in while nothing else is open:
        it would never be otherwise.

        Raises:
            QueueFullError: They would not.
        """
        info = self._client.info
        if self._max_queued is None or info is None or not self.num_open:
            return
        if self.num_open + num_sequences <= info.max_running_seqs + self._max_queued:
            return
        self.num_refused += 1
        raise QueueFullError(
            f"The server is full: {self.num_open} sequences are open, {info.max_running_seqs} run "
            f"at once and {self._max_queued} more may wait (--max_queued_requests). Try again "
            f"later.",
            retry_after=self._seconds_to_drain(self.num_open - info.max_running_seqs),
        )

    def enter(self, generation: Generation) -> None:
        """Let a request in; it must ``leave``.

        Raises:
            QueueFullError: There is no room.
            RequestError: The server has ended all requests, and will itself.
        """
        if self._closed_by is not None:
            raise self._closed_by
        self.check_room(len(generation.sequences))
        self._open.add(generation)
        self.num_open += len(generation.sequences)

    def leave(self, generation: Generation) -> None:
        """Take note that a request has ended, however it did."""
        self._open.discard(generation)
        self.num_open -= len(generation.sequences)
        self._endings.extend([time.monotonic()] * len(generation.sequences))

    def close(self, error: RequestError) -> None:
        """End every open request with ``error``, and all that still come."""
        self._closed_by = error
        for generation in tuple(self._open):
            generation.end(error)

    def _seconds_to_drain(self, num_queued: int) -> int:
        """Return how long the queue takes at the pace of the last endings, 1 to 60 s."""
        if len(self._endings) < 2:
            return 1
        pace = (time.monotonic() - self._endings[0]) / len(self._endings)
        return max(1, min(_LONGEST_WAIT, math.ceil(num_queued * pace)))


class Exchanges:
    """Counts HTTP requests between their arrival and the last byte of their answer."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self) -> None:
        """Count one more."""
        self._count += 1
        self._none.clear()

    def end(self) -> None:
        """Count one less."""
        self._count -= 1
        if not self._count:
            self._none.set()

    async def wait_for_none(self) -> None:
        """Return once none is under way."""
        await self._none.wait()
