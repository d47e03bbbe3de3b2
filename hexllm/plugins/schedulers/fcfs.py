"""First come, first served: what a user expects who expects nothing in particular."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.core.policy import Phase, QueueView, RequestView


class FirstComeFirstServed:
    """Serves requests in order of arrival, prompts before decoding.

    The latest to arrive gives up its blocks first, and its old place in the order brings it back
    before anyone who came after it; so the oldest request always advances, and all of them end.
    """

    def admission_order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Return ``waiting`` by arrival; requests that came at the same moment keep their order."""
        return sorted(waiting, key=lambda request: request.arrival_time)

    def next_phase(self, queues: QueueView) -> Phase:
        """Choose prefill: a full batch decodes faster per token than a part of one."""
        return "prefill"

    def preemption_victim(self, running: Sequence[RequestView]) -> RequestView:
        """Return the latest to arrive; of those that came at once, the latest admitted."""
        latest = max(request.arrival_time for request in running)
        return [request for request in running if request.arrival_time == latest][-1]

    def on_finished(self, request: RequestView) -> None:
        """Forget nothing, because nothing is kept."""
