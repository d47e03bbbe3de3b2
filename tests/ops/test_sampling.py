import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import chisquare

from hexllm.engine.messages import MAX_TOP_LOGPROBS, SamplingParams
from hexllm.ops.sampling import NUM_TOP_LOGPROBS, rows_from_params, sample
from hexllm.ops.sampling_candidates import NUM_CANDIDATES
from hexllm.ops.sampling_reference import keep_reference, sample_reference

sample_jit = jax.jit(sample)

#: Every kind of row, alone and mixed; top_k=300 and top_p=0.99 leave more than the candidates.
MIXES = [
    {"temperature": 0.0},
    {"top_k": 1},
    {},
    {"temperature": 0.3},
    {"top_k": 40},
    {"top_k": 300, "temperature": 1.5},
    {"top_p": 0.9, "temperature": 0.5},
    {"top_p": 0.99},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    {"top_k": 50, "top_p": 0.8, "temperature": 1.8, "mask_unscaled": True},
    {"top_k": 400, "top_p": 0.999, "temperature": 0.6, "mask_unscaled": True},
    {"temperature": 1e-5},
]


def params(*, seed=0, logprobs=None, **settings):
    return SamplingParams(max_tokens=1, seed=seed, logprobs=logprobs, **settings)


def random_logits(S, V, seed=0, scale=2.5):
    return (np.random.default_rng(seed).normal(size=(S, V)) * scale).astype(np.float32)


def mixed(S, *, first_position=7):
    requests = [params(seed=1000 + i, **MIXES[i % len(MIXES)]) for i in range(S)]
    return requests, list(range(first_position, first_position + S))


@pytest.mark.parametrize("V", [600, NUM_CANDIDATES, 19])
def test_tokens_equal_the_reference(V):
    requests, positions = mixed(8 * len(MIXES))
    rows = rows_from_params(requests, positions, len(requests))
    logits = random_logits(len(requests), V)
    tokens = np.asarray(sample_jit(logits, rows).tokens)
    np.testing.assert_array_equal(tokens, sample_reference(logits, rows))


@pytest.mark.parametrize("settings", MIXES, ids=str)
def test_tokens_of_unmixed_batches_equal_the_reference(settings):
    requests = [params(seed=i, **settings) for i in range(16)]
    rows = rows_from_params(requests, range(16), 16)
    logits = random_logits(16, 600, seed=3)
    tokens = np.asarray(sample_jit(logits, rows).tokens)
    np.testing.assert_array_equal(tokens, sample_reference(logits, rows))


@pytest.mark.parametrize("V", [2048, 1001])
def test_a_draw_does_not_depend_on_its_neighbours(V):
    requests, positions = mixed(2 * len(MIXES))
    logits = random_logits(len(requests), V, seed=1, scale=1.5)
    together = np.asarray(
        sample_jit(logits, rows_from_params(requests, positions, len(requests))).tokens
    )
    for size in (1, 3):
        alone = [
            sample_jit(
                np.repeat(logits[i : i + 1], size, axis=0),
                rows_from_params([requests[i]], positions[i : i + 1], size),
            ).tokens[0]
            for i in range(len(requests))
        ]
        np.testing.assert_array_equal(alone, together)
    order = np.random.default_rng(2).permutation(len(requests))
    shuffled = rows_from_params([requests[i] for i in order], [positions[i] for i in order], 40)
    padded = np.concatenate([logits[order], random_logits(40 - len(order), V, seed=9)])
    tokens = sample_jit(padded, shuffled).tokens[: len(order)]
    np.testing.assert_array_equal(tokens, together[order])


