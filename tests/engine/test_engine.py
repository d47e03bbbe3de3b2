"""The engine in this process, with a tiny model: whatever happens around it, each request gets
what it gets alone."""

import random

import numpy as np
import pytest

from hexllm.core.errors import CheckpointError, ConfigError, UnsupportedConfigError
from hexllm.core.plugins import load_plugins
from hexllm.engine.build import build_engine
from hexllm.engine.messages import AbortRequests
from tests.engine.tiny import drain, make_engine, make_settings, request, run, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(directory):
    engine = make_engine(directory, "--max_prefill_seqs=3")
    yield engine
    stats = engine.stats()
    assert stats.num_late_compiles == 0
    assert stats.num_free_blocks == stats.num_blocks


def mixed_requests(count, seed=0, max_prompt=150):
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, max_prompt))]
        kind = i % 4
        sampling = [
            {},
            {"temperature": 0.9, "seed": i},
            {"temperature": 1.3, "seed": i, "top_k": 20, "top_p": 0.9},
            {"temperature": 0.7, "seed": i, "min_p": 0.02, "mask_unscaled": True},
        ][kind]
        requests.append(
            request(str(i), prompt, rng.randint(1, 40), eos=(5,) if i % 3 else (), **sampling)
        )
    return requests


@pytest.fixture(scope="module")
def solo_results(engine):
    return [run(engine, message)[0] for message in mixed_requests(24)]


def tokens_of(results):
    return [(tokens, reason) for tokens, _, reason in results]


def test_requests_together_get_what_they_get_alone(engine, solo_results):
    together = run(engine, *mixed_requests(24))
    assert tokens_of(together) == tokens_of(solo_results)
    lengths = {len(tokens) for tokens, _ in tokens_of(together)}
    assert len(lengths) > 5
    assert {reason for _, reason in tokens_of(together)} == {"stop", "length"}


def test_requests_that_come_while_others_run_get_the_same(engine, solo_results):
    waiting = mixed_requests(24)
    random.Random(1).shuffle(waiting)
    results = {}
    while waiting or engine.has_work:
        if waiting:
            engine.handle(waiting.pop())
        engine.advance()
        for output in outputs.outputs if (outputs := engine.take_outputs()) else ():
            results.setdefault(output.request_id, []).extend(output.token_ids)
    assert [tuple(results[str(i)]) for i in range(24)] == [t for t, _ in tokens_of(solo_results)]


def test_a_tenth_of_the_blocks_preempts_and_changes_nothing(directory, solo_results):
    small = make_engine(directory, "--max_prefill_seqs=3", "--num_blocks=32")
    results = run(small, *mixed_requests(24))
    stats = small.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == 32
    assert stats.num_late_compiles == 0
    assert tokens_of(results) == tokens_of(solo_results)


def test_interpreted_tpu_kernels_give_the_same_tokens(directory, solo_results):
    kernels = make_engine(directory, "--attention_backend=pallas", "--no-warmup")
    chosen = [
        i for i, message in enumerate(mixed_requests(24)) if message.sampling.temperature == 0
    ]
    messages = [mixed_requests(24)[i] for i in chosen[:3]]
    assert tokens_of(run(kernels, *messages)) == [tokens_of(solo_results)[i] for i in chosen[:3]]


def test_a_model_that_the_kernels_do_not_take_is_refused_when_they_are_asked_for(tmp_path):
    write_model(tmp_path, head_dim=512)
    with pytest.raises(ConfigError, match=r"attention_backend=pallas .* head_dim=512 is over 256"):
        make_engine(tmp_path, "--attention_backend=pallas")


def test_without_warmup_and_without_jit_the_answer_is_the_same(directory, solo_results):
    messages = mixed_requests(24)[:3]
    lazy = make_engine(directory, "--max_prefill_seqs=3", "--no-warmup")
    assert tokens_of(run(lazy, *messages)) == tokens_of(solo_results[:3])
    plain = make_engine(directory, "--no-enable_jit", "--no-warmup")
    short = request("short", [1, 2, 3], 2)
    assert tokens_of(run(plain, short)) == tokens_of(run(lazy, short))


def test_a_seed_decides_and_a_position_varies(engine):
    def draw(name, seed):
        return run(engine, request(name, [3], 30, eos=(), temperature=5.0, seed=seed))[0][0]

    assert draw("a", 1) == draw("b", 1)
    assert draw("c", 1) != draw("d", 2)
    assert len(set(draw("e", 1))) > 10


def test_logprobs_are_of_the_sampled_tokens_best_first(engine):
    greedy, plain = run(
        engine,
        request("with", [1, 2, 3], 6, eos=(), logprobs=4),
        request("without", [1, 2, 3], 6, eos=()),
    )
    assert greedy[0] == plain[0]
    assert plain[1] == ()
    assert len(greedy[1]) == 6
    for token, entry in zip(greedy[0], greedy[1], strict=True):
        assert len(entry.top) == 4
        assert entry.top[0] == (token, pytest.approx(entry.logprob, abs=1e-6))
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert np.exp(values).sum() < 1


