"""Sums of probabilities as whole numbers, exact on machines of 32 bits.

Sums of whole numbers do not depend on the order of addition, hence not on the batch's size, nor on
how many devices the vocabulary is dealt out over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from hexllm.ops import platform

if TYPE_CHECKING:
    from hexllm.ops.sampling_shards import Vocabulary

#: Weights that fit one uint32 together: 8 * 2**28 = 2**31.
_GROUP = 8
#: Weights whose low limbs fit one uint32 together: 2**16 * (2**16 - 1) < 2**32.
_SLICE = 2**16
_MAX_VOCAB = 2**19


class Mass(NamedTuple):
    """A sum of weights below 2**48: ``high * 2**16 + low``, with ``low`` below 2**16.

    Attributes:
        high: uint32.
        low: uint32.
    """

    high: jax.Array
    low: jax.Array


def carried(high: jax.Array, low: jax.Array) -> Mass:
    """Return the Mass of two sums of limbs."""
    return Mass(high + (low >> 16), low & 0xFFFF)


def is_at_least(a: Mass, b: Mass) -> jax.Array:
    """Return ``a >= b``, elementwise."""
    return (a.high > b.high) | ((a.high == b.high) & (a.low >= b.low))


def total_mass(weights: jax.Array | list[jax.Array], vocabulary: Vocabulary) -> Mass:
    """Return the exact sum of each row over the vocabulary.

    Args:
        weights: [S, W] uint32, each at most 2**28, of this device's part; or several of them,
            which devices then exchange together.
        vocabulary: What they are a part of.

    Returns:
        A Mass of [S], or of [several, S].
    """
    V = vocabulary.width * vocabulary.shards
    if V > _MAX_VOCAB:
        raise ValueError(f"{V} tokens: sums of weights are exact up to {_MAX_VOCAB}")
    part = _sum_of_slices if platform.platform() == "tpu" else _sum_of_groups
    if isinstance(weights, list):
        parts = [part(each) for each in weights]
        mass = Mass(jnp.stack([m.high for m in parts]), jnp.stack([m.low for m in parts]))
    else:
        mass = part(weights)
    if vocabulary.shards == 1:
        return mass
    high, low = vocabulary.summed(jnp.stack(mass))
    return carried(high, low)


def _sum_of_groups(weights: jax.Array) -> Mass:
    """Return each row's sum: eight weights make one number before it is split into limbs."""
    S, V = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -V % _GROUP)))
    # Groups lie across the row (token i, i + V/8, ...): whole vectors are added, not lanes.
    groups = weights.reshape(S, _GROUP, -1).sum(axis=1, dtype=jnp.uint32)
    high = (groups >> 16).sum(axis=-1, dtype=jnp.uint32)
    low = (groups & 0xFFFF).sum(axis=-1, dtype=jnp.uint32)
    return carried(high, low)


def _sum_of_slices(weights: jax.Array) -> Mass:
    """Return each row's sum without another shape, which on TPU would be copied into.

    A slice is as long as its low limbs fit one uint32 together.
    """
    S, V = weights.shape
    mass = Mass(jnp.zeros(S, jnp.uint32), jnp.zeros(S, jnp.uint32))
    for start in range(0, V, _SLICE):
        part = weights[:, start : start + _SLICE]
        more = carried(
            (part >> 16).sum(axis=1, dtype=jnp.uint32),
            (part & 0xFFFF).sum(axis=1, dtype=jnp.uint32),
        )
        mass = carried(mass.high + more.high, mass.low + more.low)
    return mass


def share_of(mass: Mass, fraction: jax.Array) -> Mass:
    """Return ``floor(mass * fraction)``, in whole-number arithmetic.

    Args:
        mass: Of [S].
        fraction: [S] float32 in [0, 1); a smaller part than 2**-32 of it is cut off.

    Returns:
        A Mass of [S].
    """
    p = (fraction * 2.0**32).astype(jnp.uint32)
    p1, p0 = p >> 16, p & 0xFFFF
    m2, m1, m0 = mass.high >> 16, mass.high & 0xFFFF, mass.low
    # Long multiplication in limbs of 16 bits; the result is what stands above bit 32.
    a, b, c, d, e = m0 * p0, m0 * p1, m1 * p0, m1 * p1, m2 * p0
    column1 = (a >> 16) + (b & 0xFFFF) + (c & 0xFFFF)
    column2 = (column1 >> 16) + (b >> 16) + (c >> 16) + (d & 0xFFFF) + (e & 0xFFFF)
    high = (column2 >> 16) + (d >> 16) + (e >> 16) + m2 * p1
    return Mass(high, column2 & 0xFFFF)
