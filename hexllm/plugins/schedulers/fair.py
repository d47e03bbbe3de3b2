"""Tenants share the machine: who has had the fewest tokens is served next.

Each tenant has a clock of virtual time that its tokens move on. The one that is furthest behind
goes first, as in fair queueing of packets (Demers, Keshav and Shenker, 1989), with tokens for bits.
Output tokens are only counted once they are there, as in "Fairness in Serving Large Language
Models" (Sheng et al., 2024), because nobody knows before how many there will be.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hexllm.core.policy import Phase, QueueView, RequestView

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Options(BaseModel):
    """What ``[options.fair]`` may hold.

    Attributes:
        by: Who a tenant is: a request's ``tenant`` (its ``user`` field, else its API key), or its
            ``user`` or ``api_key`` alone. Clients write ``user`` themselves: where they would
            invent users to get more, choose ``api_key``. Requests without are one tenant, "".
        shares: The shares of tenants that are not to have the usual 1, by their names.
        output_weight: What an output token costs, in prompt tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    by: Literal["tenant", "user", "api_key"] = "tenant"
    shares: dict[str, Weight] = Field(default_factory=dict)
    output_weight: Weight = 2.0


class FairShare:
    """Serves the tenant that has had the least for its share, each tenant's requests by arrival.

    A tenant that has nothing waiting saves nothing up: when it comes back, its clock is set to the
    machine's, which is what a tenant would show that always wanted more and got its share.
    Blocks are taken from the tenant that has had the most.
    """

    def __init__(self, options: Options) -> None:
        """Start with every clock at 0."""
        self._options = options
        self._clock = 0.0  # the machine's
        self._clocks: dict[str, float] = {}  # tenants', of those with open requests or ahead
        self._open: dict[str, str] = {}  # the tenant of each open request
        self._num_open: Counter[str] = Counter()  # by tenant
        self._backlogged: set[str] = set()  # tenants that had requests waiting at the last look
        self._charged: dict[str, float] = {}  # the cost counted so far of each open request
        self._waiting: dict[str, RequestView] = {}  # as of the last look

    def admission_order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Return ``waiting`` with each next one of the tenant furthest behind.

        The prompts ahead in the order count as served, so that one answer is fair in itself.
        """
        self._look(waiting)
        queues: dict[str, deque[RequestView]] = defaultdict(deque)
        for request in sorted(waiting, key=lambda request: request.arrival_time):
            queues[self._tenant(request)].append(request)
        # Of tenants equally far the one whose request came first.
        heap = [
            (self._clocks[tenant], queue[0].arrival_time, tenant)
            for tenant, queue in queues.items()
        ]
        heapq.heapify(heap)
        order = []
        while heap:
            clock, _, tenant = heap[0]
            queue = queues[tenant]
            request = queue.popleft()
            order.append(request)
            if not queue:
                heapq.heappop(heap)
                continue
            added = self._cost(request) - self._charged.get(request.request_id, 0.0)
            clock += added / self._share(tenant)
            heapq.heapreplace(heap, (clock, queue[0].arrival_time, tenant))
        return order

    def next_phase(self, queues: QueueView) -> Phase:
        """Choose prefill, and count what the running have had."""
        self._look(queues.waiting)
        self._charge(queues.running)
        return "prefill"

    def preemption_victim(self, running: Sequence[RequestView]) -> RequestView:
        """Return the latest to arrive of the tenant that has had the most for its share."""
        self._charge(running)

        def rank(place: int) -> tuple[float, float, int]:
            request = running[place]
            return self._clocks[self._tenant(request)], request.arrival_time, place

        return running[max(range(len(running)), key=rank)]

    def on_finished(self, request: RequestView) -> None:
        """Count what it had, and forget it."""
        request_id = request.request_id
        if request.num_blocks or request.num_preemptions:
            self._charge([request])
        self._waiting.pop(request_id, None)
        self._charged.pop(request_id, None)
        tenant = self._open.pop(request_id, None)
        if tenant is not None:
            self._num_open[tenant] -= 1
            if not self._num_open[tenant]:
                del self._num_open[tenant]
                self._backlogged.discard(tenant)
        self._forget()

    def _look(self, waiting: Iterable[RequestView]) -> None:
        """Learn who has come, and who was admitted since the last look: it waits no more."""
        views = {request.request_id: request for request in waiting}
        admitted = [view for name, view in self._waiting.items() if name not in views]
        self._waiting = views
        self._charge(admitted)
        backlogged = {self._tenant(request) for request in views.values()}
        still = [self._clocks[tenant] for tenant in backlogged & self._backlogged]
        if still:
            self._clock = max(self._clock, min(still))
        for tenant in backlogged - self._backlogged:
            self._clocks[tenant] = max(self._clocks.get(tenant, 0.0), self._clock)
        self._backlogged = backlogged
        for request in views.values():
            self._enter(request)

    def _enter(self, request: RequestView) -> None:
        if request.request_id not in self._open:
            tenant = self._tenant(request)
            self._open[request.request_id] = tenant
            self._num_open[tenant] += 1
            self._clocks.setdefault(tenant, self._clock)

    def _charge(self, served: Iterable[RequestView]) -> None:
        """Move the clocks on by what ``served`` requests had since they were last counted."""
        total = 0.0
        for request in served:
            self._enter(request)
            cost = self._cost(request)
            added = max(0.0, cost - self._charged.get(request.request_id, 0.0))
            self._charged[request.request_id] = cost
            tenant = self._tenant(request)
            self._clocks[tenant] += added / self._share(tenant)
            total += added
        if total:
            # It must move while newcomers are served, who start from it: else an endless row of
            # them would keep out a tenant that has had a little more.
            self._clock += total / sum(map(self._share, self._num_open))

    def _forget(self) -> None:
        """Drop the clocks of tenants without open requests that say no more than the machine's."""
        if not self._num_open:
            # Nobody is kept waiting: nobody owes anything.
            self._clock = 0.0
            self._clocks.clear()
        elif len(self._clocks) > 2 * len(self._num_open) + 64:
            self._clocks = {
                tenant: clock
                for tenant, clock in self._clocks.items()
                if tenant in self._num_open or clock > self._clock
            }

    def _cost(self, request: RequestView) -> float:
        """Return what a request has had or, if it waits, has had once it is admitted."""
        outputs = self._options.output_weight * request.num_output_tokens
        return request.num_prompt_tokens + outputs

    def _share(self, tenant: str) -> float:
        return self._options.shares.get(tenant, 1.0)

    def _tenant(self, request: RequestView) -> str:
        return getattr(request, self._options.by) or ""