def test_ends_at_end_tokens_stop_tokens_max_tokens_and_max_model_len(engine):
    tokens = run(engine, request("free", [1, 2, 3], 12, eos=()))[0][0]
    end = tokens[4]
    first = tokens.index(end)
    for name, message in {
        "eos": request("eos", [1, 2, 3], 12, eos=(end,)),
        "stop": request("stop", [1, 2, 3], 12, stop_token_ids=(end,), ignore_eos=True),
    }.items():
        got, _, reason = run(engine, message)[0]
        assert (name, got, reason) == (name, tokens[: first + 1], "stop")
    got, _, reason = run(engine, request("ignored", [1, 2, 3], 12, eos=(end,), ignore_eos=True))[0]
    assert (got, reason) == (tokens, "length")
    got, _, reason = run(engine, request("long", [9] * 250, 500, eos=()))[0]
    assert (len(got), reason) == (6, "length")


def test_an_abort_frees_blocks_before_the_next_step(engine):
    free = engine.stats().num_free_blocks
    engine.handle(request("a", [1] * 20, 50, eos=()))
    engine.handle(request("b", [2] * 20, 3, eos=()))
    engine.advance()
    engine.advance()
    assert engine.stats().num_free_blocks < free
    engine.handle(AbortRequests(("a", "nobody")))
    outputs = engine.take_outputs().outputs
    assert [o.request_id for o in outputs if o.finish_reason == "abort"] == ["a"]
    assert "a" not in drain(engine)
    assert engine.stats().num_free_blocks == free


def test_an_abort_while_its_step_runs_drops_the_token(engine):
    engine.handle(request("a", [1] * 20, 50, eos=()))
    engine.advance()
    engine.handle(AbortRequests(("a",)))
    engine.advance()
    assert [o.finish_reason for o in engine.take_outputs().outputs] == ["abort"]
    assert not engine.has_work


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_prompt_that_cannot_be_served_ends_with_an_error_and_blocks_nobody(engine, length):
    engine.handle(request("bad", [1] * length))
    engine.handle(request("good", [1], 2, eos=()))
    outputs = engine.take_outputs().outputs
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("bad", "error")]
    assert str(length) in outputs[0].error
    assert len(drain(engine)["good"][0]) == 2


def test_bfloat16_serves(directory):
    half = make_engine(directory, "--dtype=bfloat16")
    assert half.info.dtype == "bfloat16"
    assert len(run(half, request("a", [1, 2, 3], 5, eos=()))[0][0]) == 5


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["--num_blocks=31"], ConfigError, ["31 blocks", "248 tokens", "--max_model_len=248"]),
        (["--num_blocks=200", "--max_model_len=1601"], ConfigError, ["1601", "--num_blocks=201"]),
        (
            ["--cpu_kv_cache_gib=0.0000001"],
            ConfigError,
            ["No memory is left", "--cpu_kv_cache_gib=1e-07"],
        ),
    ],
)
def test_a_cache_that_cannot_hold_a_request_does_not_start(directory, flags, error, words):
    settings = make_settings(directory, *flags)
    if "cpu_kv" in flags[0]:
        settings = settings.model_copy(update={"num_blocks": None})
    with pytest.raises(error) as caught:
        build_engine(settings, load_plugins(settings.plugins), lambda progress: None)
    for word in words:
        assert word in str(caught.value)


def test_blocks_come_from_the_memory_left_where_none_are_given(directory):
    settings = make_settings(directory).model_copy(update={"num_blocks": None})
    plugins = load_plugins(settings.plugins)
    engine = build_engine(settings, plugins, lambda progress: None)
    # All that eight sequences of 256 tokens in blocks of 8 can use, far below the memory's limit.
    assert engine.info.num_blocks == 8 * 256 // 8
    per_block = 2 * 2 * 8 * 8 * 2 * 4
    assert engine.info.device_memory["kv"] == engine.info.num_blocks * per_block
    tight = settings.model_copy(
        update={"cpu_kv_cache_gib": 100 * per_block / 2**30, "hbm_utilization_factor": 0.5}
    )
    assert build_engine(tight, plugins, lambda progress: None).info.num_blocks == 50


def test_a_model_that_is_not_one_does_not_start(tmp_path, directory):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make_engine(tmp_path / "empty")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{not json")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        make_engine(tmp_path / "bad")
    (tmp_path / "strange").mkdir()
    write_model(tmp_path / "strange", frobnication=3)
    with pytest.raises(UnsupportedConfigError, match="frobnication"):
        make_engine(tmp_path / "strange")
    (tmp_path / "family").mkdir()
    write_model(tmp_path / "family", architectures=["NobodyForCausalLM"])
    with pytest.raises(UnsupportedConfigError, match="NobodyForCausalLM"):
        make_engine(tmp_path / "family")
