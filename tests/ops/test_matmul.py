import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hexllm.ops import matmul

SHAPES = [(1, 576, 192), (2, 100, 33), (5, 64, 257), (128, 96, 48), (129, 96, 48), (1, 1, 1)]
#: Half a unit in the last place of the result, and some for float32 sums.
ROUNDING = {"float32": 2e-6, "bfloat16": 2.0**-8}


def operands(T, d_in, d_out, dtype):
    random = np.random.default_rng(0)
    x = random.normal(size=(T, d_in)).astype(dtype)
    w = random.normal(size=(d_out, d_in)).astype(dtype)
    return x, w


def check(y, x, w, rounding):
    x, w = x.astype(np.float64), w.astype(np.float64)
    size = np.abs(x) @ np.abs(w.T)  # what float32 sums can lose is relative to this
    error = np.abs(np.asarray(y).astype(np.float64) - x @ w.T)
    assert (error <= rounding * np.abs(x @ w.T) + 1e-6 * size).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_equals_float64_to_the_dtypes_accuracy(shape, dtype):
    x, w = operands(*shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    y = jax.jit(matmul.linear)(x, w)
    assert y.dtype == x.dtype
    assert y.shape == (shape[0], shape[2])
    check(y, x, w, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_float32_result_keeps_float32_accuracy(shape, dtype):
    x, w = operands(*shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    y = jax.jit(lambda x, w: matmul.linear(x, w, out_dtype=jnp.float32))(x, w)
    assert y.dtype == jnp.float32
    check(y, x, w, 2e-6)


@pytest.mark.parametrize("form", matmul.FORMS.values(), ids=matmul.FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, 3])
def test_every_form_is_the_same_product(form, dtype, T):
    x, w = operands(T, 200, 70, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    y = jax.jit(form)(x, w)
    assert y.dtype == jnp.float32
    check(y, x, w, 2e-6)


def test_mixed_dtypes_are_multiplied():
    x, _ = operands(2, 64, 8, np.dtype("float32"))
    _, w = operands(2, 64, 8, np.dtype(ml_dtypes.bfloat16))
    y = jax.jit(matmul.linear)(x, w)
    assert y.dtype == jnp.float32
    check(y, x, w, 2e-6)


@pytest.mark.parametrize(
    ("dtype", "rows", "shape", "version", "form"),
    [
        (jnp.float32, 1, (1536, 576), (0, 10, 2), matmul.plain),
        (jnp.float32, 2, (1536, 576), (0, 10, 2), matmul.flipped),
        (jnp.float32, 128, (1536, 576), (0, 12, 0), matmul.flipped),
        (jnp.float32, 129, (1536, 576), (0, 12, 0), matmul.plain),
        (jnp.bfloat16, 1, (576, 1536), (0, 10, 2), matmul.transposed_weight),
        (jnp.bfloat16, 1, (576, 1536), (0, 12, 0), matmul.padded),
        (jnp.bfloat16, 2, (1536, 576), (0, 10, 2), matmul.plain),
        (jnp.bfloat16, 2, (576, 1536), (0, 10, 2), matmul.flipped),
        (jnp.bfloat16, 2, (576, 576), (0, 10, 2), matmul.plain),
        (jnp.bfloat16, 2, (1025, 1536), (0, 10, 2), matmul.plain),
        (jnp.bfloat16, 31, (2048, 1024), (0, 10, 2), matmul.plain),
        (jnp.bfloat16, 32, (2048, 1024), (0, 10, 2), matmul.flipped),
        (jnp.bfloat16, 128, (2048, 1024), (0, 10, 2), matmul.flipped),
        (jnp.bfloat16, 129, (2048, 1024), (0, 10, 2), matmul.plain),
        (jnp.bfloat16, 32, (2048, 1023), (0, 10, 2), matmul.plain),
        (jnp.bfloat16, 32, (2048, 1024), (0, 12, 0), matmul.plain),
        (jnp.float16, 1, (576, 1536), (0, 12, 0), matmul.plain),
    ],
)
def test_the_form_follows_dtype_rows_shape_and_version(dtype, rows, shape, version, form):
    assert matmul.cpu_form(jnp.dtype(dtype), rows, shape, version) is form


@pytest.mark.parametrize("T", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tpu_gets_the_plain_product(T, dtype):
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in [(T, 64), (32, 64)])
    traced = jax.jit(matmul.linear).trace(x, w)
    tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert f"(tensor<{T}x64x" in tpu
    assert tpu.count("dot_general") == 1
    assert not any(op in tpu for op in ("optimization_barrier", "transpose", "stablehlo.pad"))
    cpu = traced.lower(lowering_platforms=("cpu",))
    assert "conditional" not in cpu.compile().as_text(), "the choice must cost nothing when run"
    if (T, dtype) == (8, "float32"):
        assert "optimization_barrier" in cpu.as_text()
