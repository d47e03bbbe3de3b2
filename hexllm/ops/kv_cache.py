"""The paged KV cache of one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct

from hexllm.ops.platform import platform

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@struct.dataclass
class LayerKV:
    """Keys and values of one layer, in blocks.

    Heads come first: they are what tensor parallelism shards, and a gather of blocks then has the
    [K, S, …] order that batched products want, without a transpose.

    Attributes:
        k: [K, blocks, P, H]; read it through ``decoded``.
        v: [K, blocks, P, H]; likewise.
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
    """Return a zeroed cache of ``num_blocks`` blocks for values of ``dtype``."""
    shape = (num_kv_heads, num_blocks, block_size, head_dim)
    if dtype == jnp.bfloat16 and platform() == "cpu":
        # XLA's CPU back end has no bfloat16 stores: it would rewrite the whole pool in float32 and
        # back for every token. The bits are kept as integers instead.
        dtype = jnp.uint16
    return LayerKV(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def decoded(stored: jax.Array) -> jax.Array:
    """Return what was read from a pool as the numbers that were written."""
    if stored.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored


def _encoded(new: jax.Array, dtype: DTypeLike) -> jax.Array:
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16)
    return new.astype(dtype)


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
        slots = slots.at[:, slot_mapping].set(_encoded(new.swapaxes(0, 1), pool.dtype), mode="drop")
        return slots.reshape(pool.shape)

    return LayerKV(k=put(kv.k, k), v=put(kv.v, v))
