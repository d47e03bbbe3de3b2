import logging
import zlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexllm.engine.blocks import BlockManager
from hexllm.engine.messages import GenerateRequest, SamplingParams
from hexllm.engine.prefix_cache import PrefixCache
from hexllm.engine.request import Request
from hexllm.engine.scheduler import Scheduler

EOS = 7
MAX_MODEL_LEN = 40
BLOCK_SIZE = 4


def next_token(tokens):
    """A stand-in for a model: a function of the whole sequence, ending now and then."""
    return zlib.crc32(bytes(tokens)) % 16


def solo(prompt, max_tokens):
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            return tokens, "stop"
        if len(tokens) >= min(len(prompt) + max_tokens, MAX_MODEL_LEN):
            return tokens, "length"


def make_request(name, prompt, max_tokens, arrival=0.0, salt=None):
    return Request(
        GenerateRequest(
            name,
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens),
            eos_token_ids=(EOS,),
            arrival_time=arrival,
            cache_salt=salt,
        ),
        MAX_MODEL_LEN,
    )


class Fcfs:
    def admission_order(self, waiting, now):
        return sorted(waiting, key=lambda view: view.arrival_time)

    def next_phase(self, queues):
        return "prefill"

    def preemption_victim(self, running):
        return running[-1]

    def on_finished(self, request):
        pass


def make_scheduler(policy, num_blocks, cache=None, **limits):
    blocks = BlockManager(num_blocks, BLOCK_SIZE, cache)
    defaults = {"max_prefill_seqs": 2, "max_prefill_tokens": MAX_MODEL_LEN, "max_running_seqs": 4}
    return Scheduler(policy, "test", blocks, **{**defaults, **limits}), blocks


def check_plan(plan, scheduler, blocks):
    """What must hold of every plan: no block is written by one and held by another."""
    held = Counter(block for request in scheduler.requests() for block in request.blocks)
    assert blocks.cache or set(held.values()) <= {1}
    assert blocks.num_free == blocks.num_blocks - len(held)
    assert plan.works
    for work in plan.works:
        request, end = work.request, work.start + work.length
        all_of_it = len(request.tokens) + request.num_pending - work.is_last
        assert len(set(request.blocks)) == len(request.blocks) == blocks.blocks_for(all_of_it)
        written = request.blocks[work.start // BLOCK_SIZE : (end - 1) // BLOCK_SIZE + 1]
        assert all(held[block] == 1 for block in written)
        assert end == request.num_computed
        assert work.is_last == (end == all_of_it)
        assert work.length == 1 or plan.phase == "prefill"
    assert len({work.request.request_id for work in plan.works}) == len(plan.works)
    slots = [request.slot for request in scheduler.requests() if request.slot is not None]
    assert len(slots) == len(set(slots)) == scheduler.num_running
    assert {work.request.slot for work in plan.works} <= set(slots)


class Memory:
    """What steps leave in the KV slots: of each, the whole sequence up to its token."""

    def __init__(self, prompts):
        self._sequences = {str(i): solo(*prompt[:2])[0] for i, prompt in enumerate(prompts)}
        self._salts = {str(i): prompt[2] for i, prompt in enumerate(prompts)}
        self._slots = {}

    def compute(self, plan):
        """Write what a step's tokens leave, then read all that each of its sequences reads."""
        for work in plan.works:
            for position in range(work.start, work.start + work.length):
                self._slots[self._slot(work, position)] = self._content(work, position)
        for work in plan.works:
            for position in range(work.start + work.length):
                assert self._slots[self._slot(work, position)] == self._content(work, position)

    def _slot(self, work, position):
        return work.request.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE

    def _content(self, work, position):
        # A request may be computed one token past its end, which was not known in time.
        name = work.request.request_id
        return self._salts[name], tuple(self._sequences[name][: position + 1])


class Chaotic(Fcfs):
    """Any valid answer, at random."""

    def __init__(self, rng):
        self._rng = rng

    def admission_order(self, waiting, now):
        return self._rng.sample(waiting, len(waiting))

    def next_phase(self, queues):
        return self._rng.choice(["prefill", "decode"])

    def preemption_victim(self, running):
        return self._rng.choice(running)


#: Prompts of three families that begin alike, for hits, and of any tokens.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 15), min_size=1, max_size=30),
    st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 2)).map(
        lambda drawn: [(drawn[0] + i) % 16 for i in range(drawn[1])] + [15] * drawn[2]
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    prompts=st.lists(
        st.tuples(PROMPTS, st.integers(1, 30), st.sampled_from([None, None, "salt"])),
        min_size=1,
        max_size=8,
    ),
    unit=st.sampled_from([0, 0, 4, 8, 12]),
    room=st.sampled_from([0, 0, 1, 3, 5, 12, 40]),
    num_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 30),
    limits=st.fixed_dictionaries(
        {"max_prefill_seqs": st.integers(1, 3), "max_running_seqs": st.integers(1, 5)}
    ),
)
def test_any_trace_gives_each_request_its_solo_output(rng, prompts, unit, room, num_blocks, limits):
    """``unit`` is the prefix cache's, ``room`` that of pieces beside decodes; 0 is without."""
    cache = PrefixCache("m", BLOCK_SIZE, unit) if unit else None
    if room:
        budget = limits["max_running_seqs"] + room
        limits = {**limits, "is_chunked": True, "max_prefill_tokens": budget}
    scheduler, blocks = make_scheduler(Chaotic(rng), num_blocks, cache, **limits)
    memory = Memory(prompts)
    waiting = [
        make_request(str(i), prompt, most, arrival=i, salt=salt)
        for i, (prompt, most, salt) in enumerate(prompts)
    ]
    finished, aborted = {}, set()
    computing = None

    def commit(plan):
        sampled = [next_token(work.request.tokens) if work.is_last else 99 for work in plan.works]
        for request, reason in scheduler.commit(plan, sampled):
            if reason is not None:
                finished[request.request_id] = (request.tokens, reason)

    while waiting or scheduler.has_work or computing:
        if waiting and rng.random() < 0.5:
            scheduler.add(waiting.pop(0))
        if scheduler.has_work and rng.random() < 0.05:
            victim = rng.choice(scheduler.requests())
            scheduler.finish(victim.request_id)
            aborted.add(victim.request_id)
        if computing and rng.random() < 0.3:  # or else the next step is planned meanwhile
            commit(computing)
            computing = None
        plan = scheduler.schedule(0.0)
        if plan is not None:
            check_plan(plan, scheduler, blocks)
            memory.compute(plan)
        if computing:
            commit(computing)
            computing = None
        if plan is None:
            continue
        assert len(plan.works) <= limits["max_running_seqs"]
        if room:
            assert sum(work.length for work in plan.works) <= budget
            assert sum(work.length > 1 for work in plan.works) <= limits["max_prefill_seqs"]
        if rng.random() < 0.05:  # an abort that comes while the step runs
            victim = rng.choice(plan.works).request
            scheduler.finish(victim.request_id)
            aborted.add(victim.request_id)
        computing = plan
    assert set(finished) | aborted == {str(i) for i in range(len(prompts))}
    for name, result in finished.items():
        assert result == solo(*prompts[int(name)][:2])
    assert blocks.num_free == num_blocks
    assert scheduler.num_running == scheduler.num_waiting == 0