def test_seeds_and_positions_give_different_draws():
    logits = np.zeros((64, 5000), np.float32)
    by_position = sample_jit(logits, rows_from_params([params(seed=5)] * 64, range(64), 64)).tokens
    by_seed = sample_jit(
        logits, rows_from_params([params(seed=i) for i in range(64)], [5] * 64, 64)
    ).tokens
    assert len(set(by_position.tolist())) > 55
    assert len(set(by_seed.tolist())) > 55
    again = sample_jit(logits, rows_from_params([params(seed=5)] * 64, range(64), 64)).tokens
    np.testing.assert_array_equal(again, by_position)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 6},
        {"temperature": 1.7, "top_p": 0.8},
        {"temperature": 1.7, "top_p": 0.8, "mask_unscaled": True},
        {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "mask_unscaled": True},
    ],
    ids=str,
)
def test_draws_follow_the_masked_distribution(settings):
    S, row = 20_000, random_logits(1, 12, seed=4, scale=1.2)[0]
    request = params(seed=99, **settings)
    rows = rows_from_params([request] * S, range(S), S)
    tokens = np.asarray(sample_jit(np.tile(row, (S, 1)), rows).tokens)
    keep = keep_reference(
        row,
        temperature=1.0 if request.mask_unscaled else request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
    )
    expected = np.where(keep, np.exp(row.astype(np.float64) / request.temperature), 0)
    expected *= S / expected.sum()
    counts = np.bincount(tokens, minlength=12)
    assert counts[~keep].sum() == 0
    assert chisquare(counts[keep], expected[keep]).pvalue > 1e-3


def test_hexllms_order_keeps_other_tokens_than_openais():
    row = np.log([[0.5, 0.3, 0.15, 0.05]]).astype(np.float32)
    drawn = {}
    for unscaled in (False, True):
        request = params(temperature=2.0, top_p=0.75, mask_unscaled=unscaled)
        rows = rows_from_params([request] * 500, range(500), 500)
        drawn[unscaled] = set(sample_jit(np.tile(row, (500, 1)), rows).tokens.tolist())
    assert drawn == {False: {0, 1, 2}, True: {0, 1}}


def test_an_unlikely_token_is_drawn_as_often_as_it_should():
    # 200,000 tokens at 2e-5 of the likeliest hold 0.8 of the probability together.
    row = np.full((1, 200_001), np.log(2e-5), np.float32)
    row[0, 0] = 0
    rows = [rows_from_params([params(seed=8)], [i], 1) for i in range(200)]
    first = sum(int(sample_jit(row, r).tokens[0]) == 0 for r in rows)
    assert 22 <= first <= 62  # 40 expected, standard deviation 5.7


def test_greedy_takes_the_first_of_the_likeliest():
    logits = np.zeros((3, 300), np.float32)
    logits[:, [17, 170]] = 4.0
    greedy = [params(temperature=0.0), params(top_k=1, temperature=1.7)]
    assert sample_jit(logits, rows_from_params(greedy, [0, 1], 3)).tokens.tolist() == [17] * 3


def test_negative_zero_is_as_likely_as_zero():
    row = np.array([-0.0, 0.0, -1.0, -2.0], np.float32)
    logits = np.tile(row, (200, 1))
    greedy = rows_from_params([params(temperature=0.0, logprobs=1)], [0], 1)
    got = sample_jit(row[None], greedy)
    assert got.tokens[0] == 0
    assert got.top_tokens[0, :2].tolist() == [0, 1]
    drawn = rows_from_params([params(top_k=2)] * 200, range(200), 200)
    assert set(sample_jit(logits, drawn).tokens.tolist()) == {0, 1}
    drawn = rows_from_params([params(top_p=0.1)] * 200, range(200), 200)
    assert set(sample_jit(logits, drawn).tokens.tolist()) == {0, 1}, "ties at the edge are kept"


@pytest.mark.parametrize("settings", MIXES, ids=str)
def test_extreme_logits(settings):
    V, best = 600, 123
    logits = np.full((6, V), -np.inf, np.float32)
    logits[0, best] = 0.0  # one token left by a grammar
    logits[1] = np.linspace(-3.0e38, 0, V)
    logits[1, best] = 3.0e38
    logits[2] = -1e12  # the retired server's fill
    logits[2, best] = 5.0
    logits[3, :] = 7.0
    logits[4, best] = np.inf
    rows = rows_from_params([params(seed=3, logprobs=2, **settings)] * 6, range(6), 6)
    got = sample_jit(logits, rows)
    assert got.tokens[jnp.array([0, 1, 2, 4])].tolist() == [best] * 4
    assert 0 <= got.tokens[3] < V
    assert 0 <= got.tokens[5] < V
    assert not np.isnan(got.logprobs[:4]).any()
    if settings.get("temperature") == 1e-5 or settings.get("top_p") == 0.0:
        ordinary = random_logits(6, V)
        np.testing.assert_array_equal(sample_jit(ordinary, rows).tokens, ordinary.argmax(1))


