"""Projections of one input computed as one product: q, k and v; gate and up.

A step of a few rows is bound by reading weights, and every product pays for its own start: one
large product reads faster than three small ones. Families do not know: they call ``project``, and
a model that is quantized or adapted simply is not fused.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hexllm.model.linear import Dense

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hexllm.ops.step import Step

#: Linears that the blocks apply to the same input, by ``project``.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@struct.dataclass
class Fused:
    """Several linears of one input in the place of the first of them.

    Attributes:
        base: Their weights, and biases, one below the other: all that the first device holds of
            them, then the second device's.
        sizes: Static. Each one's number of outputs.
        shards: Static. Devices over which the outputs are dealt out.
    """

    base: Dense
    sizes: tuple[int, ...] = struct.field(pytree_node=False)  # type: ignore[no-untyped-call]
    shards: int = struct.field(pytree_node=False, default=1)  # type: ignore[no-untyped-call]


@struct.dataclass
class InFused:
    """In the place of a linear whose weight is in the group's ``Fused``."""


def project(leaves: Sequence[Any], x: jax.Array, step: Step | None) -> list[jax.Array]:
    """Apply linears to the same input.

    Args:
        leaves: Of one of ``GROUPS``, in its order.
        x: [T, in].
        step: The batch.

    Returns:
        Each one's [T, out].
    """
    first = leaves[0]
    if not isinstance(first, Fused):
        return [leaf(x, step) for leaf in leaves]
    y = first.base(x, step)
    # Cut along what each device holds, so that no output moves from one to another.
    y = y.reshape(y.shape[0], first.shards, -1)
    ends = np.cumsum(first.sizes)[:-1] // first.shards
    return [part.reshape(y.shape[0], -1) for part in jnp.split(y, ends, axis=2)]


def fuse_projections(params: dict[str, Any]) -> None:
    """Fuse the groups of a tree of parameters, in place, a group at a time.

    In place, so that the memory needed besides the parameters is that of one group.

    Args:
        params: Nested dicts of leaves and arrays, or of leaves and the shapes of arrays
            (``jax.ShapeDtypeStruct`` with shardings), which then become other shapes.
    """
    for group in GROUPS:
        if _can_fuse(params, group):
            parts = [params[name] for name in group]
            params.update(dict.fromkeys(group, InFused()))
            params[group[0]] = _fuse(parts)
            del parts
    for child in params.values():
        if isinstance(child, dict):
            fuse_projections(child)


def _fuse(parts: list[Dense]) -> Fused:
    shards = _shards(parts[0].weight)
    sizes = tuple(part.weight.shape[0] for part in parts)
    first = parts[0]
    base = Dense(
        weight=_stack([part.weight for part in parts], shards),
        bias=None if first.bias is None else _stack([part.bias for part in parts], shards),
        out_dtype=first.out_dtype,
        axes=first.axes,
    )
    return Fused(base, sizes, shards)


def _stack(arrays: list[Any], shards: int) -> Any:
    """Return arrays [out, ...], or shapes, one below the other on each device."""
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        rows = sum(array.shape[0] for array in arrays)
        first = arrays[0]
        shape = (rows, *first.shape[1:])
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=first.sharding)
    stacked = (
        jnp.concatenate(arrays) if shards == 1 else _stacker(shards, arrays[0].sharding)(*arrays)
    )
    return jax.block_until_ready(stacked)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=16)
def _stacker(shards: int, sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    """Return a compiled stack, so that layers of equal shapes share one program."""

    def stack(*arrays: jax.Array) -> jax.Array:
        parts = [array.reshape(shards, -1, *array.shape[1:]) for array in arrays]
        return jnp.concatenate(parts, axis=1).reshape(-1, *arrays[0].shape[1:])

    return jax.jit(stack, out_shardings=sharding)


def _shards(weight: Any) -> int:
    """Return over how many devices the rows of a weight are dealt out."""
    if weight.sharding is None:
        return 1
    shape = weight.sharding.shard_shape(weight.shape)
    return int(weight.shape[0] // shape[0])


def _can_fuse(params: Mapping[str, Any], group: tuple[str, ...]) -> bool:
    parts = [params.get(name) for name in group]
    if not all(isinstance(part, Dense) for part in parts):
        return False
    kinds = {
        (p.weight.shape[1], p.weight.dtype, p.bias is None, p.out_dtype, _shards(p.weight))
        for p in parts
        if p
    }
    return len(kinds) == 1
