"""The paged KV cache of one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import struct

if TYPE_CHECKING:
    import jax


@struct.dataclass
class LayerKV:
    """Keys and values of one layer, in blocks.

    Attributes:
        k: [blocks, P, K, H].
        v: [blocks, P, K, H].
    """

    k: jax.Array
    v: jax.Array

    @property
    def block_size(self) -> int:
        """P, tokens a block."""
        return self.k.shape[1]


def allocate(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> LayerKV:
    """Return a zeroed cache of ``num_blocks`` blocks."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return LayerKV(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def write(kv: LayerKV, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> LayerKV:
    """Write new keys and values into their slots; slots out of range are dropped.

    Args:
        kv: The cache; donate it, so that the write is in place.
        k: [T, K, H].
        v: [T, K, H].
        slot_mapping: [T] int32.
    """

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        slots = pool.reshape(-1, *pool.shape[2:])  # [blocks * P, K, H]
        slots = slots.at[slot_mapping].set(new.astype(pool.dtype), mode="drop")
        return slots.reshape(pool.shape)

    return LayerKV(k=put(kv.k, k), v=put(kv.v, v))
