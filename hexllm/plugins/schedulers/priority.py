"""The most urgent first, by the ``priority`` field of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.core.policy import Phase, QueueView, RequestView


class UrgentFirst:
    """Serves requests by ``priority``, lower first as in vLLM, and equal ones by arrival.

    It is strict: while more urgent requests keep coming and fill the machine, the others wait.
    Blocks are taken from the least urgent first, of equals from the latest to arrive; that is the
    order of admission from its other end, so the first in order always advances. Nobody is
    preempted for a waiting request, however urgent: only when blocks run out.
    """

    def admission_order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Return ``waiting`` by priority, then arrival; the rest is as it was."""
        return sorted(waiting, key=_rank)

    def next_phase(self, queues: QueueView) -> Phase:
        """Choose prefill: an urgent request that has come should not wait for running ones."""
        return "prefill"

    def preemption_victim(self, running: Sequence[RequestView]) -> RequestView:
        """Return the last of ``running`` by priority and arrival."""
        last = max(_rank(request) for request in running)
        return [request for request in running if _rank(request) == last][-1]

    def on_finished(self, request: RequestView) -> None:
        """Forget nothing, because nothing is kept."""


def _rank(request: RequestView) -> tuple[int, float]:
    return request.priority, request.arrival_time
