"""Fair: shares in tokens, no credit for idling, no way out by many names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hexllm.core.policy import QueueView, RequestView
from hexllm.plugins.schedulers.fair import FairShare, Options
from hexllm.testing.policy_trace import PolicyEngine

SLOTS = 4


def request(name: str, user: str | None, prompt: int = 10, output: int = 2) -> RequestView:
    return RequestView(name, 0.0, prompt, 0, output, user=user)


def serve(requests: list[RequestView], **options: Any) -> PolicyEngine:
    engine = PolicyEngine(FairShare(Options(**options)), slots=SLOTS, room=10_000)
    engine.serve(requests)
    return engine


def backlog(user: str, sizes: list[tuple[int, int]]) -> list[RequestView]:
    return [request(f"{user}-{i}", user, *size) for i, size in enumerate(sizes)]


def cost(view: RequestView) -> float:
    return view.num_prompt_tokens + 2.0 * view.max_tokens


def had_while_both_waited(engine: PolicyEngine, *tenants: list[RequestView]) -> list[float]:
    """What each tenant's requests cost that were admitted before one tenant ran out."""
    views = {view.request_id: view for tenant in tenants for view in tenant}
    left = [len(tenant) for tenant in tenants]
    had = [0.0] * len(tenants)
    users = [tenant[0].user for tenant in tenants]
    for request_id in engine.admitted:
        place = users.index(views[request_id].user)
        had[place] += cost(views[request_id])
        left[place] -= 1
        if not left[place]:
            break
    return had


sizes = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 20)), min_size=20, max_size=60)


@settings(max_examples=25, deadline=None)
@given(first=sizes, second=sizes, share=st.sampled_from([0.5, 1.0, 3.0]))
def test_tenants_get_their_shares_in_tokens(
    first: list[tuple[int, int]], second: list[tuple[int, int]], share: float
) -> None:
    ann, bob = backlog("ann", first), backlog("bob", second)
    # Bob's come first: the order of arrival decides nothing between tenants.
    engine = serve([*bob, *ann], shares={"ann": share})
    for_ann, for_bob = had_while_both_waited(engine, ann, bob)
    # Whoever is admitted next is behind or level, but for outputs that are still to be counted.
    ahead = (1 + 1 / share) * (max(map(cost, [*ann, *bob])) + SLOTS * 2.0 * 20)
    assert abs(for_ann / share - for_bob) <= ahead


def test_one_request_does_not_wait_for_a_crowd() -> None:
    crowd = backlog("crowd", [(100, 5)] * 300)
    engine = serve([*crowd, request("one", "ann", 100, 5)])
    assert engine.overtaken()["one"] <= 3 * SLOTS
    of_crowd = [name for name in engine.admitted if name != "one"]
    assert of_crowd == [view.request_id for view in crowd]  # by arrival within a tenant


def test_requests_without_a_name_are_one_tenant() -> None:
    nameless = [request(f"x-{i}", None) for i in range(100)]
    engine = serve([*nameless, request("one", "ann")])
    assert engine.overtaken()["one"] <= 3 * SLOTS


def admit(policy: FairShare, waiting: list[RequestView]) -> RequestView:
    """Admit the first of ``waiting`` and let it reach its length."""
    first = policy.admission_order(tuple(waiting), 0.0)[0]
    waiting.remove(first)
    policy.on_finished(replace(first, num_output_tokens=first.max_tokens, num_blocks=1))
    return first


def test_idling_saves_nothing_up() -> None:
    policy = FairShare(Options())
    waiting = backlog("busy", [(10, 2)] * 400)
    early = request("early", "late")
    waiting.append(early)
    for _ in range(200):
        admit(policy, waiting)
    assert early not in waiting
    # It was away while the other had 200 requests; now both take turns.
    waiting += backlog("late", [(10, 2)] * 100)
    users = [admit(policy, waiting).user for _ in range(100)]
    assert 48 <= users.count("late") <= 52


def test_who_was_alone_beside_small_streams_takes_turns_with_a_newcomer() -> None:
    policy = FairShare(Options())
    # Ten others have a request each that runs and says little: they slow the machine's clock.
    streams = [request(f"stream-{i}", f"user-{i}") for i in range(10)]
    waiting = backlog("busy", [(10, 2)] * 400)
    policy.admission_order((*streams, *waiting), 0.0)
    for _ in range(200):
        admit(policy, waiting)
    waiting += backlog("late", [(10, 2)] * 100)
    users = [admit(policy, waiting).user for _ in range(100)]
    assert 48 <= users.count("late") <= 52


def test_what_a_tenant_is_owed_it_gets() -> None:
    policy = FairShare(Options())
    waiting = [request("big", "ann", 986, 7), *backlog("bob", [(10, 2)] * 200)]
    assert admit(policy, waiting).request_id == "big"
    waiting += backlog("ann", [(10, 2)] * 100)
    # 1,000 tokens are 71 and a half of 14.
    assert {admit(policy, waiting).user for _ in range(71)} == {"bob"}
    assert {admit(policy, waiting).user for _ in range(3)} == {"ann", "bob"}


