"""The product of activations and a weight in Hugging Face's [out, in] layout.

XLA's CPU back end is up to 20 times slower in one form of the same product than in another, and
which form is fast changes with the dtype and the number of rows. That knowledge lives here only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def linear(x: jax.Array, w: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """Return ``x @ w.T`` with float32 accumulation.

    Args:
        x: [T, in].
        w: [out, in], as Hugging Face stores it.
        out_dtype: Of the result; x's dtype by default.

    Returns:
        [T, out].
    """
    y = jax.lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )  # [T, out]
    return y.astype(out_dtype or x.dtype)
