"""Rows times the weight of their group, against every row times every weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexllm.ops.grouped_matmul import grouped_matmul, grouped_matmul_reference, tile_rows


def arrays(sizes, extra, d_in, d_out, seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((sum(sizes) + extra, d_in)), dtype)
    w = jnp.asarray(rng.standard_normal((len(sizes), d_out, d_in)), dtype)
    return x, w, jnp.asarray(sizes, jnp.int32)


def numpy_product(x, w, sizes):
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return np.stack([w[e] @ x[m] for m, e in enumerate(groups)]) if len(groups) else x[:0]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any),
    extra=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_any_groups_equal_numpy(sizes, extra, seed):
    x, w, groups = arrays(sizes, extra, 12, 7, seed)
    expected = numpy_product(x, w, sizes)
    got = jax.jit(grouped_matmul)(x, w, groups)
    assert got.shape == (sum(sizes) + extra, 7)
    np.testing.assert_allclose(got[: sum(sizes)], expected, rtol=1e-5, atol=1e-5)
    reference = grouped_matmul_reference(x, w, groups)
    np.testing.assert_allclose(reference[: sum(sizes)], expected, rtol=1e-5, atol=1e-5)
    assert not np.asarray(reference[sum(sizes) :]).any()


@pytest.mark.parametrize(
    "sizes", [(1,), (0, 1, 0), (0, 0, 300), (128, 128), (129, 127), (1,) * 64, (500, 1, 0, 11)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_edges_of_tiles(sizes, dtype):
    x, w, groups = arrays(sizes, 0, 16, 24, 0, dtype)
    got = jax.jit(lambda *a: grouped_matmul(*a, out_dtype=jnp.float32))(x, w, groups)
    np.testing.assert_allclose(got, numpy_product(x, w, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(3, 5, 0, 9), (1, 2, 0, 3)])
def test_a_row_does_not_depend_on_other_rows(sizes):
    x, w, groups = arrays(sizes, 0, 16, 8, 1)
    got = jax.jit(grouped_matmul)(x, w, groups)
    first, second = sizes[0], sizes[0] + sizes[1]
    other = x.at[first:second].set(jnp.nan)  # all rows of the second group
    beside = jax.jit(grouped_matmul)(other, w, groups)
    for rows in (slice(0, first), slice(second, None)):
        np.testing.assert_array_equal(beside[rows], got[rows])


def test_bfloat16_is_accumulated_in_float32():
    x, w, groups = arrays((4, 0, 30), 0, 512, 16, 2, jnp.bfloat16)
    got = jax.jit(lambda *a: grouped_matmul(*a, out_dtype=jnp.float32))(x, w, groups)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, numpy_product(x, w, (4, 0, 30)), rtol=1e-4, atol=1e-3)
    assert grouped_matmul(x, w, groups).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("M", "E", "rows"),
    [(1, 8, 1), (16, 8, 1), (17, 8, 16), (129, 8, 32), (512, 8, 64), (1 << 20, 8, 64), (8, 128, 1)],
)
def test_tiles_fit_the_groups(M, E, rows):
    assert tile_rows(M, E) == rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("M", [4, 64])
def test_no_more_than_one_weight_is_ever_copied(M, dtype):
    E, O, I = 16, 128, 256  # noqa: E741
    shapes = [((M, I), dtype), ((E, O, I), dtype), ((E,), "int32")]
    program = jax.jit(grouped_matmul).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()
    needed = program.memory_analysis().temp_size_in_bytes
    rows = M + tile_rows(M, E)
    assert needed < 2 * O * I * 4 + 3 * rows * (O + I) * 4 + 16384
    assert needed < E * O * I * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tpu_gets_its_ragged_product(dtype):
    shapes = [((64, 128), dtype), ((4, 256, 128), dtype), ((4,), "int32")]
    traced = jax.jit(grouped_matmul).trace(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert tpu.count('chlo.ragged_dot"(') == 1
    assert "while" not in tpu
    assert "transpose" not in tpu
