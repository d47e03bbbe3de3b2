"""The TPU kernels in Pallas's interpreter of TPUs, against the plain reference.

The interpreter simulates copies, semaphores and races, and fills what is not written with NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from hexllm.ops import attention_pallas_tpu, kv_cache
from hexllm.ops.attention import attend, attend_reference, is_tiled
from tests.ops.batches import Shape, make_batch, tiled

ONE_CORE, TWO_CORES = "TPU v5 lite", "TPU v5"
OPTIONS = {"window": None, "softcap": None, "chunk": None}


def run(batch, kv, *, form=None, chip=ONE_CORE, detect_races=False, **options):
    """Return the kernel's output and the reference's, of the tokens that are not padding."""
    q, k, v, _, step = batch
    options = {"scale": q.shape[-1] ** -0.5, **OPTIONS, **options}
    kv = jax.jit(lambda kv, *new: kv.write(*new))(kv, k, v, step.slot_mapping)
    if form is None:
        form = "decode" if step.max_query_len == 1 else "ragged"
    kernel = getattr(attention_pallas_tpu, form)
    interpret = pltpu.InterpretParams(detect_races=detect_races, dma_execution_mode="on_wait")
    got = jax.jit(lambda *a: kernel(*a, chip=chip, interpret=interpret, **options))(q, kv, step)
    assert np.isfinite(np.asarray(got)).all(), "something was not written"
    if detect_races:
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        assert not interpret_pallas_call.races.races_found
    expected = attend_reference(q, kv, step, **options)
    used = int(step.query_start_loc[-1])
    assert not np.asarray(got[used:], np.float32).any(), "padding tokens hold something"
    return np.asarray(got[:used], np.float32), np.asarray(expected[:used], np.float32)


def check(batch, dtype, **options):
    """Compare with float32's or bfloat16's bound.

    Of bfloat16 it is the error before the result itself is rounded (a rounding alone is 2e-3):
    queries in float32 that are bfloat16 numbers give that, and bfloat16 queries its rounding.
    """
    q, k, v, kv, step = batch
    kv = tiled(kv, dtype)
    q = q.astype(dtype).astype(jnp.float32)
    got, expected = run((q, k, v, kv, step), kv, **options)
    bound = 1e-5 if dtype == jnp.float32 else 2e-3
    starts = np.asarray(step.query_start_loc)
    for s in range(int(step.num_seqs)):
        ours, theirs = got[starts[s] : starts[s + 1]], expected[starts[s] : starts[s + 1]]
        assert np.linalg.norm(ours - theirs) <= bound * np.linalg.norm(theirs)
    return got


windows = st.sampled_from([None, 1, 7, 64, 130])
chunks = st.sampled_from([None, None, 1, 6, 100])
heads = st.sampled_from([(4, 4), (4, 2), (6, 2), (5, 1), (12, 12)])
head_dims = st.sampled_from([16, 64, 80, 96, 128, 256])
blocks = st.sampled_from([8, 16, 32, 64, 128, 256, 1024])
dtypes = st.sampled_from([jnp.float32, jnp.bfloat16])
chips = st.sampled_from([ONE_CORE, TWO_CORES])


@settings(max_examples=10, deadline=None)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 2, 5, 40, 150])),
        min_size=1,
        max_size=5,
    ),
    heads=heads,
    head_dim=head_dims,
    block_size=blocks,
    window=windows,
    softcap=st.sampled_from([None, 5.0]),
    chunk=chunks,
    padding=st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 5)),
    dtype=dtypes,
    chip=chips,
    seed=st.integers(0, 2**16),
)
def test_any_ragged_batch_equals_the_reference(
    sequences, heads, head_dim, block_size, window, softcap, chunk, padding, dtype, chip, seed
):
    batch = make_batch(
        np.random.default_rng(seed),
        Shape(*heads, head_dim, block_size),
        sequences,
        pad_tokens=padding[0],
        pad_seqs=padding[1],
        pad_blocks=padding[2],
    )
    options = {"window": window, "softcap": softcap, "chunk": chunk}
    check(batch, dtype, form="ragged", chip=chip, **options)


@settings(max_examples=10, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 900), min_size=1, max_size=7),
    heads=heads,
    head_dim=head_dims,
    block_size=blocks,
    window=windows,
    softcap=st.sampled_from([None, 5.0]),
    chunk=chunks,
    padding=st.integers(0, 4),
    dtype=dtypes,
    chip=chips,
    seed=st.integers(0, 2**16),
)
def test_any_decode_batch_equals_the_reference(
    contexts, heads, head_dim, block_size, window, softcap, chunk, padding, dtype, chip, seed
):
    batch = make_batch(
        np.random.default_rng(seed),
        Shape(*heads, head_dim, block_size),
        [(context, 1) for context in contexts],
        pad_tokens=padding,
        pad_seqs=padding,
    )
    options = {"window": window, "softcap": softcap, "chunk": chunk}
    check(batch, dtype, form="decode", chip=chip, **options)


@pytest.mark.parametrize("form", ["decode", "ragged"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_copy_races_with_a_read(form, head_dim):
    batch = make_batch(
        np.random.default_rng(0),
        Shape(4, 2, head_dim, 16),
        [(700, 1), (20, 1), (0, 1), (530, 1)] if form == "decode" else [(700, 1), (0, 30), (9, 2)],
        pad_seqs=1,
        pad_tokens=1,
    )
    check(batch, jnp.bfloat16, form=form, detect_races=True)


def test_a_bfloat16_result_is_rounded_once():
    batch = make_batch(np.random.default_rng(0), Shape(4, 2, 128, 32), [(300, 40), (3, 1)])
    exact = check(batch, jnp.bfloat16)
    q, *rest = batch
    got, _ = run((q.astype(jnp.bfloat16), *rest), tiled(batch[3], jnp.bfloat16))
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("form", ["decode", "ragged"])
def test_positions_past_32768_are_right(form):
    new = 1 if form == "decode" else 3
    batch = make_batch(np.random.default_rng(0), Shape(2, 1, 64, 256), [(33_500, new), (5, 1)])
    check(batch, jnp.float32, form=form)
    check(batch, jnp.float32, form=form, window=3000)
    check(batch, jnp.float32, form=form, chunk=8192)


@pytest.mark.parametrize("form", ["decode", "ragged"])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_small_numbers_are_scaled_a_head(form, dtype):
    sequences = [(300, 1), (40, 1)] if form == "decode" else [(300, 30), (0, 9)]
    batch = make_batch(np.random.default_rng(0), Shape(4, 2, 64, 32), sequences)
    q, k, v, kv, step = batch
    scales = jnp.asarray([[0.03, 0.05], [0.04, 0.02]])
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    stored = tiled(kv, dtype, scales)
    got, expected = run((q, k, v, kv, step), stored, form=form, chip="TPU v6 lite")
    assert np.linalg.norm(got - expected) <= 3e-3 * np.linalg.norm(expected)
    full, _ = run((q, k, v, kv, step), tiled(kv, jnp.bfloat16), form=form)
    difference = np.linalg.norm(got - full) / np.linalg.norm(full)
    assert 1e-4 < difference < 0.2  # the scales are honoured, and the numbers are small ones


@pytest.mark.parametrize("form", ["decode", "ragged"])
def test_an_infinite_neighbour_changes_no_bit(form):
    sequences = [(70, 1), (300, 1), (20, 1)] if form == "decode" else [(7, 30), (90, 20), (0, 9)]
    batch = make_batch(np.random.default_rng(0), Shape(4, 2, 64, 16), sequences)
    q, k, v, kv, step = batch
    starts = np.asarray(step.query_start_loc)
    kv = tiled(kv, jnp.float32)
    options = {"scale": 0.125, **OPTIONS, "chip": ONE_CORE}
    kernel = getattr(attention_pallas_tpu, form)

    def out(k, v, q):
        written = kv.write(k, v, step.slot_mapping)
        return np.asarray(kernel(q, written, step, interpret=pltpu.InterpretParams(), **options))

    calm = out(k, v, q)
    spoilt = slice(starts[1], starts[2])
    wild = out(k.at[spoilt].set(jnp.inf), v.at[spoilt].set(jnp.nan), q.at[spoilt].set(jnp.inf))
    for s in (0, 2):
        rows = slice(starts[s], starts[s + 1])
        np.testing.assert_array_equal(calm[rows], wild[rows])


@pytest.mark.parametrize("form", ["decode", "ragged"])
def test_neighbours_padding_and_order_change_no_bit(form):
    new = [1, 1, 1, 1] if form == "decode" else [40, 1, 7, 1]
    batch = make_batch(
        np.random.default_rng(0),
        Shape(4, 2, 64, 16),
        list(zip([300, 20, 77, 600], new, strict=True)),
    )
    q, k, v, kv, step = batch
    kv = tiled(kv, jnp.bfloat16).write(k, v, step.slot_mapping)
    options = {"scale": 0.125, **OPTIONS, "chip": ONE_CORE}
    kernel = getattr(attention_pallas_tpu, form)
    together = np.asarray(kernel(q, kv, step, interpret=pltpu.InterpretParams(), **options))
    starts = np.asarray(step.query_start_loc)
    for s in range(4):
        rows = slice(starts[s], starts[s + 1])
        alone = step.replace(
            block_tables=step.block_tables[s : s + 1],
            seq_lens=step.seq_lens[s : s + 1],
            query_start_loc=jnp.asarray([0, new[s]]),
            num_seqs=jnp.asarray(1),
        )
        own = np.asarray(kernel(q[rows], kv, alone, interpret=pltpu.InterpretParams(), **options))
        np.testing.assert_allclose(own, together[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["decode", "ragged"])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"chunk": 64}], ids=str)
def test_no_block_is_read_that_no_query_sees(form, options):
    lengths = [(300, 1), (470, 1), (5, 1)] if form == "decode" else [(300, 20), (470, 3), (0, 9)]
    batch = make_batch(np.random.default_rng(0), Shape(4, 2, 64, 16), lengths, pad_blocks=3)
    q, k, v, kv, step = batch
    kv = tiled(kv, jnp.float32).write(k, v, step.slot_mapping)
    seen = set()
    for s, (context, new) in enumerate(lengths):
        first = 0
        if "window" in options:
            first = max(0, context + 1 - options["window"])
        if "chunk" in options:
            first = context // options["chunk"] * options["chunk"]
        seen |= set(np.asarray(step.block_tables[s])[first // 16 : -(-(context + new) // 16)])
    unseen = jnp.asarray(sorted(set(range(kv.pool.shape[0])) - seen))
    assert options == {} or len(unseen) > 20
    kernel = getattr(attention_pallas_tpu, form)
    options = {"scale": 0.125, **OPTIONS, **options, "chip": ONE_CORE}

    def run(kv):
        return np.asarray(kernel(q, kv, step, interpret=pltpu.InterpretParams(), **options))

    poisoned = kv.replace(pool=kv.pool.at[unseen].set(jnp.nan))
    np.testing.assert_array_equal(run(poisoned), run(kv))


def test_a_small_head_takes_no_more_memory_than_its_numbers():
    for head_dim, lanes in ((64, 128), (80, 256), (96, 256), (128, 256), (256, 512)):
        kv = kv_cache.allocate(4, 16, 2, head_dim, jnp.bfloat16, is_tiled=True)
        assert kv.pool.shape == (4, 16, 2 * lanes)
        assert kv.num_kv_heads == 2


def test_tables_larger_than_scalar_memory_are_taken_in_parts(monkeypatch):
    batch = make_batch(
        np.random.default_rng(0), Shape(4, 2, 64, 16), [(n * 37 % 200, 1) for n in range(9)]
    )
    whole = check(batch, jnp.float32, form="decode")
    width = batch[-1].block_tables.shape[1]
    monkeypatch.setattr(attention_pallas_tpu, "MAX_TABLE_ENTRIES", 4 * width)
    for chip in (ONE_CORE, TWO_CORES):
        parts = check(batch, jnp.float32, form="decode", chip=chip)
        np.testing.assert_array_equal(whole, parts)


def test_attend_takes_the_kernels_for_a_tiled_cache():
    q, k, v, kv, step = make_batch(np.random.default_rng(0), Shape(4, 2, 64, 16), [(30, 5), (9, 1)])
    kv = tiled(kv, jnp.float32)
    got, written = jax.jit(lambda *a: attend(*a, scale=0.125, window=9))(q, k, v, kv, step)
    text = str(jax.make_jaxpr(lambda *a: attend(*a, scale=0.125))(q, k, v, kv, step))
    assert "pallas_call" in text
    expected = attend_reference(q, written, step, scale=0.125, window=9, softcap=None)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_what_the_kernels_refuse_falls_back_and_says_why(caplog):
    q, k, v, kv, step = make_batch(np.random.default_rng(0), Shape(4, 2, 16, 4), [(30, 5), (9, 1)])
    kv = tiled(kv, jnp.float32)
    got, written = attend(q, k, v, kv, step, scale=0.25)
    assert "block_size=4 is not a power of 2 from 8 up" in caplog.text
    expected = attend_reference(q, written, step, scale=0.25, window=None, softcap=None)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 24}, "block_size=24 is not a power of 2"),
        ({"block_size": 4}, "block_size=4 is not a power of 2 from 8 up"),
        ({"head_dims": [64, 512]}, "head_dim=512 is over 256"),
        ({"dtype": jnp.int8, "block_size": 16}, "block_size=16 is under 32"),
    ],
)
def test_a_backend_that_cannot_be_had_says_why(changes, reason):
    options = {"block_size": 32, "head_dims": [128], "dtype": jnp.bfloat16}
    assert is_tiled("pallas", **options)
    assert not is_tiled("xla", **options)
    assert not is_tiled("auto", **options)  # no TPU here
    with pytest.raises(NotImplementedError, match=reason):
        is_tiled("pallas", **{**options, **changes})
