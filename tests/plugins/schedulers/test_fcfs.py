"""First come, first served, through the same verification as the scheduler's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hexllm.core.plugins import load_plugins
from hexllm.core.policy import (
    QueueView,
    RequestView,
    SchedulingPolicy,
    verified_order,
    verified_phase,
    verified_victim,
)
from hexllm.core.settings import PluginSettings

POLICY = load_plugins(PluginSettings()).policies.get("fcfs").build()

requests = st.lists(
    st.builds(
        RequestView,
        request_id=st.integers().map(str),
        arrival_time=st.integers(0, 5).map(float),
        num_prompt_tokens=st.integers(1, 99),
        num_output_tokens=st.integers(0, 9),
        max_tokens=st.integers(1, 9),
        priority=st.integers(-2, 2),
    ),
    unique_by=lambda view: view.request_id,
    max_size=12,
)


def test_it_is_a_scheduling_policy() -> None:
    assert isinstance(POLICY, SchedulingPolicy)


@given(waiting=requests)
def test_requests_are_admitted_in_order_of_arrival(waiting: list[RequestView]) -> None:
    answer = POLICY.admission_order(tuple(waiting), 9.0)
    assert len(verified_order("fcfs", waiting, answer)) == len(waiting)
    places = {view.request_id: place for place, view in enumerate(waiting)}
    keys = [(view.arrival_time, places[view.request_id]) for view in answer]
    assert keys == sorted(keys)


@given(running=requests.filter(bool))
def test_the_latest_to_arrive_gives_up_its_blocks(running: list[RequestView]) -> None:
    victim = POLICY.preemption_victim(running)
    verified_victim("fcfs", running, victim)
    after = running[running.index(victim) + 1 :]
    assert all(view.arrival_time <= victim.arrival_time for view in running)
    assert all(view.arrival_time < victim.arrival_time for view in after)


def test_prompts_go_before_decoding() -> None:
    view = RequestView("a", 0.0, 5, 0, 5)
    queues = QueueView((view,), (view,), 1, 9, 0.0)
    assert verified_phase("fcfs", POLICY.next_phase(queues)) == "prefill"
    POLICY.on_finished(view)