def test_one_answer_takes_turns() -> None:
    policy = FairShare(Options(shares={"bob": 2.0}))
    waiting = [*backlog("ann", [(100, 1)] * 3), *backlog("bob", [(100, 1)] * 5)]
    order = [view.user for view in policy.admission_order(tuple(waiting), 0.0)]
    assert order == ["ann", "bob", "bob", "ann", "bob", "bob", "ann", "bob"]


def test_prompts_count_from_their_admission() -> None:
    policy = FairShare(Options())
    waiting = [*backlog("ann", [(100, 9)] * 2), *backlog("bob", [(100, 9)] * 2)]
    assert policy.admission_order(tuple(waiting), 0.0)[0].request_id == "ann-0"
    # It runs now; nobody has said so but its absence.
    assert policy.admission_order(tuple(waiting[1:]), 0.0)[0].request_id == "bob-0"


@pytest.mark.parametrize(("output_weight", "first"), [(5.0, "bob-1"), (0.5, "ann-1")])
def test_outputs_count_as_they_come(output_weight: float, first: str) -> None:
    policy = FairShare(Options(output_weight=output_weight))
    waiting = [request("ann-1", "ann"), request("bob-1", "bob")]
    running = (
        RequestView("ann-0", 0.0, 100, 40, 90, num_blocks=9, user="ann"),
        RequestView("bob-0", 0.0, 200, 0, 90, num_blocks=9, user="bob"),
    )
    policy.next_phase(QueueView(tuple(waiting), running, 9, 99, 0.0))
    assert policy.admission_order(tuple(waiting), 0.0)[0].request_id == first


def test_a_tenant_may_come_back_after_it_was_forgotten() -> None:
    policy = FairShare(Options())
    many = [request(f"r-{i}", f"user-{i}") for i in range(300)]
    policy.admission_order(tuple(many), 0.0)
    stays, *others = many
    for view in others:
        policy.on_finished(view)  # all aborted before they were served
    assert len(policy._clocks) < 200
    again = [request(f"again-{i}", f"user-{i}") for i in range(300)]
    assert len(policy.admission_order((stays, *again), 0.0)) == 301


def test_an_endless_row_of_newcomers_keeps_nobody_out() -> None:
    policy = FairShare(Options())
    waiting = backlog("ann", [(10, 2)] * 300)
    for turn in range(300):
        while len(waiting) < 310 - turn // 10:
            waiting.append(request(f"new-{turn}-{len(waiting)}", f"new-{turn}-{len(waiting)}"))
        admit(policy, waiting)
    left = sum(view.user == "ann" for view in waiting)
    # About ten newcomers wait at any time: one turn in eleven or so is hers.
    assert 300 - left >= 15


def test_names_that_are_gone_are_forgotten() -> None:
    policy = FairShare(Options())
    waiting = backlog("ann", [(10, 2)] * 2)
    for turn in range(2000):
        waiting.append(request(f"r-{turn}", f"user-{turn}"))
        if all(view.user != "ann" for view in waiting):
            waiting.append(request(f"ann-again-{turn}", "ann"))
        admit(policy, waiting)
    assert len(policy._clocks) < 200
    while waiting:
        admit(policy, waiting)
    assert [policy._clocks, policy._open, policy._charged, policy._num_open] == [{}] * 4


def test_only_what_was_admitted_is_charged() -> None:
    policy = FairShare(Options())
    dear, cheap = request("dear", "ann", 5000), request("cheap", "bob")
    policy.admission_order((dear, cheap), 0.0)
    policy.on_finished(dear)  # aborted while it waited
    again = request("again", "ann")
    assert policy.admission_order((again, cheap), 0.0)[0] is again


def test_the_victim_is_of_the_tenant_that_had_the_most() -> None:
    policy = FairShare(Options())
    views = {
        name: RequestView(name, at, prompt, 1, 9, num_blocks=2, user=user)
        for name, at, prompt, user in [
            ("a1", 0.0, 900, "ann"),
            ("a2", 1.0, 10, "ann"),
            ("b1", 2.0, 300, "bob"),
            ("b2", 3.0, 300, "bob"),
        ]
    }
    running = tuple(views.values())
    assert policy.preemption_victim(running) is views["a2"]
    assert policy.preemption_victim(running) is views["a2"]  # counted once
    rich = FairShare(Options(shares={"ann": 10.0}))
    assert rich.preemption_victim(running) is views["b2"]


def view_of(user: str | None, api_key: str | None) -> RequestView:
    return RequestView("r", 0.0, 1, 0, 1, user=user, api_key=api_key)


@pytest.mark.parametrize(
    ("by", "names"),
    [("tenant", ["ann", "key", ""]), ("user", ["ann", "", ""]), ("api_key", ["key", "key", ""])],
)
def test_who_a_tenant_is(by: Any, names: list[str]) -> None:
    policy = FairShare(Options(by=by))
    views = [view_of("ann", "key"), view_of(None, "key"), view_of(None, None)]
    assert [policy._tenant(view) for view in views] == names


@pytest.mark.parametrize(
    "wrong",
    [
        {"by": "mood"},
        {"shares": {"ann": 0}},
        {"shares": {"ann": -1}},
        {"output_weight": 0},
        {"output_weight": float("nan")},
        {"shares": {"ann": float("inf")}},
        {"weight": 3},
    ],
)
def test_options_that_cannot_be_used(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Options(**wrong)
