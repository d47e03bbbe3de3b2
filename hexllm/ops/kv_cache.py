"""The paged KV cache of one layer, in the form that the platform's attention reads fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from hexllm.ops.platform import TENSOR_AXIS, platform

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

#: Lanes of a TPU's vector registers: the last dimension is laid out in tiles of so many.
LANES = 128


class LayerKV:
    """Keys and values of one layer, in blocks; one of the two forms below."""

    @property
    def num_kv_heads(self) -> int:
        """K, of this shard."""
        raise NotImplementedError

    @property
    def block_size(self) -> int:
        """P, tokens a block."""
        raise NotImplementedError

    def gather(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values [K, ..., P, H] of ``blocks`` [...] as they were written."""
        raise NotImplementedError

    def write(self, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> LayerKV:
        """Write new keys and values into their slots; slots out of range are dropped.

        Donate the cache, so that the write is in place.

        Args:
            k: [T, K, H].
            v: [T, K, H].
            slot_mapping: [T] int32.
        """
        raise NotImplementedError

    def partition(self) -> LayerKV:
        """Return this tree with each array's PartitionSpec in its place: heads are dealt out."""
        raise NotImplementedError


@struct.dataclass
class PlainKV(LayerKV):
    """The form of plain XLA.

    Heads come first: they are what tensor parallelism shards, and a gather of blocks then has the
    [K, S, …] order that batched products want, without a transpose.

    Attributes:
        k: [K, blocks, P, H]; read it through ``gather``.
        v: [K, blocks, P, H]; likewise.
    """

    k: jax.Array
    v: jax.Array

    @property
    def num_kv_heads(self) -> int:
        """K, of this shard."""
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        """P, tokens a block."""
        return self.k.shape[2]

    def gather(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values [K, ..., P, H] of ``blocks`` [...] as they were written."""
        k, v = (pool.at[:, blocks].get(mode="promise_in_bounds") for pool in (self.k, self.v))
        return decoded(k), decoded(v)

    def write(self, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> PlainKV:
        """See :class:`LayerKV`."""

        def put(pool: jax.Array, new: jax.Array) -> jax.Array:
            K, _, _, H = pool.shape
            slots = pool.reshape(K, -1, H)
            rows = _encoded(new.swapaxes(0, 1), pool.dtype)
            return slots.at[:, slot_mapping].set(rows, mode="drop").reshape(pool.shape)

        return PlainKV(k=put(self.k, k), v=put(self.v, v))

    def partition(self) -> PlainKV:
        """See :class:`LayerKV`."""
        return PlainKV(k=PartitionSpec(TENSOR_AXIS), v=PartitionSpec(TENSOR_AXIS))  # type: ignore[arg-type, no-untyped-call]


@struct.dataclass
class TiledKV(LayerKV):
    """The form of the TPU kernels.

    A block is one contiguous piece of memory, so that one copy brings all its heads. A token is a
    row of lanes, head after head. Heads of at most 64 share a tile of 128 lanes between key (lanes
    0 to 63) and value (64 to 127), so that nothing but them is read; larger ones take whole tiles,
    first the key, then the value, each padded with zeros to 128 or 256 lanes.

    Attributes:
        pool: [blocks, P, K * lanes a head].
        scales: [2, K] float32: what each head's stored keys and values are multiplied by; None for
            a pool in the activations' own kind of number.
        head_dim: Static. H.
    """

    pool: jax.Array
    scales: jax.Array | None = None
    head_dim: int = struct.field(pytree_node=False, default=LANES)  # type: ignore[no-untyped-call]

    @property
    def num_kv_heads(self) -> int:
        """K, of this shard."""
        return self.pool.shape[2] // head_lanes(self.head_dim)

    @property
    def block_size(self) -> int:
        """P, tokens a block."""
        return self.pool.shape[1]

    def gather(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values [K, ..., P, H] of ``blocks`` [...], in float32 where scaled."""
        rows = self.pool.at[blocks].get(mode="promise_in_bounds")  # [..., P, K * lanes]
        rows = rows.reshape(*rows.shape[:-1], self.num_kv_heads, -1)
        rows = jnp.moveaxis(rows, -2, 0)  # [K, ..., P, lanes]
        at = value_lane(self.head_dim)
        k, v = rows[..., : self.head_dim], rows[..., at : at + self.head_dim]
        if self.scales is None:
            return k, v
        k_scale, v_scale = self.scales.reshape(2, -1, *(1,) * (k.ndim - 1))
        return k.astype(jnp.float32) * k_scale, v.astype(jnp.float32) * v_scale

    def write(self, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> TiledKV:
        """See :class:`LayerKV`."""
        T, _, H = k.shape
        if self.scales is not None:
            k = _quantized(k, self.scales[0], self.pool.dtype)
            v = _quantized(v, self.scales[1], self.pool.dtype)
        at = value_lane(H)
        k = jnp.pad(k.astype(self.pool.dtype), ((0, 0), (0, 0), (0, at - H)))
        v = jnp.pad(v.astype(self.pool.dtype), ((0, 0), (0, 0), (0, head_lanes(H) - at - H)))
        rows = jnp.concatenate([k, v], axis=2).reshape(T, -1)
        # XLA scatters rows in place where the pool is donated.
        slots = self.pool.reshape(-1, self.pool.shape[2])
        slots = slots.at[slot_mapping].set(rows, mode="drop")
        pool: jax.Array = slots.reshape(self.pool.shape)
        return TiledKV(pool=pool, scales=self.scales, head_dim=self.head_dim)

    def partition(self) -> TiledKV:
        """See :class:`LayerKV`."""
        pool, scales = PartitionSpec(None, None, TENSOR_AXIS), PartitionSpec(None, TENSOR_AXIS)  # type: ignore[no-untyped-call]
        return TiledKV(
            pool=pool,  # type: ignore[arg-type]
            scales=None if self.scales is None else scales,  # type: ignore[arg-type]
            head_dim=self.head_dim,
        )


def value_lane(head_dim: int) -> int:
    """Return the lane of a head's row in a :class:`TiledKV` at which its value starts."""
    return LANES // 2 if head_dim <= LANES // 2 else -(-head_dim // LANES) * LANES


def head_lanes(head_dim: int) -> int:
    """Return how many lanes of a row of a :class:`TiledKV` a head takes, key and value."""
    return 2 * value_lane(head_dim)


def allocate(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    *,
    is_tiled: bool = False,
    scales: jax.Array | None = None,
) -> LayerKV:
    """Return a zeroed cache.

    Args:
        num_blocks: Of the pool.
        block_size: P.
        num_kv_heads: K.
        head_dim: H.
        dtype: Of what is stored.
        is_tiled: Whether it is a :class:`TiledKV`, for the Pallas kernels.
        scales: [2, K] float32, of a :class:`TiledKV` whose ``dtype`` is int8 or float8.
    """
    if is_tiled:
        shape = (num_blocks, block_size, num_kv_heads * head_lanes(head_dim))
        return TiledKV(pool=jnp.zeros(shape, dtype), scales=scales, head_dim=head_dim)
    if dtype == jnp.bfloat16 and platform() == "cpu":
        # XLA's CPU back end has no bfloat16 stores: it would rewrite the whole pool in float32 and
        # back for every token. The bits are kept as integers instead.
        dtype = jnp.uint16
    heads_first = (num_kv_heads, num_blocks, block_size, head_dim)
    return PlainKV(k=jnp.zeros(heads_first, dtype), v=jnp.zeros(heads_first, dtype))


def shardings(kv: LayerKV, mesh: Mesh) -> LayerKV:
    """Return the tree of ``kv`` with each array's sharding over ``mesh`` in its place."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        kv.partition(),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def decoded(stored: jax.Array) -> jax.Array:
    """Return what was read from a pool as the numbers that were written."""
    if stored.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored


def _encoded(new: jax.Array, dtype: DTypeLike) -> jax.Array:
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16)
    return new.astype(dtype)


def _quantized(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return x [T, K, H] over its head's scale [K], rounded and kept within ``dtype``'s range."""
    scaled = x.astype(jnp.float32) / scale[:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(scaled), info.min, info.max).astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -limit, limit).astype(dtype)
