"""The product of activations and a weight in Hugging Face's [out, in] layout.

XLA's CPU back end is up to 20 times slower in one form of the same product than in another, and
which form is fast changes with the dtype, the number of rows and JAX's version. That knowledge
lives here only; ``benchmarks/matmul.py`` shows when it stops being true.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.typing import DTypeLike

#: More rows than this and the plain form is as fast as the flipped one.
_MOST_FLIPPED_ROWS = 128
_JAX_VERSION = jax.__version_info__


def plain(x: jax.Array, w: jax.Array) -> jax.Array:
    """Contract the last axes: what TPUs want, and CPUs for many rows or one in float32."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def flipped(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute the transposed product, [out, T], so that Eigen runs along the weight's rows.

    The barrier keeps XLA from swapping the operands back when it sees the transpose.
    """
    y = jax.lax.optimization_barrier(plain(w, x))  # type: ignore[no-untyped-call]
    return jnp.transpose(y)


def transposed_weight(x: jax.Array, w: jax.Array) -> jax.Array:
    """Transpose the weight in name only: JAX 0.10 turns one such bfloat16 row into a good loop."""
    return jnp.matmul(x, w.T, preferred_element_type=jnp.float32)


def padded(x: jax.Array, w: jax.Array) -> jax.Array:
    """Add a row of zeros: two bfloat16 rows reach oneDNN, one does not."""
    return plain(jnp.pad(x, ((0, 1), (0, 0))), w)[:-1]


#: The forms of one product: x [T, in] and w [out, in] give [T, out] float32.
FORMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    form.__name__: form for form in (plain, flipped, transposed_weight, padded)
}


def cpu_form(
    dtype: DTypeLike,
    rows: int,
    shape: tuple[int, int],
    jax_version: tuple[int, ...] = _JAX_VERSION,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the fastest form on XLA's CPU back end, as measured on AVX-512 with bf16.

    Args:
        dtype: Of activations and weight.
        rows: T.
        shape: The weight's, [out, in].
        jax_version: As ``jax.__version_info__``.

    Returns:
        One of ``FORMS``.
    """
    if dtype == jnp.bfloat16 and rows == 1:
        return padded if jax_version >= (0, 12) else transposed_weight
    if dtype == jnp.bfloat16 and jax_version < (0, 12):
        # The plain form packs the weight anew each time: dearer, the longer its rows.
        d_out, d_in = shape
        is_small_and_wide = d_out < d_in and d_out <= 1024
        if is_small_and_wide or (d_in >= 1024 and 32 <= rows <= _MOST_FLIPPED_ROWS):
            return flipped
    if dtype == jnp.float32 and 1 < rows <= _MOST_FLIPPED_ROWS:
        return flipped
    return plain


def linear(x: jax.Array, w: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """Return ``x @ w.T`` with float32 accumulation.

    Args:
        x: [T, in].
        w: [out, in], as Hugging Face stores it.
        out_dtype: Of the result; x's dtype by default. With float32 nothing is rounded on the
            way, whatever the operands.

    Returns:
        [T, out].
    """
    form = cpu_form(x.dtype, x.shape[0], (w.shape[0], w.shape[1])) if x.dtype == w.dtype else plain
    # Chosen when the graph is lowered, so that compiling for a TPU on a CPU host gets the TPU's.
    y: jax.Array = jax.lax.platform_dependent(x, w, cpu=form, default=plain)
    return y.astype(out_dtype or x.dtype)
