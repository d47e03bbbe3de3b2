"""Which tokens top-k, top-p and min-p leave, without sorting the vocabulary.

A mask is a threshold on the raw logits (dividing by a temperature keeps their order), so finding
it is a search. The few likeliest tokens (``lax.top_k``) usually settle it; where they do not, the
search bisects over the order-preserving integer image of float32, which is exact.

Probabilities are whole numbers here: a token's weight is its probability relative to the
likeliest, in units of 2**-28. Sums of whole numbers do not depend on the order of addition, hence
not on the batch's size or on which search found the threshold: a row's mask is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from hexllm.ops import platform

if TYPE_CHECKING:
    from collections.abc import Callable

    from hexllm.ops.sampling_shards import Vocabulary

_WEIGHT_ONE = 2.0**28
#: Tokens whose weights fit one uint32 together: 8 * 2**28 = 2**31.
_GROUP = 8
#: Tokens whose low limbs fit one uint32 together: 2**16 * (2**16 - 1) < 2**32.
_SLICE = 2**16
_MAX_VOCAB = 2**19


class MaskRows(NamedTuple):
    """The masks of S rows.

    Attributes:
        top_k: [S] int32; V or more, or 0, keeps all.
        top_p: [S] float32; 1 or more keeps all.
        min_p: [S] float32; 0 keeps all.
        temperature: [S] float32 above 0, of the distribution that top-p and min-p look at.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    temperature: jax.Array

    def limits_count(self, V: int) -> jax.Array:
        """[S] bool: whether top-k drops anything from V tokens."""
        return (self.top_k > 0) & (self.top_k < V)

    def limits_mass(self) -> jax.Array:
        """[S] bool: whether top-p may drop anything."""
        return self.top_p < 1.0


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


def total_mass(weights: jax.Array, vocabulary: Vocabulary) -> Mass:
    """Return the exact sum of each row over the vocabulary.

    Args:
        weights: [S, W] uint32, each at most 2**28, of this device's part.
        vocabulary: What it is a part of.

    Returns:
        A Mass of [S].
    """
    V = vocabulary.width * vocabulary.shards
    if V > _MAX_VOCAB:
        raise ValueError(f"{V} tokens: sums of weights are exact up to {_MAX_VOCAB}")
    mass = _sum_of_slices(weights) if platform.platform() == "tpu" else _sum_of_groups(weights)
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


def below_max(logits: jax.Array, peak: jax.Array) -> jax.Array:
    """Return ``logits - peak``, 0 at the peak even where that is infinite.

    Args:
        logits: [S, M] float32.
        peak: [S, 1] float32, the largest logit of the row.
    """
    return jnp.where(logits == peak, 0.0, logits - peak)


def token_weights(logits: jax.Array, peak: jax.Array, rows: MaskRows) -> jax.Array:
    """Return each token's probability relative to the likeliest, in units of 2**-28.

    Args:
        logits: [S, M] float32.
        peak: [S, 1] float32.
        rows: Of S rows.

    Returns:
        [S, M] uint32.
    """
    scaled = below_max(logits, peak) / rows.temperature[:, None]
    return jnp.round(jnp.exp(scaled) * _WEIGHT_ONE).astype(jnp.uint32)


def keeps(logits: jax.Array, peak: jax.Array, threshold: jax.Array, rows: MaskRows) -> jax.Array:
    """Return which tokens are left, given the threshold of top-k and top-p.

    Args:
        logits: [S, M] float32.
        peak: [S, 1] float32.
        threshold: [S] float32.
        rows: Of S rows.

    Returns:
        [S, M] bool.
    """
    scaled = below_max(logits, peak) / rows.temperature[:, None]
    return (logits >= threshold[:, None]) & (scaled >= jnp.log(rows.min_p)[:, None])


