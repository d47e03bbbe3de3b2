"""The tests that every scheduling policy must pass, as a class to inherit."""

from __future__ import annotations

import gc
import random
import types
from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.core.policy import (
    QueueView,
    RequestView,
    SchedulingPolicy,
    verified_order,
    verified_phase,
    verified_victim,
)
from hexllm.testing.policy_trace import PolicyEngine, make_requests

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Requests in the trace that nobody may starve in.
TRACE = 10_000
#: A request that sees so many others end before itself is starved. First come, first served lets
#: about 150 pass, those that wait and run already.
PATIENCE = TRACE // 5


class SchedulingPolicyTests:
    """Proves a policy. Subclass it, set ``policy``, and pytest does the rest.

    Attributes:
        policy: The policy's class.
        options: What it is built with; None where its component has no options.
    """

    policy: ClassVar[type[Any]]
    options: ClassVar[object] = None

    def build(self) -> SchedulingPolicy:
        """Return a new instance, as the engine builds it."""
        arguments = [] if self.options is None else [self.options]
        policy: SchedulingPolicy = self.policy(*arguments)
        return policy

    def test_it_has_the_four_methods(self) -> None:
        assert isinstance(self.build(), SchedulingPolicy)

    def test_the_order_is_a_permutation(self) -> None:
        policy = self.build()
        for views in self._queues():
            order = policy.admission_order(views, 99.0)
            assert len(verified_order("under test", views, order)) == len(views)

    def test_asking_is_not_admitting(self) -> None:
        # Requests that do not fit are asked about again in the next step.
        policy = self.build()
        for views in self._queues():
            first = list(policy.admission_order(views, 99.0))
            assert list(policy.admission_order(views, 99.0)) == first

    def test_the_phase_is_one_of_two(self) -> None:
        policy = self.build()
        for views in self._queues(smallest=2):
            half = len(views) // 2
            for num_free in (0, 1, 64):
                queues = QueueView(views[:half], views[half:], num_free, 64, 99.0)
                verified_phase("under test", policy.next_phase(queues))

    def test_the_victim_runs(self) -> None:
        policy = self.build()
        for views in self._queues(smallest=1):
            verified_victim("under test", views, policy.preemption_victim(views))

    def test_the_same_requests_get_the_same_answers(self) -> None:
        first, second = self._served(abort=9), self._served(abort=9)
        assert first.admitted == second.admitted
        assert first.ended == second.ended

    def test_only_the_engines_clock_counts(self) -> None:
        # A machine that has been up for a year decides as one that was just started.
        early, late = self._served(), self._served(now=2.0**25)
        assert early.admitted == late.admitted
        assert early.ended == late.ended

    def test_nobody_starves(self) -> None:
        requests = make_requests(TRACE, seed=0)
        engine = PolicyEngine(self.build())
        engine.serve(requests)
        assert len(engine.ended) == TRACE
        overtaken = engine.overtaken()
        worst = max(requests, key=lambda each: overtaken[each.request_id])
        passed = overtaken[worst.request_id]
        assert passed < PATIENCE, f"{passed} requests ended while this one waited: {worst}"

    def test_it_survives_zero_free_blocks(self) -> None:
        requests = make_requests(300, seed=1, longest=100)
        # Blocks for the longest sequence alone, and hardly more.
        engine = PolicyEngine(self.build(), slots=8, num_blocks=32, block_size=4)
        engine.serve(requests)
        assert sorted(engine.ended) == sorted(each.request_id for each in requests)
        assert engine.least_free == 0
        assert engine.num_preemptions > 0
        assert engine.num_free == engine.num_blocks

    def test_what_ended_is_forgotten(self) -> None:
        policy = self.build()
        policy.on_finished(make_requests(1, seed=4)[0])  # aborted before it was ever asked about
        requests = make_requests(300, seed=2, longest=100)
        engine = PolicyEngine(policy, slots=8, num_blocks=64, block_size=4, abort=5)
        engine.serve(requests)
        ids = {each.request_id for each in requests}
        kept = sorted({each for each in _reachable(policy) if isinstance(each, str)} & ids)
        assert len(kept) < 10, f"still kept after all have ended: {kept[:10]}"

    def _served(self, **options: Any) -> PolicyEngine:
        engine = PolicyEngine(self.build(), slots=8, num_blocks=300, block_size=16, **options)
        engine.serve(make_requests(500, seed=3, longest=2000))
        return engine

    def _queues(self, smallest: int = 0) -> Iterator[tuple[RequestView, ...]]:
        """Yield views of many kinds; equal ones, preempted ones and long queues among them."""
        rng = random.Random(5)
        for number, size in enumerate([0, 1, 2, 2, 3, 5, 8, 13, 100, 1000]):
            if size < smallest:
                continue
            yield tuple(
                RequestView(
                    request_id=f"queue-{number}-{place}",
                    arrival_time=float(rng.randrange(8)),
                    num_prompt_tokens=rng.choice([1, 7, 7, 4000]),
                    num_output_tokens=rng.randrange(4),
                    max_tokens=4,
                    num_blocks=rng.randrange(3),
                    num_preemptions=rng.randrange(2),
                    priority=rng.randrange(-1, 2),
                    user=rng.choice([None, "", "ann", "bob"]),
                )
                for place in range(size)
            )


def _reachable(root: object) -> Iterator[object]:
    """Yield every object that ``root`` keeps alive by its data; code is left out."""
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    seen: dict[int, object] = {}
    open_ = [root]
    while open_:
        each = open_.pop()
        if id(each) in seen or isinstance(each, code):
            continue
        seen[id(each)] = each
        yield each
        open_ += gc.get_referents(each)
