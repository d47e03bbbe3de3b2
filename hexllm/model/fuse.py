"""Projections of one input computed as one product: q, k and v; gate and up.

A step of a few rows is bound by reading weights, and every product pays for its own start: one
large product reads faster than three small ones. Families do not know: they call ``project``, and
a model that is spread over devices, quantized or adapted simply is not fused. (On several TPUs XLA
hides more of the sums' travel behind smaller weights: a decode step of eight of Llama-3.1-8B's
layers on four chips takes 2 % longer fused on v5e, 6 % on v6e, by ``hexllm.plan``'s estimate.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hexllm.model.linear import Dense

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hexllm.ops.step import Step

#: Linears that the blocks apply to the same input, by ``project``.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@struct.dataclass
class Fused:
    """Several linears of one input in the place of the first of them.

    Attributes:
        base: Their weights, and biases, one below the other.
        sizes: Static. Each one's number of outputs.
    """

    base: Dense
    sizes: tuple[int, ...] = struct.field(pytree_node=False)  # type: ignore[no-untyped-call]


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
    return jnp.split(y, np.cumsum(first.sizes)[:-1], axis=1)


def fuse_projections(params: dict[str, Any]) -> None:
    """Fuse the groups of a tree of parameters, in place, a group at a time.

    In place, so that the memory needed besides the parameters is that of one group.

    Args:
        params: Nested dicts of leaves and arrays, all on one device, or of leaves and the shapes
            of arrays (``jax.ShapeDtypeStruct``), which then become other shapes.
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
    sizes = tuple(part.weight.shape[0] for part in parts)
    first = parts[0]
    base = Dense(
        weight=_stack([part.weight for part in parts]),
        bias=None if first.bias is None else _stack([part.bias for part in parts]),
        out_dtype=first.out_dtype,
        axes=first.axes,
    )
    return Fused(base, sizes)


def _stack(arrays: list[Any]) -> Any:
    """Return arrays [out, ...], or shapes, one below the other."""
    first = arrays[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        shape = (sum(array.shape[0] for array in arrays), *first.shape[1:])
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=first.sharding)
    return jax.block_until_ready(jnp.concatenate(arrays))  # type: ignore[no-untyped-call]


def _can_fuse(params: Mapping[str, Any], group: tuple[str, ...]) -> bool:
    parts = [params.get(name) for name in group]
    if not all(isinstance(part, Dense) for part in parts):
        return False
    kinds = {(p.weight.shape[1], p.weight.dtype, p.bias is None, p.out_dtype) for p in parts if p}
    return len(kinds) == 1
