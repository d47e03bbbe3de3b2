"""The server's side of the engine (the part that needs no process is here; see ``process``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from hexllm.core.events import EngineStats
    from hexllm.engine.messages import (
        EngineInfo,
        GenerateRequest,
        RequestOutput,
        StartProgress,
        StepSeconds,
    )


@runtime_checkable
class EngineClient(Protocol):
    """An engine as the server sees it.

    Attributes:
        info: Set once the engine is ready, None before.
        stats: The newest counters.
        progress: How far the start is, None before the first report.
        failure: Why the engine is gone, None while it lives.
        on_stats: Called with each new ``stats`` on the event loop; None for nobody.
        on_steps: Called with the steps that ended on the event loop; None for nobody.
        on_failure: Called once with ``failure`` on the event loop when a started engine dies.
    """

    info: EngineInfo | None
    stats: EngineStats
    progress: StartProgress | None
    failure: str | None
    on_stats: Callable[[EngineStats], None] | None
    on_steps: Callable[[tuple[StepSeconds, ...]], None] | None
    on_failure: Callable[[str], None] | None

    @property
    def is_ready(self) -> bool:
        """Whether requests are served now."""
        ...

    @property
    def silence(self) -> float:
        """Seconds since the engine last ended a step, while it owes an answer; 0 when it does not.

        An engine that is asked something after a pause has its time from then on.
        """
        ...

    async def start(self) -> EngineInfo:
        """Start the engine process and return once it is ready.

        Raises:
            HexllmError: It could not start for a reason the user can mend (same class and text as
                raised in the engine process).
            EngineDeadError: It died for another reason.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Yield the sequence's outputs until one has a ``finish_reason``.

        Closing the iterator early (or cancelling its task) aborts the request.

        Raises:
            EngineDeadError: The engine is gone, or goes while the request is open.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request; its iterator ends at once with ``finish_reason == "abort"``.

        Even when the engine hangs: nothing is waited for.
        """
        ...

    async def shutdown(self) -> None:
        """End the engine process, by force if it does not go within a few seconds."""
        ...
