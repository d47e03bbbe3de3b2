from __future__ import annotations

from typing import Any

import pytest
from hexllm_example_plugin import hexllm_scheduling_policies
from hexllm_example_plugin.policy import Options, ShortestFirst
from pydantic import ValidationError

from hexllm.core.component import Component
from hexllm.core.policy import RequestView, SchedulingPolicy, verified_order, verified_victim


def request(name: str, arrival: float, prompt: int, output: int, done: int = 0) -> RequestView:
    return RequestView(name, arrival, prompt, done, output)


LONG = request("long", 0.0, 100, 5)
SHORT = request("short", 1.0, 10, 50)
TWIN = request("twin", 2.0, 10, 50)
WAITING = (LONG, SHORT, TWIN)


def order(now: float = 3.0, **options: Any) -> list[str]:
    policy = ShortestFirst(Options(**options))
    return verified_order("shortest", WAITING, policy.admission_order(WAITING, now))


def test_the_shortest_goes_first_and_equals_by_arrival() -> None:
    assert order() == ["short", "twin", "long"]
    assert order(by="prompt") == ["short", "twin", "long"]
    assert order(by="output") == ["long", "short", "twin"]


def test_patience_ends() -> None:
    assert order(now=9.0, patience=9.5) == ["short", "twin", "long"]
    assert order(now=9.5, patience=9.5) == ["long", "short", "twin"]
    assert order(now=2.0, patience=0) == ["long", "short", "twin"]


def test_the_victim_has_the_most_left_to_do() -> None:
    policy = ShortestFirst(Options())
    running = (LONG, request("nearly", 1.0, 10, 50, done=49), SHORT, TWIN)
    assert verified_victim("shortest", running, policy.preemption_victim(running)) == "twin"


def test_it_is_a_policy_and_its_record_is_right() -> None:
    assert isinstance(ShortestFirst(Options()), SchedulingPolicy)
    (record,) = hexllm_scheduling_policies()
    assert isinstance(record, Component)
    assert record.implementation == f"{ShortestFirst.__module__}:{ShortestFirst.__name__}"
    assert record.options == f"{Options.__module__}:{Options.__name__}"


@pytest.mark.parametrize("wrong", [{"patience": -1}, {"by": "mood"}, {"patiance": 3}])
def test_options_that_cannot_be_used(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Options(**wrong)
