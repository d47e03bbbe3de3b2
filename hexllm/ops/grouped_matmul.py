"""Products of rows with the weight of their group: what a mixture of experts is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from hexllm.ops.matmul import flipped, transposed_weight

if TYPE_CHECKING:
    from jax.typing import DTypeLike

#: Most and fewest rows of a CPU's tile, unless it is a single row: every tile reads a whole weight,
#: and what it computes beyond its group is for nothing. ``benchmarks/grouped_matmul.py`` has times.
MOST_TILE_ROWS = 64
FEWEST_TILE_ROWS = 16
#: Up to so many rows a group they are multiplied one by one: XLA then reads the weight where it
#: lies, where a larger product takes a copy of it first.
MOST_SINGLE_ROWS = 2


def grouped_matmul_reference(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return every row times the weight of its group, by way of all groups; the oracle.

    Args:
        x: [M, in], sorted by group.
        w: [E, out, in].
        group_sizes: [E] int32, rows of each group; rows after the last group's belong to none.

    Returns:
        [M, out] float32; rows of no group are zeros.
    """
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")  # [M]
    x32, w32 = x.astype(jnp.float32), w.astype(jnp.float32)
    every = jnp.einsum("mi,eoi->meo", x32, w32, precision="highest")  # [M, E, out]
    mine = group[:, None] == jnp.arange(w.shape[0])  # [M, E]
    return jnp.where(mine[..., None], every, 0).sum(axis=1)


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """Return every row times the weight of its group, accumulated in float32.

    The cost is that of the rows present, not of the groups: on a TPU XLA has a kernel for it, on a
    CPU, where it would multiply every row by every group's weight, the rows are walked in tiles.

    Args:
        x: [M, in], sorted by group.
        w: [E, out, in].
        group_sizes: [E] int32, rows of each group, M in all or fewer.
        out_dtype: Of the result; x's by default.

    Returns:
        [M, out]. What rows of no group hold is not specified.
    """
    y: jax.Array = lax.platform_dependent(x, w, group_sizes, cpu=_tiled, default=_ragged)
    return y.astype(out_dtype or x.dtype)


def tile_rows(M: int, E: int) -> int:
    """Return how many rows a CPU multiplies at once: about what a group has if all have as many."""
    if M <= MOST_SINGLE_ROWS * E:
        return 1
    rows = FEWEST_TILE_ROWS
    while rows < MOST_TILE_ROWS and rows * E < M:
        rows *= 2
    return rows


_ON_LAST_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def _ragged(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Leave it to XLA. Its TPU kernel reads weights as [E, in, out].

    A weight that lies in memory in that order (layout ``(0, 2, 1)``) is read where it is; one in
    row-major order is copied in each call.
    """
    return lax.ragged_dot_general(
        x, w, group_sizes, _ON_LAST_DIMENSIONS, preferred_element_type=jnp.float32
    )


def _tiled(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, rows: int | None = None
) -> jax.Array:
    """Multiply tiles of ``rows`` rows one after another, by default as many as ``tile_rows`` says.

    A tile may run past its group: the rows beyond are overwritten by the next group's.
    """
    M, _ = x.shape
    E, O, _ = w.shape  # noqa: E741
    R = rows or tile_rows(M, E)
    product = transposed_weight if R == 1 else flipped
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    tile_ends = jnp.cumsum((group_sizes + R - 1) // R)  # [E]
    padded = jnp.pad(x, ((0, R - 1), (0, 0)))

    def tile(t: jax.Array, out: jax.Array) -> jax.Array:
        # JAX 0.10 slices bfloat16 in float32, and would take the conversion of all groups' weights
        # out of the loop, were they not other ones in each turn as far as it can tell.
        weights, t = lax.optimization_barrier((w, t))  # type: ignore[no-untyped-call]
        e = jnp.searchsorted(tile_ends, t, side="right")
        before = jnp.where(e > 0, tile_ends[jnp.maximum(e - 1, 0)], 0)
        row = starts[e] + (t - before) * R
        mine = lax.dynamic_slice_in_dim(padded, row, R)  # [R, in]
        weight = lax.dynamic_index_in_dim(weights, e, keepdims=False)  # [out, in]
        return lax.dynamic_update_slice_in_dim(out, product(mine, weight), row, 0)

    out = jnp.zeros((M + R - 1, O), jnp.float32)
    return lax.fori_loop(0, tile_ends[-1], tile, out)[:M]