def test_a_row_of_nan_gives_some_token():
    rows = rows_from_params([params(), params(temperature=0.0), params(top_p=0.5)], range(3), 3)
    tokens = sample_jit(np.full((3, 600), np.nan, np.float32), rows).tokens
    assert ((tokens >= 0) & (tokens < 600)).all()


def test_logprobs_are_of_the_raw_logits():
    requests, positions = mixed(16)
    requests[3] = dataclasses.replace(requests[3], logprobs=0)
    logits = random_logits(16, 600)
    got = sample_jit(logits, rows_from_params(requests, positions, 16))
    expected = log_softmax(logits.astype(np.float64), axis=1)
    own = np.take_along_axis(expected, np.asarray(got.tokens)[:, None], 1)[:, 0]
    np.testing.assert_allclose(got.logprobs, own, atol=2e-6)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :NUM_TOP_LOGPROBS]
    np.testing.assert_array_equal(got.top_tokens, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(expected, order, 1), atol=2e-6)


def test_equal_logprobs_are_reported_lower_id_first():
    rows = rows_from_params([params(logprobs=20)], [0], 1)
    got = sample_jit(np.zeros((1, 600), np.float32), rows)
    assert got.top_tokens[0].tolist() == list(range(20))


def test_a_vocabulary_under_twenty_reports_what_it_has():
    rows = rows_from_params([params(logprobs=20)], [0], 1)
    got = sample_jit(np.array([[0.0, 2.0, 1.0]], np.float32), rows)
    assert got.top_tokens.shape == got.top_logprobs.shape == (1, 20)
    assert got.top_tokens[0, :3].tolist() == [1, 2, 0]
    assert np.isneginf(got.top_logprobs[0, 3:]).all()


def test_no_logprobs_unless_a_row_wants_them():
    got = sample_jit(random_logits(2, 600), rows_from_params([params()], [0], 2))
    assert not np.asarray(got.logprobs).any()
    assert not np.asarray(got.top_tokens).any()
    assert not np.asarray(got.top_logprobs).any()


def test_the_report_is_as_long_as_the_engines_limit():
    assert NUM_TOP_LOGPROBS == MAX_TOP_LOGPROBS


def test_every_mix_runs_one_compiled_graph():
    traces = []

    @jax.jit
    def step(logits, rows):
        traces.append(1)
        return sample(logits, rows)

    logits = random_logits(4, 600)
    for settings in MIXES:
        for logprobs in (None, 5):
            requests = [params(logprobs=logprobs, **settings)] * 3
            step(logits, rows_from_params(requests, range(3), 4))
    assert len(traces) == 1


def test_rows_are_typed_and_padded_greedy():
    request = params(seed=-1, top_k=5, top_p=0.5, min_p=0.25, temperature=0.7, logprobs=0)
    rows = rows_from_params([request], [41], 3)
    assert {k: v.dtype.name for k, v in vars(rows).items()} == {
        "temperature": "float32",
        "top_k": "int32",
        "top_p": "float32",
        "min_p": "float32",
        "seed": "uint32",
        "position": "int32",
        "mask_unscaled": "bool",
        "wants_logprobs": "bool",
    }
    assert rows.seed.tolist() == [2**32 - 1, 0, 0]
    assert rows.position.tolist() == [41, 0, 0]
    assert rows.temperature[1:].tolist() == [0.0, 0.0]
    assert rows.top_p.tolist() == [0.5, 1.0, 1.0]
    assert rows.wants_logprobs.tolist() == [True, False, False]
    empty = rows_from_params([], [], 2)
    assert empty.temperature.shape == (2,)
    with pytest.raises(ValueError, match="2 rows and 2 positions for 1 rows"):
        rows_from_params([request] * 2, [0, 1], 1)
    with pytest.raises(ValueError, match="1 rows and 2 positions"):
        rows_from_params([request], [0, 1], 4)
