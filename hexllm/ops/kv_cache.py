"""The paged KV cache of one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import struct

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike


@struct.dataclass
class LayerKV:
    """Keys and values of one layer, in blocks.

    Heads come first: they are what tensor parallelism shards, and a gather of blocks then has the
    [K, S, …] order that batched products want, without a transpose.

    Attributes:
        k: [K, blocks, P, H].
        v: [K, blocks, P, H].
    """

    k: jax.Array
    v: jax.Array

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        """P, tokens a block."""
        return self.k.shape[2]


def allocate(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> LayerKV:
    """Return a zeroed cache of ``num_blocks`` blocks."""
    shape = (num_kv_heads, num_blocks, block_size, head_dim)
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
        K, _, _, H = pool.shape
        slots = pool.reshape(K, -1, H)
        slots = slots.at[:, slot_mapping].set(new.swapaxes(0, 1).astype(pool.dtype), mode="drop")
        return slots.reshape(pool.shape)

    return LayerKV(k=put(kv.k, k), v=put(kv.v, v))
