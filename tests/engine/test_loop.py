"""What the loop says while it computes: outputs, and signs of life where there are none."""

import pytest

from hexllm.engine import loop
from hexllm.engine.messages import AbortRequests
from tests.engine.tiny import make_engine, request, write_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return make_engine(write_model(tmp_path_factory.mktemp("tiny")))


def take(engine):
    engine.advance()
    return engine.take_outputs()


def test_the_last_step_is_told_of_though_nobody_wants_its_tokens(engine):
    engine.handle(request("left", [1, 2, 3], 50, eos=()))
    assert take(engine) is None  # dispatched; nothing has ended
    assert take(engine).outputs[0].token_ids
    engine.handle(AbortRequests(("left",)))
    assert engine.take_outputs().outputs[0].finish_reason == "abort"
    assert engine.has_work  # the step that was under way
    last = take(engine)
    assert last.outputs == ()
    assert len(last.steps) == 1
    assert last.stats.num_free_blocks == last.stats.num_blocks
    assert not engine.has_work
    assert engine.take_outputs() is None


def test_steps_without_outputs_are_told_of_once_a_second(engine, monkeypatch):
    now = loop.time.monotonic() + 10.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    engine.handle(request("long", [1, 2, 3], 50, eos=()))
    told = []
    for _ in range(21):
        now += 0.125
        engine.advance()
        engine._outputs.clear()  # as in the steps of a prompt that is computed in many pieces
        told.append(engine.take_outputs())
    engine.handle(AbortRequests(("long",)))
    while engine.has_work:
        take(engine)
    signs = [each for each in told if each is not None]
    # The first at once, the others a second apart; every step is told of once.
    assert [told.index(sign) for sign in signs] == [1, 9, 17]
    assert [len(sign.steps) for sign in signs] == [1, 8, 8]
    assert signs[-1].stats.num_steps - signs[0].stats.num_steps == 16
