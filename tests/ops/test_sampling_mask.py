from fractions import Fraction
from functools import partial

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexllm.ops import sampling_mask as masks
from hexllm.ops.sampling_candidates import top_of
from hexllm.ops.sampling_mass import Mass, share_of, total_mass
from hexllm.ops.sampling_reference import keep_reference
from hexllm.ops.sampling_search import (
    from_ordered_image,
    ordered_image,
    thresholds_by_bisection,
)
from hexllm.ops.sampling_shards import Vocabulary

V, C = 120, 24


def exact(mass, i):
    return (int(mass.high[i]) << 16) + int(mass.low[i])


def whole(logits):
    return Vocabulary(logits.shape[1], logits.shape[1])


def mask_rows(S=1, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return masks.MaskRows(
        top_k=jnp.full(S, top_k, jnp.int32),
        top_p=jnp.full(S, top_p, jnp.float32),
        min_p=jnp.full(S, min_p, jnp.float32),
        temperature=jnp.full(S, temperature, jnp.float32),
    )


@jax.jit
def by_bisection(logits, rows):
    peak = logits.max(axis=1, keepdims=True)
    threshold = thresholds_by_bisection(logits, peak, rows, whole(logits))
    return masks.keeps(logits, peak, threshold, rows)


@partial(jax.jit, static_argnames="count")
def by_candidates(logits, rows, count=C):
    candidates, _ = top_of(logits, count)
    threshold, is_settled = masks.thresholds_from_candidates(
        logits, candidates, rows, whole(logits)
    )
    return masks.keeps(logits, candidates[:, :1], threshold, rows), is_settled


@st.composite
def logit_rows(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(
        st.sampled_from(["normal", "peaked", "ties", "equal", "masked", "huge", "tiny", "any"])
    )
    if kind == "any":
        values = st.floats(-100, 100, width=32, allow_subnormal=False)
        return draw(hnp.arrays(np.float32, V, elements=values)) + np.float32(0)
    row = random.normal(size=V) * draw(st.sampled_from([0.1, 1.0, 4.0]))
    if kind == "peaked":
        row[random.integers(V)] += 12
    if kind == "ties":
        row = np.round(row)
    if kind == "equal":
        row = np.full(V, row[0])
    if kind == "masked":
        row[random.random(V) < 0.9] = -np.inf
        row[0] = 0.5
    if kind == "huge":
        row *= 1e30
    if kind == "tiny":
        row *= 1e-30
    return row.astype(np.float32) + np.float32(0)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    row=logit_rows(),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 2, 5, C - 1, C, C + 1, 90, V, V + 7]),
    top_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.2, 1.0]),
)
def test_masks_equal_the_sorted_reference(row, temperature, top_k, top_p, min_p):
    rows = mask_rows(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = np.asarray(by_bisection(row[None], rows))[0]
    # Float32 exponentials against float64's: an edge may lie a rounding to either side.
    reference = partial(keep_reference, row, temperature=temperature, top_k=top_k)
    least = reference(top_p=max(top_p - 1e-5, 0), min_p=min_p * (1 + 1e-5))
    most = reference(top_p=top_p + 1e-5 if top_p < 1 else 1, min_p=min_p * (1 - 1e-5))
    assert not (least & ~got).any()
    assert not (got & ~most).any()
    assert got[np.argmax(row)]
    few, is_settled = by_candidates(row[None], rows)
    if is_settled[0]:
        np.testing.assert_array_equal(few[0], got)
        assert got.sum() <= C
    all_of_them, is_settled = by_candidates(row[None], rows, count=V)
    assert is_settled[0]
    np.testing.assert_array_equal(all_of_them[0], got)


def test_candidates_settle_what_fits_among_them():
    logits = -jnp.arange(V, dtype=jnp.float32)[None]
    assert by_candidates(logits, mask_rows(top_k=C - 1))[1][0]
    assert not by_candidates(logits, mask_rows(top_k=C))[1][0], "equals of the last may follow"
    assert by_candidates(logits, mask_rows(top_p=0.9))[1][0]
    assert by_candidates(logits, mask_rows(min_p=0.5))[1][0]
    assert not by_candidates(logits, mask_rows())[1][0]
    assert not by_candidates(0 * logits, mask_rows(top_k=2))[1][0]


def test_tokens_as_likely_as_the_last_one_are_kept():
    logits = jnp.array([[3.0, 1.0, 1.0, 1.0, 0.0]])
    keep = by_bisection(logits, mask_rows(top_k=2))[0]
    assert keep.tolist() == [True, True, True, True, False]
    keep = by_bisection(logits, mask_rows(top_p=0.75))[0]
    assert keep.tolist() == [True, True, True, True, False]


def test_top_p_looks_at_what_top_k_leaves():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    # Of {0.4, 0.3} the first holds 0.57; of all four it holds 0.4.
    assert by_bisection(logits, mask_rows(top_k=2, top_p=0.5))[0].tolist() == [True] + 3 * [False]
    assert by_bisection(logits, mask_rows(top_p=0.5))[0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("vocab", [1, 7, 1001, 262_144])
def test_sums_of_weights_are_exact(vocab):
    weights = np.random.default_rng(0).integers(0, 2**28, (3, vocab), endpoint=True)
    weights[0] = 2**28
    mass = jax.jit(total_mass, static_argnums=1)(weights.astype(np.uint32), whole(weights))
    assert [exact(mass, i) for i in range(3)] == weights.sum(axis=1).tolist()


def test_a_vocabulary_beyond_exact_sums_is_refused():
    weights = jnp.zeros((1, 2**19 + 1), jnp.uint32)
    with pytest.raises(ValueError, match="524289"):
        total_mass(weights, whole(weights))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    mass=st.integers(0, 2**47 - 1),
    fraction=st.floats(0, 1, width=32, exclude_max=True, allow_subnormal=False),
)
def test_the_share_of_a_mass_is_exact(mass, fraction):
    got = share_of(
        Mass(jnp.uint32([mass >> 16]), jnp.uint32([mass & 0xFFFF])),
        jnp.float32([fraction]),
    )
    cut = Fraction(int(Fraction(fraction) * 2**32), 2**32)
    assert exact(got, 0) == int(mass * cut)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(hnp.arrays(np.float32, 50, elements=st.floats(width=32, allow_nan=False)))
def test_the_integer_image_keeps_the_order(x):
    image = np.asarray(ordered_image(x)).astype(np.int64)
    np.testing.assert_array_equal(np.asarray(from_ordered_image(image.astype(np.uint32))), x)
    order = np.argsort(image, kind="stable")
    assert (x[order][1:] >= x[order][:-1]).all()
