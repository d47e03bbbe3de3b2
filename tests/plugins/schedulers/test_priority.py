"""Priority: lower goes first, equals by arrival, and blocks come from the other end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hexllm.core.policy import QueueView, RequestView, verified_order, verified_victim
from hexllm.plugins.schedulers.priority import UrgentFirst
from hexllm.testing.policy_trace import PolicyEngine

requests = st.lists(
    st.builds(
        RequestView,
        request_id=st.integers().map(str),
        arrival_time=st.integers(0, 3).map(float),
        num_prompt_tokens=st.integers(1, 99),
        num_output_tokens=st.integers(0, 9),
        max_tokens=st.integers(1, 9),
        priority=st.integers(-2, 2),
    ),
    unique_by=lambda view: view.request_id,
    max_size=12,
)


@given(waiting=requests)
def test_lower_goes_first_and_equals_by_arrival(waiting: list[RequestView]) -> None:
    answer = UrgentFirst().admission_order(tuple(waiting), 9.0)
    assert len(verified_order("priority", waiting, answer)) == len(waiting)
    places = {view.request_id: place for place, view in enumerate(waiting)}
    keys = [(view.priority, view.arrival_time, places[view.request_id]) for view in answer]
    assert keys == sorted(keys)


@given(running=requests.filter(bool))
def test_the_victim_is_the_last_of_the_order(running: list[RequestView]) -> None:
    policy = UrgentFirst()
    victim = policy.preemption_victim(tuple(running))
    verified_victim("priority", running, victim)
    assert victim == policy.admission_order(tuple(running), 9.0)[-1]


def test_an_urgent_request_passes_all_that_wait() -> None:
    views = [RequestView(f"r-{i}", 0.0, 10, 0, 4, priority=i % 2) for i in range(50)]
    urgent = RequestView("urgent", 0.0, 10, 0, 4, priority=-(2**31))
    engine = PolicyEngine(UrgentFirst(), slots=1, room=1000)
    engine.serve([*views, urgent])
    even = [view.request_id for view in views[::2]]
    odd = [view.request_id for view in views[1::2]]
    assert engine.admitted == ["urgent", *even, *odd]


def test_prompts_go_before_decoding() -> None:
    view = RequestView("a", 0.0, 5, 0, 5)
    assert UrgentFirst().next_phase(QueueView((view,), (view,), 1, 9, 0.0)) == "prefill"
