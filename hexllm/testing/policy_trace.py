"""An engine without a model, for tests of scheduling policies: queues, blocks and a clock.

It asks a policy what the engine asks, in the same order, and verifies each answer as the engine
does; a wrong answer is an error here, where the engine would go on without the policy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hexllm.core.policy import (
    QueueView,
    RequestView,
    verified_order,
    verified_phase,
    verified_victim,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hexllm.core.policy import SchedulingPolicy

# Times are multiples of powers of two, so that sums of them are exact wherever the clock starts.
#: Seconds that a decode step takes.
DECODE_SECONDS = 1 / 64
#: Seconds that a prefill takes for each token.
PREFILL_SECONDS = 1 / 8192
#: The most prompts in one prefill.
MAX_PREFILLS = 4


def make_requests(count: int, *, seed: int, longest: int = 4096) -> list[RequestView]:
    """Return made-up requests, all with arrival time 0.

    Most prompts are short and a few very long, most come from one tenant of five, and the
    priorities differ, so that every policy has somebody to neglect.

    Args:
        count: How many.
        seed: The same gives the same.
        longest: Tokens of the longest prompts.
    """
    rng = random.Random(seed)
    tenants = ["crowd"] * 16 + ["ann", "bob", "cyd", None]
    return [
        RequestView(
            request_id=f"request-{number}",
            arrival_time=0.0,
            num_prompt_tokens=max(1, min(longest, int(rng.lognormvariate(4.5, 1.5)))),
            num_output_tokens=0,
            max_tokens=rng.randint(1, 16),
            priority=rng.choice([-1, 0, 0, 1]),
            user=rng.choice(tenants),
        )
        for number in range(count)
    ]


@dataclass(slots=True)
class _Open:
    """A request in the engine: its view, and the tokens it has in the cache."""

    view: RequestView
    num_cached: int = 0


@dataclass
class PolicyEngine:
    """Serves requests as a policy says, with a bounded waiting room that is never left empty.

    The next request comes at the moment there is room, so the machine is overloaded until the last
    one has come.

    Attributes:
        policy: What is tested.
        slots: Sequences that may run at once.
        num_blocks: KV blocks.
        block_size: Tokens a block.
        room: Requests that may wait.
        abort: After one step in so many a random open request is aborted; 0 aborts none.
        now: The clock, seconds.
        admitted: Request ids in order of admission, once for each.
        ended: Request ids in order of their ends, aborted ones too.
        num_ended_at_arrival: By request id, how many had ended when it came.
        num_preemptions: How often blocks were taken back.
        least_free: The fewest blocks that were free at any time.
    """

    policy: SchedulingPolicy
    slots: int = 16
    num_blocks: int = 8192
    block_size: int = 16
    room: int = 128
    abort: int = 0
    now: float = 0.0
    admitted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    num_ended_at_arrival: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    least_free: int = field(init=False)

    def __post_init__(self) -> None:
        self.least_free = self.num_free = self.num_blocks
        self._waiting: dict[str, _Open] = {}
        self._running: dict[str, _Open] = {}
        self._rng = random.Random(0)

    def serve(self, requests: Sequence[RequestView]) -> None:
        """Serve all of ``requests``, whatever it takes.

        Raises:
            PolicyError: The policy gave a wrong answer.
        """
        coming = iter(requests)
        self._arrive(coming)
        while self._waiting or self._running:
            if not self._prefill():
                self._decode()
            if self.abort and self._rng.randrange(self.abort) == 0:
                self._end(self._rng.choice([*self._waiting, *self._running, "nobody"]))
            self._arrive(coming)

    def overtaken(self) -> dict[str, int]:
        """Return, by request id, how many others ended between its arrival and its end."""
        return {
            request_id: place - self.num_ended_at_arrival[request_id]
            for place, request_id in enumerate(self.ended)
        }

    def _arrive(self, coming: Iterator[RequestView]) -> None:
        while len(self._waiting) < self.room:
            view = next(coming, None)
            if view is None:
                return
            self._waiting[view.request_id] = _Open(replace(view, arrival_time=self.now))
            self.num_ended_at_arrival[view.request_id] = len(self.ended)

    def _views(self, opens: dict[str, _Open]) -> tuple[RequestView, ...]:
        return tuple(each.view for each in opens.values())

    def _prefill(self) -> bool:
        """Admit whom the policy names, if it says so and they fit; say whether any did."""
        if not self._waiting or len(self._running) == self.slots or not self._wants_prefill():
            return False
        views = self._views(self._waiting)
        answer = self.policy.admission_order(views, self.now)
        num_tokens = num_admitted = 0
        for request_id in verified_order("under test", views, answer):
            each = self._waiting[request_id]
            length = each.view.num_prompt_tokens + each.view.num_output_tokens
            needed = self._blocks_for(length)
            if (
                num_admitted == MAX_PREFILLS
                or len(self._running) == self.slots
                or needed + len(self._running) > self.num_free
            ):
                break
            del self._waiting[request_id]
            self._running[request_id] = each
            self._take(each, needed)
            if not each.view.num_preemptions:
                self.admitted.append(request_id)
            num_tokens += length
            num_admitted += 1
            self._advance(each, length)
        self.now += num_tokens * PREFILL_SECONDS
        return num_admitted > 0

    def _wants_prefill(self) -> bool:
        if not self._running:
            return True
        waiting, running = self._views(self._waiting), self._views(self._running)
        queues = QueueView(waiting, running, self.num_free, self.num_blocks, self.now)
        return verified_phase("under test", self.policy.next_phase(queues)) == "prefill"

    def _decode(self) -> None:
        for request_id, each in list(self._running.items()):
            while request_id in self._running and self._lacks_block(each):
                if self.num_free:
                    self._take(each, each.view.num_blocks + 1)
                else:
                    self._preempt()
        for each in list(self._running.values()):
            self._advance(each, each.num_cached + 1)
        self.now += DECODE_SECONDS

    def _advance(self, each: _Open, num_cached: int) -> None:
        """Add a token to a sequence and end it at its length."""
        each.num_cached = num_cached
        each.view = replace(each.view, num_output_tokens=each.view.num_output_tokens + 1)
        if each.view.num_output_tokens >= each.view.max_tokens:
            self._end(each.view.request_id)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _lacks_block(self, each: _Open) -> bool:
        return self._blocks_for(each.num_cached + 1) > each.view.num_blocks

    def _take(self, each: _Open, num_blocks: int) -> None:
        self.num_free -= num_blocks - each.view.num_blocks
        self.least_free = min(self.least_free, self.num_free)
        each.view = replace(each.view, num_blocks=num_blocks)

    def _preempt(self) -> None:
        views = self._views(self._running)
        victim = verified_victim("under test", views, self.policy.preemption_victim(views))
        each = self._running.pop(victim)
        self._take(each, 0)
        each.num_cached = 0
        each.view = replace(each.view, num_preemptions=each.view.num_preemptions + 1)
        self.num_preemptions += 1
        self._waiting = {victim: each, **self._waiting}

    def _end(self, request_id: str) -> None:
        each = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        if each is None:
            return
        view = each.view
        self._take(each, 0)
        self.ended.append(request_id)
        self.policy.on_finished(view)
