"""Every test of the policy kit fails for a policy that has the fault it looks for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hexllm.core.errors import PolicyError
from hexllm.plugins.schedulers.fcfs import FirstComeFirstServed
from hexllm.testing import SchedulingPolicyTests


class WithoutAMethod:
    def admission_order(self, waiting: Any, now: float) -> Any:
        return waiting


class DropsTheLast(FirstComeFirstServed):
    def admission_order(self, waiting, now):
        return waiting[:-1]


class Rotates(FirstComeFirstServed):
    turn = 0

    def admission_order(self, waiting, now):
        self.turn += 1
        place = self.turn % max(1, len(waiting))
        return [*waiting[place:], *waiting[:place]]


class Sleeps(FirstComeFirstServed):
    def next_phase(self, queues):
        return "prefill" if queues.num_free_blocks else "wait"


class NamesAWaiting(FirstComeFirstServed):
    def preemption_victim(self, running):
        return None


class Dices(FirstComeFirstServed):
    def admission_order(self, waiting, now):
        return sorted(waiting, key=lambda each: random.random())


class LooksAtTheDate(FirstComeFirstServed):
    def admission_order(self, waiting, now):
        return sorted(waiting, key=lambda each: (each.num_prompt_tokens * int(1 + now)) % 97)


class NewestFirst(FirstComeFirstServed):
    def admission_order(self, waiting, now):
        return sorted(waiting, key=lambda each: -each.arrival_time)


class ShortestWithoutAgeing(FirstComeFirstServed):
    def admission_order(self, waiting, now):
        return sorted(waiting, key=lambda each: each.num_prompt_tokens)


class FailsWhenFull(FirstComeFirstServed):
    def preemption_victim(self, running):
        return min(each for each in running if each.num_blocks > 10_000)


class Hoards(FirstComeFirstServed):
    def __init__(self):
        self.ended = []

    def on_finished(self, request):
        self.ended.append(request)


class MustHaveSeenIt(FirstComeFirstServed):
    def __init__(self):
        self.seen = {}

    def admission_order(self, waiting, now):
        self.seen.update({each.request_id: each for each in waiting})
        return super().admission_order(waiting, now)

    def on_finished(self, request):
        del self.seen[request.request_id]


CASES = [
    ("test_it_has_the_four_methods", WithoutAMethod, AssertionError),
    ("test_the_order_is_a_permutation", DropsTheLast, PolicyError),
    ("test_asking_is_not_admitting", Rotates, AssertionError),
    ("test_the_phase_is_one_of_two", Sleeps, PolicyError),
    ("test_the_victim_runs", NamesAWaiting, PolicyError),
    ("test_the_same_requests_get_the_same_answers", Dices, AssertionError),
    ("test_only_the_engines_clock_counts", LooksAtTheDate, AssertionError),
    ("test_nobody_starves", NewestFirst, AssertionError),
    ("test_nobody_starves", ShortestWithoutAgeing, AssertionError),
    ("test_it_survives_zero_free_blocks", FailsWhenFull, ValueError),
    ("test_it_survives_zero_free_blocks", Sleeps, PolicyError),
    ("test_what_ended_is_forgotten", Hoards, AssertionError),
    ("test_what_ended_is_forgotten", MustHaveSeenIt, KeyError),
]


@pytest.mark.parametrize(("test", "faulty", "error"), CASES)
def test_it_finds(test: str, faulty: type[Any], error: type[Exception]) -> None:
    kit = type("Kit", (SchedulingPolicyTests,), {"policy": faulty})()
    with pytest.raises(error):
        getattr(kit, test)()


def test_every_test_has_a_fault_that_it_finds() -> None:
    tests = {name for name in vars(SchedulingPolicyTests) if name.startswith("test_")}
    assert tests == {test for test, _, _ in CASES}
