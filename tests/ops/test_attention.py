import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexllm.ops import kv_cache
from hexllm.ops.attention import attend, attend_reference
from tests.ops.batches import Shape, make_batch


def numpy_attention(q, k, v, scale, window, softcap, chunk):
    """One sequence, dense and causal, in float64: [T, N, H] over [C, K, H]; q are the last T."""
    T, N, _ = q.shape
    C, K, _ = k.shape
    out = np.zeros_like(q, dtype=np.float64)
    for t in range(T):
        at = C - T + t
        low = 0 if window is None else max(0, at - window + 1)
        low = low if chunk is None else max(low, at - at % chunk)
        for n in range(N):
            keys = k[low : at + 1, n * K // N].astype(np.float64)
            scores = keys @ q[t, n].astype(np.float64) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights / weights.sum() @ v[low : at + 1, n * K // N].astype(np.float64)
    return out


def dense_cache(kv, step, s):
    """Return sequence s's keys and values as [C, K, H] numpy arrays."""
    length = int(step.seq_lens[s])

    def read(pool):
        blocks = np.asarray(pool)[:, np.asarray(step.block_tables[s])]  # [K, B, P, H]
        return blocks.reshape(blocks.shape[0], -1, blocks.shape[-1])[:, :length].swapaxes(0, 1)

    return read(kv.k), read(kv.v)


def check(batch, **options):
    q, k, v, kv, step = batch
    scale = q.shape[-1] ** -0.5
    got, written = jax.jit(lambda *a: attend(*a, scale=scale, **options))(q, k, v, kv, step)
    assert np.isfinite(np.asarray(got)).all()
    reference = attend_reference(q, written, step, scale=scale, **options)
    for s in range(int(step.num_seqs)):
        rows = slice(int(step.query_start_loc[s]), int(step.query_start_loc[s + 1]))
        keys, values = dense_cache(written, step, s)
        new = rows.stop - rows.start
        np.testing.assert_array_equal(keys[-new:], np.asarray(k[rows]))
        np.testing.assert_array_equal(values[-new:], np.asarray(v[rows]))
        expected = numpy_attention(np.asarray(q[rows]), keys, values, scale, **options)
        np.testing.assert_allclose(got[rows], expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(reference[rows], expected, rtol=2e-5, atol=2e-5)


sequences = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=4)


@settings(max_examples=10, deadline=None)
@given(
    sequences=sequences,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (5, 1)]),
    block_size=st.sampled_from([8, 16, 32, 256]),
    window=st.sampled_from([None, 1, 7, 64, 130]),
    softcap=st.sampled_from([None, 5.0]),
    chunk=st.sampled_from([None, None, 1, 6, 100]),
    padding=st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 5)),
    seed=st.integers(0, 2**16),
)
def test_any_ragged_batch_equals_dense_attention(
    sequences, heads, block_size, window, softcap, chunk, padding, seed
):
    shape = Shape(num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size)
    batch = make_batch(
        np.random.default_rng(seed),
        shape,
        sequences,
        pad_tokens=padding[0],
        pad_seqs=padding[1],
        pad_blocks=padding[2],
    )
    check(batch, window=window, softcap=softcap, chunk=chunk)


@settings(max_examples=10, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 400), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 16, 129]),
    softcap=st.sampled_from([None, 5.0]),
    chunk=st.sampled_from([None, None, 1, 6, 100]),
    padding=st.integers(0, 4),
    seed=st.integers(0, 2**16),
)
def test_any_decode_batch_equals_dense_attention(contexts, window, softcap, chunk, padding, seed):
    batch = make_batch(
        np.random.default_rng(seed),
        Shape(),
        [(context, 1) for context in contexts],
        pad_tokens=padding,
        pad_seqs=padding,
    )
    assert batch[-1].max_query_len == 1
    check(batch, window=window, softcap=softcap, chunk=chunk)


@pytest.mark.parametrize("window", [None, 50])
def test_neighbours_and_padding_change_no_bit_of_a_decode(window):
    rng = np.random.default_rng(0)
    q, k, v, kv, step = make_batch(rng, Shape(), [(300, 1), (20, 1), (77, 1), (0, 1)])

    def run(tables, lens, slots):
        changed = dataclasses.replace(step, block_tables=tables, seq_lens=lens, slot_mapping=slots)
        return attend(q, k, v, kv, changed, scale=0.25, window=window)[0]

    together = run(step.block_tables, step.seq_lens, step.slot_mapping)
    outside = kv.k.shape[1] * kv.block_size
    for s in range(4):
        alone = np.arange(4) == s
        got = run(
            jnp.where(alone[:, None], step.block_tables, 0),
            jnp.where(alone, step.seq_lens, 0),
            jnp.where(alone, step.slot_mapping, outside),
        )
        np.testing.assert_array_equal(got[s], together[s])


def test_slots_out_of_range_are_dropped():
    kv = kv_cache.allocate(2, 4, 1, 8, jnp.float32)
    new = jnp.ones((3, 1, 8))
    written = kv.write(new, 2 * new, jnp.asarray([1, 8, 1000]))
    assert float(written.k.sum()) == 8.0
    assert float(written.v.sum()) == 16.0
    np.testing.assert_array_equal(written.k[0, 0, 1], np.ones(8))


def test_a_bfloat16_cache_gives_back_what_was_written():
    kv = kv_cache.allocate(2, 4, 1, 8, jnp.bfloat16)
    new = jnp.linspace(-3, 3, 16).reshape(2, 1, 8).astype(jnp.bfloat16)
    written = kv.write(new, -new, jnp.asarray([5, 2]))
    assert written.k.nbytes == 2 * 4 * 8 * 2
    for pool, expected in ((written.k, new), (written.v, -new)):
        got = kv_cache.decoded(pool)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got[0, 1, 1], expected[0, 0])
        np.testing.assert_array_equal(got[0, 0, 2], expected[1, 0])


def test_bfloat16_in_bfloat16_out():
    q, k, v, kv, step = make_batch(np.random.default_rng(1), Shape(), [(30, 5), (0, 9)])
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, k, v, kv))
    out, written = attend(*half, step, scale=0.25)
    assert out.dtype == jnp.bfloat16
    assert kv_cache.decoded(written.k).dtype == jnp.bfloat16
    full, _ = attend(q, k, v, kv, step, scale=0.25)
    np.testing.assert_allclose(out.astype(jnp.float32), full, atol=3e-2)
