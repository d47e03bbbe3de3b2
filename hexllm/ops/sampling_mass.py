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
    several = weights if isinstance(weights, list) else [weights]
    limbs = _limbs_of_slices if platform.platform() == "tpu" else _limbs_of_groups
    mass = Mass(jnp.uint32(0), jnp.uint32(0))
    for pieces in zip(*(limbs(each) for each in several), strict=True):
        more = carried(*(jnp.stack(limb) for limb in zip(*pieces, strict=True)))
        mass = carried(mass.high + more.high, mass.low + more.low)
    if vocabulary.shards > 1:
        high, low = vocabulary.summed(jnp.stack(mass))
        mass = carried(high, low)
    return mass if isinstance(weights, list) else Mass(mass.high[0], mass.low[0])


def _limbs_of_groups(weights: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Return each row's sums of limbs: eight weights make one number before it is split."""
    S, V = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -V % _GROUP)))
    # Groups lie across the row (token i, i + V/8, ...): whole vectors are added, not lanes.
    groups = weights.reshape(S, _GROUP, -1).sum(axis=1, dtype=jnp.uint32)
    return [_limbs(groups)]


def _limbs_of_slices(weights: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Return each row's sums of limbs, a slice at a time, in the shape that the weights have.

    Another shape would be copied into on a TPU.
    """
    return [_limbs(weights[:, i : i + _SLICE]) for i in range(0, weights.shape[1], _SLICE)]


def _limbs(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sums of high and of low halves, neither of which may overflow."""
    high = (numbers >> 16).sum(axis=1, dtype=jnp.uint32)
    return high, (numbers & 0xFFFF).sum(axis=1, dtype=jnp.uint32)


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
