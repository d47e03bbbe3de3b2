"""Shortest first: by prompt, with ageing that bounds who may overtake."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexllm.core.errors import ConfigError
from hexllm.core.plugins import load_plugins
from hexllm.core.policy import QueueView, RequestView, verified_order, verified_victim
from hexllm.core.settings import PluginSettings
from hexllm.plugins.schedulers.sjf import Options, ShortestFirst

requests = st.lists(
    st.builds(
        RequestView,
        request_id=st.integers().map(str),
        arrival_time=st.integers(0, 64).map(float),
        num_prompt_tokens=st.integers(1, 5000),
        num_output_tokens=st.integers(0, 9),
        max_tokens=st.integers(1, 9),
    ),
    unique_by=lambda view: view.request_id,
    max_size=12,
)
# Powers of two, with which the test's sums are exact.
ageings = st.sampled_from([0.5, 1.0, 64.0, 128.0])


def order(waiting: list[RequestView], now: float, ageing: float) -> list[str]:
    answer = ShortestFirst(Options(ageing=ageing)).admission_order(tuple(waiting), now)
    return verified_order("sjf", waiting, answer)


def view(name: str, arrival: float, prompt: int) -> RequestView:
    return RequestView(name, arrival, prompt, 0, 9)


def test_those_who_came_at_once_go_by_prompt() -> None:
    waiting = [view("long", 0.0, 500), view("short", 0.0, 5), view("twin", 0.0, 5)]
    assert order(waiting, 50.0, 100.0) == ["short", "twin", "long"]


def test_age_makes_up_for_length() -> None:
    long = view("long", 0.0, 1000)
    assert order([long, view("just", 9.5, 10)], 9.5, 100.0) == ["just", "long"]
    assert order([view("late", 10.0, 10), long], 10.0, 100.0) == ["long", "late"]


@given(waiting=requests, now=st.integers(64, 999).map(float), ageing=ageings)
def test_nobody_is_overtaken_past_its_length_over_ageing(
    waiting: list[RequestView], now: float, ageing: float
) -> None:
    views = {each.request_id: each for each in waiting}
    answer = [views[request_id] for request_id in order(waiting, now, ageing)]
    for place, behind in enumerate(answer):
        for ahead in answer[:place]:
            lead = behind.num_prompt_tokens - ahead.num_prompt_tokens
            assert ahead.arrival_time - behind.arrival_time <= lead / ageing


@given(running=requests.filter(bool), ageing=ageings)
def test_the_victim_is_the_last_of_the_order(running: list[RequestView], ageing: float) -> None:
    victim = ShortestFirst(Options(ageing=ageing)).preemption_victim(tuple(running))
    verified_victim("sjf", running, victim)
    assert victim.request_id == order(running, 999.0, ageing)[-1]


def test_prompts_go_before_decoding() -> None:
    one = view("a", 0.0, 5)
    policy = ShortestFirst(Options())
    assert policy.next_phase(QueueView((one,), (one,), 1, 9, 0.0)) == "prefill"


@pytest.mark.parametrize(
    "wrong", [{"ageing": 0}, {"ageing": -1}, {"ageing": "inf"}, {"ageing": "fast"}, {"agein": 3}]
)
def test_options_that_cannot_be_used(wrong: dict[str, Any]) -> None:
    chosen = load_plugins(PluginSettings()).policies.get("sjf")
    with pytest.raises(ConfigError, match=r"sjf.*agein"):
        chosen.build(wrong)