def run_all(scheduler):
    order = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        for request, reason in scheduler.commit(
            plan, [next_token(work.request.tokens) for work in plan.works]
        ):
            if reason is not None:
                order.append(request.request_id)
    return order


def test_a_preempted_request_keeps_its_tokens_and_is_computed_again():
    scheduler, blocks = make_scheduler(Fcfs(), MAX_MODEL_LEN // BLOCK_SIZE)
    for i in range(3):
        scheduler.add(make_request(str(i), [1, 2, 3 + i], 30, arrival=i))
    recomputed = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        recomputed += sum(
            work.request.num_output_tokens > 0 for work in plan.works if plan.phase == "prefill"
        )
        scheduler.commit(plan, [8] * len(plan.works))  # never an end token: all grow to the limit
    assert scheduler.num_preemptions > 0
    assert recomputed == scheduler.num_preemptions
    assert blocks.num_free == blocks.num_blocks


class Broken:
    """Each question in turn is answered wrongly."""

    def __init__(self, question, answer):
        self._question = question
        self._answer = answer

    def __getattr__(self, name):
        if name == self._question:
            return self._answer
        return getattr(Fcfs(), name)


def raises(*_):
    raise ZeroDivisionError("a plugin's bug")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("admission_order", raises),
        ("admission_order", lambda waiting, now: []),
        ("admission_order", lambda waiting, now: [*waiting, waiting[0]]),
        ("admission_order", lambda waiting, now: None),
        ("next_phase", raises),
        ("next_phase", lambda queues: "dinner"),
        ("preemption_victim", raises),
        ("preemption_victim", lambda running: None),
        ("on_finished", raises),
    ],
)
def test_a_wrong_policy_stops_nothing_and_is_named_once_in_the_log(question, answer, caplog):
    scheduler, blocks = make_scheduler(Broken(question, answer), MAX_MODEL_LEN // BLOCK_SIZE)
    for i in range(4):
        scheduler.add(make_request(str(i), [i] * 12, 28, arrival=i))
    with caplog.at_level(logging.ERROR):
        order = run_all(scheduler)
    assert sorted(order) == ["0", "1", "2", "3"]
    assert blocks.num_free == blocks.num_blocks
    faults = [record for record in caplog.records if "Scheduling policy 'test'" in record.message]
    assert len(faults) == 1
    assert question in faults[0].message


def test_the_policy_orders_admission():
    class Lifo(Fcfs):
        def admission_order(self, waiting, now):
            return list(reversed(waiting))

    admitted = {}
    for policy in (Fcfs(), Lifo()):
        scheduler, _ = make_scheduler(policy, 20, max_prefill_seqs=1)
        for i in range(3):
            scheduler.add(make_request(str(i), [i], 5, arrival=i))
        order = []
        for _ in range(3):
            plan = scheduler.schedule(0.0)
            order.append(plan.works[0].request.request_id)
            scheduler.commit(plan, [8])
        admitted[type(policy).__name__] = order
    assert admitted == {"Fcfs": ["0", "1", "2"], "Lifo": ["2", "1", "0"]}


def test_finishing_an_unknown_request_is_nothing():
    scheduler, _ = make_scheduler(Fcfs(), 10)
    assert scheduler.finish("nobody") is None
    assert scheduler.schedule(0.0) is None