def thresholds_from_candidates(
    logits: jax.Array, candidates: jax.Array, rows: MaskRows, vocabulary: Vocabulary
) -> tuple[jax.Array, jax.Array]:
    """Return the thresholds of top-k and top-p as far as the likeliest tokens settle them.

    Args:
        logits: [S, W] float32, of this device's part of the vocabulary.
        candidates: [S, C] float32, each row's C largest logits of all parts, descending.
        rows: Of S rows.
        vocabulary: What ``logits`` are a part of.

    Returns:
        [S] float32, the smallest logit kept, and [S] bool, whether all tokens left by top-k,
        top-p and min-p are candidates; the threshold of a row where they are not means nothing.
    """
    V, C = vocabulary.size, candidates.shape[1]
    peak = candidates[:, :1]
    within = ~rows.limits_count(V) | (rows.top_k <= C)
    at = jnp.clip(rows.top_k - 1, 0, C - 1)[:, None]
    kth = jnp.take_along_axis(candidates, at, axis=1)[:, 0]
    by_count = jnp.where(rows.limits_count(V), kth, -jnp.inf)

    def by_mass() -> jax.Array:
        target = _share_of_the_rest(logits, peak, by_count, rows, vocabulary)
        few = token_weights(candidates, peak, rows)
        running = carried(
            jnp.cumsum(few >> 16, axis=1, dtype=jnp.uint32),
            jnp.cumsum(few & 0xFFFF, axis=1, dtype=jnp.uint32),
        )
        reached = is_at_least(running, Mass(target.high[:, None], target.low[:, None]))
        first = jnp.max(jnp.where(reached, candidates, -jnp.inf), axis=1)
        return jnp.where(rows.limits_mass(), first, -jnp.inf)

    none = jnp.full_like(by_count, -jnp.inf)
    threshold = jnp.maximum(
        by_count, jax.lax.cond(jnp.any(rows.limits_mass()), by_mass, lambda: none)
    )
    if C >= V:
        return threshold, within
    last_is_kept = keeps(candidates[:, -1:], peak, threshold, rows)[:, 0]
    return threshold, within & ~last_is_kept


def thresholds_by_bisection(
    logits: jax.Array, peak: jax.Array, rows: MaskRows, vocabulary: Vocabulary
) -> jax.Array:
    """Return the smallest logit that top-k and top-p keep, for any row.

    Args:
        logits: [S, W] float32, of this device's part of the vocabulary.
        peak: [S, 1] float32, the largest of all parts.
        rows: Of S rows.
        vocabulary: What ``logits`` are a part of.

    Returns:
        [S] float32. Top-k keeps everything at least as likely as its k-th token, ties included.
        Top-p keeps the smallest set of likeliest tokens that holds its share of what top-k left,
        ties at its edge included.
    """
    S, V = logits.shape[0], vocabulary.size
    image = ordered_image(logits)
    top = ordered_image(peak[:, 0])
    bottom = jnp.full(S, ordered_image(jnp.float32(-jnp.inf)))

    def by_count() -> jax.Array:
        wanted = jnp.where(rows.limits_count(V), rows.top_k, 0)

        def is_enough(at: jax.Array) -> jax.Array:
            count = (image >= at[:, None]).sum(axis=1, dtype=jnp.int32)
            return vocabulary.summed(count) >= wanted

        found = _largest(is_enough, bottom, jnp.where(rows.limits_count(V), top, bottom))
        return from_ordered_image(found)

    none = from_ordered_image(bottom)
    threshold = jax.lax.cond(jnp.any(rows.limits_count(V)), by_count, lambda: none)

    def by_mass() -> jax.Array:
        target = _share_of_the_rest(logits, peak, threshold, rows, vocabulary)
        weights = token_weights(logits, peak, rows)

        def is_enough(at: jax.Array) -> jax.Array:
            kept = jnp.where(image >= at[:, None], weights, 0)
            return is_at_least(total_mass(kept, vocabulary), target)

        low = ordered_image(threshold)
        found = _largest(is_enough, low, jnp.where(rows.limits_mass(), top, low))
        return from_ordered_image(found)

    return jax.lax.cond(jnp.any(rows.limits_mass()), by_mass, lambda: threshold)


def _share_of_the_rest(
    logits: jax.Array,
    peak: jax.Array,
    threshold: jax.Array,
    rows: MaskRows,
    vocabulary: Vocabulary,
) -> Mass:
    """Return the mass that top-p keeps at least, of the tokens that top-k left."""
    weights = token_weights(logits, peak, rows)
    left = jnp.where(logits >= threshold[:, None], weights, 0)
    return share_of(total_mass(left, vocabulary), rows.top_p)


def ordered_image(x: jax.Array) -> jax.Array:
    """Return the uint32 whose order is that of the float32 (-0 is 0, NaN outside)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def from_ordered_image(image: jax.Array) -> jax.Array:
    """Return the float32 of which ``image`` is the ordered image."""
    bits = jnp.where(image >> 31 == 1, image & jnp.uint32(0x7FFFFFFF), ~image)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest(
    is_enough: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array
) -> jax.Array:
    """Return for each row the largest number in [low, high] that is enough; low always is."""

    def is_open(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(bounds[0] < bounds[1])

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        enough = is_enough(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    return jax.lax.while_loop(is_open, halve, (low, high))[0]
