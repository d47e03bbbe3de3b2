"""Random traces through the whole engine: prefix hits, chunks, preemptions, aborts and policies of
any kind at once, and each request still gets exactly what it gets alone."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexllm.engine.messages import AbortRequests
from tests.engine.test_scheduler import Chaotic
from tests.engine.tiny import make_engine, request, run, write_model

#: 36 blocks of 8 for six sequences of up to 200 tokens: many are preempted.
FLAGS = ("--max_running_seqs=6", "--num_blocks=36", "--max_prefill_seqs=2")
CACHE = ("--enable_prefix_cache_hbm", "--prefix_cache_unit=block")
CHUNKED = ("--enable_chunked_prefill", "--max_num_batched_tokens=70")
KINDS = {
    "cache": CACHE,
    "cache by padding": ("--enable_prefix_cache_hbm",),
    "chunked": CHUNKED,
    "both": (*CACHE, *CHUNKED),
}

#: Prompts that begin alike, more or less: (family, tokens, end).
PROMPT = st.tuples(st.integers(0, 2), st.integers(1, 150), st.integers(0, 3)).map(
    lambda drawn: (*((drawn[0] + 5 * i) % 97 for i in range(drawn[1])), *([1] * drawn[2]))
)
TRACE = st.lists(st.tuples(PROMPT, st.integers(1, 40)), min_size=1, max_size=8)


def ask(name, prompt, most):
    return request(name, prompt, most, eos=(5,) if most % 2 else ())


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def solo(directory):
    """What a request gets alone, from an engine with nothing switched on."""
    plain, known = make_engine(directory), {}

    def answer(prompt, most):
        if (prompt, most) not in known:
            known[prompt, most] = run(plain, ask("solo", prompt, most))[0][::2]
        return known[prompt, most]

    return answer


@pytest.fixture(scope="module", params=KINDS)
def engine(request, directory):
    """One engine for all traces of a kind, so that a trace finds what those before it left."""
    engine = make_engine(directory, *FLAGS, *KINDS[request.param])
    engine.seen = Counter()
    yield engine
    assert engine.stats().num_late_compiles == 0
    assert engine.stats().num_preemptions > 0
    assert engine.seen["mixed"] > 0 or "chunked" not in request.param
    assert engine.seen["hits"] > 0 or "cache" not in request.param


def play(engine, trace, rng):
    """Run a trace; return each request's (tokens, reason) and those that were aborted."""
    engine._scheduler._policy = Chaotic(rng)
    waiting = [ask(str(i), *each) for i, each in enumerate(trace)]
    tokens, reasons = {message.request_id: () for message in waiting}, {}
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            engine.handle(waiting.pop(0))
        if rng.random() < 0.02:
            engine.handle(AbortRequests((str(rng.randrange(len(trace))),)))
        engine.advance()
        if engine._computing is not None:
            works = engine._computing[0].works
            engine.seen["mixed"] += len({work.length == 1 for work in works}) == 2
        for output in outputs.outputs if (outputs := engine.take_outputs()) else ():
            engine.seen["hits"] += output.num_cached_tokens > 0
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    return {name: (tokens[name], reason) for name, reason in reasons.items()}


def check(engine, solo, trace, rng):
    results = play(engine, trace, rng)
    assert set(results) == {str(i) for i in range(len(trace))}
    for i, each in enumerate(trace):
        tokens, reason = results[str(i)]
        whole, end = solo(*each)
        if reason == "abort":
            assert tokens == whole[: len(tokens)]
        else:
            assert (tokens, reason) == (whole, end)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert len(engine._scheduler._free_slots) == 6


QUIET = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(trace=TRACE, seed=st.integers(0, 2**32))
def test_any_trace_gives_each_request_its_solo_output(engine, solo, trace, seed):
    check(engine, solo, trace, random.Random(seed))


def test_a_full_house_is_preempted_and_gets_its_solo_output(engine, solo):
    trace = [(tuple((7 * i + 5 * j) % 97 for j in range(140)), 60 + 2 * i) for i in range(8)]
    check(engine, solo, trace, random.Random(0))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(trace=TRACE, seed=st.integers(0, 2**32))
def test_many_traces_give_each_request_its_solo_output(engine, solo, trace, seed):
    check(engine, solo, trace, random.Random(seed))
