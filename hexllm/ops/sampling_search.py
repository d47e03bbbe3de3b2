"""The thresholds of top-k and top-p by bisection, for rows that a few sorted tokens do not settle.

The search goes over the order-preserving integer image of float32, and is exact. On a TPU a pass
over the logits costs less than agreeing on its result does: several points are tried in each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from hexllm.ops import platform
from hexllm.ops.sampling_mask import share_of_the_rest, token_weights
from hexllm.ops.sampling_mass import is_at_least, total_mass
from hexllm.ops.sampling_shards import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from hexllm.ops.sampling_mask import MaskRows


def thresholds_by_bisection(
    logits: jax.Array,
    peak: jax.Array,
    rows: MaskRows,
    vocabulary: Vocabulary,
    few: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Return the smallest logit that top-k and top-p keep.

    Args:
        logits: [S, W] float32, of this device's part of the vocabulary.
        peak: [S, 1] float32, the largest of all parts.
        rows: Of S rows.
        vocabulary: What ``logits`` are a part of.
        few: To search only some tokens of all parts, [S, M] float32, and a bound, [S] float32,
            above which every token is one of them. Where the result is the bound or below it, it
            means nothing.

    Returns:
        [S] float32. Top-k keeps everything at least as likely as its k-th token, ties included.
        Top-p keeps the smallest set of likeliest tokens that holds its share of what top-k left,
        ties at its edge included.
    """
    S, V = logits.shape[0], vocabulary.size
    searched = logits if few is None else few[0]
    over = vocabulary if few is None else Vocabulary(V, searched.shape[1])
    bits = 1 if platform.platform() != "tpu" else 2 if few is None else 3
    image = ordered_image(searched)
    top = ordered_image(peak[:, 0])
    none = jnp.full(S, -jnp.inf)
    bottom = ordered_image(none if few is None else few[1])

    def by_count() -> jax.Array:
        def are_enough(points: list[jax.Array]) -> jax.Array:
            above = [(image >= at[:, None]).sum(axis=1, dtype=jnp.int32) for at in points]
            return over.summed(jnp.stack(above)) >= rows.top_k

        high = jnp.where(rows.limits_count(V), top, bottom)
        found = from_ordered_image(_largest(are_enough, bottom, high, bits))
        return jnp.where(rows.limits_count(V), found, none)

    with jax.named_scope("by_count"):
        threshold = jax.lax.cond(jnp.any(rows.limits_count(V)), by_count, lambda: none)

    def by_mass() -> jax.Array:
        target = share_of_the_rest(logits, peak, threshold, rows, vocabulary)
        weights = token_weights(searched, peak, rows)

        def are_enough(points: list[jax.Array]) -> jax.Array:
            kept = [jnp.where(image >= at[:, None], weights, 0) for at in points]
            return is_at_least(total_mass(kept, over), target)

        low = jnp.maximum(ordered_image(threshold), bottom)
        high = jnp.where(rows.limits_mass(), top, low)
        found = from_ordered_image(_largest(are_enough, low, high, bits))
        return jnp.where(rows.limits_mass(), found, threshold)

    with jax.named_scope("by_mass"):
        return jax.lax.cond(jnp.any(rows.limits_mass()), by_mass, lambda: threshold)


def ordered_image(x: jax.Array) -> jax.Array:
    """Return the uint32 whose order is that of the float32 (-0 is 0, NaN outside)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def from_ordered_image(image: jax.Array) -> jax.Array:
    """Return the float32 of which ``image`` is the ordered image."""
    bits = jnp.where(image >> 31 == 1, image & jnp.uint32(0x7FFFFFFF), ~image)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest(
    are_enough: Callable[[list[jax.Array]], jax.Array], low: jax.Array, high: jax.Array, bits: int
) -> jax.Array:
    """Return for each row the largest number in [low, high] that is enough; low always is.

    Args:
        are_enough: For some numbers of [S], which are enough: [numbers, S] bool.
        low: [S] uint32.
        high: [S] uint32.
        bits: How many bits of the result a turn finds, by trying ``2**bits - 1`` numbers.
    """
    num_points = 2**bits - 1

    def is_open(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(bounds[0] < bounds[1])

    def narrow(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        span = high - low

        def point(i: jax.Array | int) -> jax.Array:
            return low + jnp.minimum(jnp.uint32(i) * ((span >> bits) + 1), span)

        # Ascending, the last ones possibly equal: so many of the first are enough.
        enough = are_enough([point(i) for i in range(1, num_points + 1)])
        n = enough.sum(axis=0, dtype=jnp.uint32)
        new_high = jnp.where(n == num_points, high, point(n + 1) - 1)
        # A row that is done waits for the others.
        return jnp.where(low < high, point(n), low), jnp.where(low < high, new_high, high)

    return jax.lax.while_loop(is_open, narrow, (low, high))[0]
