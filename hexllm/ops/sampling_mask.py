"""Which tokens top-k, top-p and min-p leave, without sorting the vocabulary.

A mask is a threshold on the raw logits (dividing by a temperature keeps their order), so finding
it is a search. The few likeliest tokens usually settle it; where they do not, ``sampling_search``
goes through all.

Probabilities are whole numbers here: a token's weight is its probability relative to the
likeliest, in units of 2**-28. Sums of whole numbers do not depend on the order of addition, hence
not on the batch's size or on which search found the threshold: a row's mask is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from hexllm.ops.sampling_mass import Mass, carried, is_at_least, share_of, total_mass

if TYPE_CHECKING:
    from hexllm.ops.sampling_shards import Vocabulary

_WEIGHT_ONE = 2.0**28


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
        target = share_of_the_rest(logits, peak, by_count, rows, vocabulary)
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
    return threshold, within & is_settled(threshold, candidates[:, -1], peak, rows)


def is_settled(
    threshold: jax.Array, bound: jax.Array, peak: jax.Array, rows: MaskRows
) -> jax.Array:
    """Return whether candidates hold every token that the masks leave, [S] bool.

    Args:
        threshold: [S] float32, of top-k and top-p, found among the candidates.
        bound: [S] float32; every token above it is a candidate.
        peak: [S, 1] float32, the largest logit.
        rows: Of S rows.
    """
    return ~keeps(bound[:, None], peak, threshold, rows)[:, 0]


def share_of_the_rest(
    logits: jax.Array,
    peak: jax.Array,
    threshold: jax.Array,
    rows: MaskRows,
    vocabulary: Vocabulary,
) -> Mass:
    """Return the mass that top-p keeps at least, of the tokens that top-k left.

    Args:
        logits: [S, W] float32, of this device's part of the vocabulary.
        peak: [S, 1] float32, the largest of all parts.
        threshold: [S] float32, the smallest logit that top-k leaves.
        rows: Of S rows.
        vocabulary: What ``logits`` are a part of.

    Returns:
        A Mass of [S].
    """
    weights = token_weights(logits, peak, rows)
    left = jnp.where(logits >= threshold[:, None], weights, 0)
    return share_of(total_mass(left, vocabulary), rows.top_p)
