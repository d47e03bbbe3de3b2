"""The form that sampling takes on a TPU, run on the CPU; the kernel in TPU interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from hexllm.engine.messages import SamplingParams
from hexllm.ops import platform, sampling_candidates
from hexllm.ops.sampling import NUM_TOP_LOGPROBS, rows_from_params, sample
from hexllm.ops.sampling_mask import MaskRows, keeps
from hexllm.ops.sampling_mass import total_mass
from hexllm.ops.sampling_pallas_tpu import LANES, NO_TOKEN, lane_lists
from hexllm.ops.sampling_reference import lane_lists_reference, sample_reference
from hexllm.ops.sampling_search import thresholds_by_bisection
from hexllm.ops.sampling_shards import Vocabulary, best_in_one_pass, best_in_two_passes
from tests.ops.test_sampling import MIXES


def logits_of(S, V, kind="plain", seed=0):
    random = np.random.default_rng(seed)
    logits = (random.normal(size=(S, V)) * 2.5).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits) + np.float32(0)
    if kind == "one lane":
        logits[:, ::LANES] += 20  # far more than a lane keeps of
    if kind == "flat":
        logits *= 0.1
    if kind == "masked":
        logits[random.random((S, V)) < 0.95] = -np.inf
        logits[:, V // 2] = 0.5
    return logits


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "tpu")
    monkeypatch.setattr(sampling_candidates, "SEGMENT", 2048)
    with pltpu.force_tpu_interpret_mode():
        yield jax.jit(lambda logits, rows: sample(logits, rows))


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize(
    ("S", "W", "levels", "segment"),
    [(3, 700, 4, 256), (8, 100, 8, 512), (12, 2100, 8, 1024), (16, 1024, 4, 4096)],
)
def test_lanes_keep_their_largest(S, W, levels, segment, kind):
    logits = logits_of(S, W, kind)
    with pltpu.force_tpu_interpret_mode():
        values, ids = lane_lists(logits, levels=levels, segment=segment)
    expected, expected_ids = lane_lists_reference(logits, levels=levels, segment=segment)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(ids, expected_ids)


def test_lanes_pass_over_nan():
    logits = logits_of(8, 300)
    expected, _ = lane_lists_reference(logits, levels=4, segment=512)
    logits = np.concatenate([logits, np.full((8, 100), np.nan, np.float32)], axis=1)
    with pltpu.force_tpu_interpret_mode():
        values, ids = lane_lists(logits, levels=4, segment=512)
    np.testing.assert_array_equal(values, expected)
    assert (np.asarray(ids) != NO_TOKEN).sum() == 8 * 300


@pytest.mark.parametrize("V", [600, 5000])
def test_tokens_equal_the_reference(on_tpu, V):
    S = 2 * len(MIXES)
    requests = [
        SamplingParams(max_tokens=1, seed=1000 + i, **MIXES[i % len(MIXES)]) for i in range(S)
    ]
    rows = rows_from_params(requests, range(S), S)
    logits = logits_of(S, V)
    np.testing.assert_array_equal(on_tpu(logits, rows).tokens, sample_reference(logits, rows))


@pytest.mark.parametrize("kind", ["plain", "flat", "ties", "one lane", "masked"])
def test_masked_tokens_and_reports_equal_the_reference(on_tpu, kind):
    S, V = 24, 1500
    masks = [{"top_k": 40}, {"top_p": 0.8, "temperature": 0.5}, {"min_p": 0.05}]
    masks += [{"top_k": 7, "top_p": 0.9}, {"top_k": 1200, "top_p": 0.1}]
    masks += [{"top_k": 1200, "top_p": 0.1, "min_p": 0.2}]
    requests = [
        SamplingParams(max_tokens=1, seed=i, logprobs=20, **masks[i % len(masks)]) for i in range(S)
    ]
    rows = rows_from_params(requests, range(S), S)
    logits = logits_of(S, V, kind)
    got = on_tpu(logits, rows)
    np.testing.assert_array_equal(got.tokens, sample_reference(logits, rows))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_TOP_LOGPROBS]
    np.testing.assert_array_equal(got.top_tokens, order)
    expected = jax.nn.log_softmax(logits.astype(np.float32))
    top = np.take_along_axis(np.asarray(expected), order, 1)
    np.testing.assert_allclose(got.top_logprobs, top, atol=4e-6)


def test_what_lanes_hold_needs_no_search_of_the_vocabulary():
    logits = logits_of(6, 3000)
    vocabulary = Vocabulary(3000, 3000)
    with pltpu.force_tpu_interpret_mode():
        found = sampling_candidates.candidates_of_lanes(logits, vocabulary)
    order = np.sort(logits, axis=1)[:, ::-1]
    assert (order[:, 200] > np.asarray(found.bound)).all(), "200 of 3,000 fit into 128 lists of 8"
    for row, values, ids, bound in zip(logits, found.values, found.ids, found.bound, strict=True):
        above = np.flatnonzero(row > bound)
        assert np.isin(above, ids).all()
        held = np.asarray(ids) != NO_TOKEN
        np.testing.assert_array_equal(np.asarray(values)[held], row[np.asarray(ids)[held]])


def test_settled_masks_are_those_of_the_whole_vocabulary(on_tpu):
    kinds = ["plain", "flat", "ties", "one lane", "masked"]
    logits = np.concatenate([logits_of(60, 1500, kind, seed=i) for i, kind in enumerate(kinds)])
    S, V = logits.shape
    random = np.random.default_rng(5)
    rows = MaskRows(
        top_k=jnp.asarray(random.choice([0, 0, 1, 5, 40, 300, 1200, 1499, 1500], S), jnp.int32),
        top_p=jnp.asarray(random.choice([0, 0.05, 0.3, 0.9, 0.999, 1], S), jnp.float32),
        min_p=jnp.asarray(random.choice([0, 0, 0.01, 0.3, 1], S), jnp.float32),
        temperature=jnp.asarray(random.choice([0.3, 1, 1.7], S), jnp.float32),
    )
    vocabulary = Vocabulary(V, V)
    peak = jnp.max(logits, axis=1, keepdims=True)
    logits = jnp.asarray(logits)
    found, threshold, is_settled = sampling_candidates.find_candidates(
        logits, peak, rows, vocabulary
    )
    expected = keeps(logits, peak, thresholds_by_bisection(logits, peak, rows, vocabulary), rows)
    got = keeps(logits, peak, threshold, rows)
    assert 60 < is_settled.sum() < S - 60, "both kinds are tested"
    np.testing.assert_array_equal(got[is_settled], expected[is_settled])
    for row in np.flatnonzero(is_settled):
        kept = np.flatnonzero(np.asarray(expected[row]))
        assert np.isin(kept, found.ids[row]).all()


@pytest.mark.parametrize("size", [7, 300])
def test_the_best_in_one_pass_is_that_in_two(size):
    scores = np.round(np.random.default_rng(0).normal(size=(40, size))).astype(np.float32)
    scores[0] = -np.inf
    scores[1, size // 2] = np.inf
    ids = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), scores.shape)
    one, two = best_in_one_pass(scores, ids, size - 1), best_in_two_passes(scores, ids, size - 1)
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1], two[1])
    assert one[0].tolist() == scores.argmax(axis=1).tolist()


def test_a_row_of_nan_gives_some_token(on_tpu):
    requests = [SamplingParams(max_tokens=1, **kind) for kind in ({}, {"temperature": 0.0})]
    requests += [SamplingParams(max_tokens=1, top_p=0.5, logprobs=20)]
    tokens = np.asarray(
        on_tpu(
            np.full((3, 600), np.nan, np.float32), rows_from_params(requests, range(3), 3)
        ).tokens
    )
    assert ((tokens >= 0) & (tokens < 600)).all()


@pytest.mark.parametrize("vocab", [7, 1001, 262_144])
def test_sums_of_weights_are_exact(monkeypatch, vocab):
    monkeypatch.setattr(platform, "platform", lambda: "tpu")
    weights = np.random.default_rng(0).integers(0, 2**28, (3, vocab), endpoint=True)
    weights[0] = 2**28
    mass = total_mass(jnp.asarray(weights, jnp.uint32), Vocabulary(vocab, vocab))
    got = [(int(high) << 16) + int(low) for high, low in zip(mass.high, mass.low, strict=True)]
    assert got == weights.sum(axis=1).tolist()
