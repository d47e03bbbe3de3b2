"""The likeliest tokens of each row, found on every device among its own.

On a CPU they are sorted (``lax.top_k``). On a TPU that is slow, and what many lanes keep of the
logits that pass by is taken instead: many more tokens, in no order (``sampling_pallas_tpu``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from hexllm.ops import platform
from hexllm.ops.sampling_mask import is_settled, thresholds_from_candidates
from hexllm.ops.sampling_pallas_tpu import LANES, NO_TOKEN, lane_lists
from hexllm.ops.sampling_search import thresholds_by_bisection
from hexllm.ops.sampling_shards import best_in_one_pass

if TYPE_CHECKING:
    from hexllm.ops.sampling_mask import MaskRows
    from hexllm.ops.sampling_shards import Vocabulary

#: Candidates tried before the whole vocabulary is searched. On CPU, lax.top_k costs the same up
#: to about this many and rises after; most nucleuses are smaller.
NUM_CANDIDATES = 256
#: Tokens of which a lane of a TPU keeps one list: long enough that lists are few, short enough
#: that two pieces of eight rows take little of the VMEM.
SEGMENT = 32768
#: Lists a lane keeps over all devices times their length. 512 lists of 8 tokens each hold the 500
#: likeliest of a row in all but one of two thousand, if these fall to lanes at random; of as many
#: tokens in shorter lists fewer are sure to be.
_LIST_BUDGET = 32
_MAX_LEVELS, _MIN_LEVELS = 8, 4


class Candidates(NamedTuple):
    """Tokens of this device's part of the vocabulary, of each of S rows.

    Attributes:
        values: [S, C] float32, their logits.
        ids: [S, C] int32; an id from V on is no token.
        bound: [S] float32. Every token of any part whose logit is above it is a candidate there.
    """

    values: jax.Array
    ids: jax.Array
    bound: jax.Array


def candidates_of_lanes(logits: jax.Array, vocabulary: Vocabulary) -> Candidates:
    """Return the tokens that the lanes of each device keep, in any order.

    Args:
        logits: [S, W] float32, of this device's part.
        vocabulary: What it is a part of.
    """
    levels = list_length(vocabulary)
    values, ids = lane_lists(logits, levels=levels, segment=SEGMENT)
    bound = vocabulary.largest(_bound_of_lists(values, levels))
    return Candidates(values, jnp.where(ids == NO_TOKEN, ids, ids + vocabulary.first()), bound)


def list_length(vocabulary: Vocabulary) -> int:
    """Return how many tokens of a segment each lane keeps."""
    lists = vocabulary.shards * -(-vocabulary.width // SEGMENT)
    return max(_MIN_LEVELS, min(_MAX_LEVELS, _LIST_BUDGET // lists))


def find_candidates(
    logits: jax.Array, peak: jax.Array, rows: MaskRows, vocabulary: Vocabulary
) -> tuple[Candidates, jax.Array, jax.Array]:
    """Return the likeliest tokens, and the thresholds of top-k and top-p as far as they tell.

    Args:
        logits: [S, W] float32, of this device's part of the vocabulary.
        peak: [S, 1] float32, the largest of all parts.
        rows: Of S rows.
        vocabulary: What ``logits`` are a part of.

    Returns:
        The candidates; [S] float32, the smallest logit kept; and [S] bool, whether all tokens left
        by top-k, top-p and min-p are candidates: the threshold of a row where they are not means
        nothing.
    """
    if platform.platform() == "tpu":
        found = candidates_of_lanes(logits, vocabulary)
        every = vocabulary.joined(found.values)
        few = every, found.bound
        threshold = thresholds_by_bisection(logits, peak, rows, vocabulary, few)
        # What top-p leaves depends on all that top-k left.
        count = (every > found.bound[:, None]).sum(axis=1, dtype=jnp.int32)
        within = ~rows.limits_count(vocabulary.size) | (count >= rows.top_k)
        return found, threshold, within & is_settled(threshold, found.bound, peak, rows)
    values, ids = top_of(without_negative_zeros(logits), min(NUM_CANDIDATES, vocabulary.width))
    every = values
    if vocabulary.shards > 1:
        joined = vocabulary.joined(values)
        every, _ = top_of(joined, min(NUM_CANDIDATES, joined.shape[1]))
    threshold, settled = thresholds_from_candidates(logits, every, rows, vocabulary)
    return Candidates(values, ids + vocabulary.first(), every[:, -1]), threshold, settled


def likeliest_tokens(
    logits: jax.Array, count: int, vocabulary: Vocabulary
) -> tuple[jax.Array, jax.Array]:
    """Return each row's likeliest tokens.

    Args:
        logits: [S, W] float32, of this device's part.
        count: How many.
        vocabulary: What it is a part of.

    Returns:
        [S, count] float32, descending, of equals the lower id first, -inf past the end of a smaller
        vocabulary; and their ids, int32.
    """
    n = min(count, vocabulary.width)
    if platform.platform() == "tpu":
        values, ids = _picked_from_lanes(logits, n, vocabulary)
    else:
        values, ids = top_of(without_negative_zeros(logits), n)
        ids += vocabulary.first()
    if vocabulary.shards > 1:
        # Parts follow each other by id: of equals, an earlier one has the lower.
        ids = vocabulary.joined(ids)
        values, at = top_of(vocabulary.joined(values), min(count, ids.shape[1]))
        ids = jnp.take_along_axis(ids, at, axis=1)
    ids = jnp.where(ids < vocabulary.size, ids, 0)  # padding, at -inf
    missing = ((0, 0), (0, count - ids.shape[1]))
    return jnp.pad(values, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)


def _picked_from_lanes(
    logits: jax.Array, count: int, vocabulary: Vocabulary
) -> tuple[jax.Array, jax.Array]:
    """Return the likeliest tokens of this device's part, of what its lanes keep if that has them.

    Devices need not agree on that: nothing is exchanged here.
    """
    levels = list_length(vocabulary)
    kept, kept_ids = lane_lists(logits, levels=levels, segment=SEGMENT)
    values, ids = pick(kept, kept_ids, count)
    is_whole = jnp.all(values[:, -1] > _bound_of_lists(kept, levels))
    every = jnp.arange(vocabulary.width, dtype=jnp.int32)[None]
    with jax.named_scope("from_lanes"):
        values, ids = jax.lax.cond(
            is_whole, lambda: (values, ids), lambda: pick(logits, every, count)
        )
    return without_negative_zeros(values), ids + vocabulary.first()


def pick(values: jax.Array, ids: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return each row's likeliest tokens by taking one after the other.

    On a TPU ``lax.top_k`` does no less, and a sort's program takes many times as long to compile.

    Args:
        values: [S, M] float32.
        ids: [S, M] or [1, M] int32.
        count: How many.

    Returns:
        [S, count] float32, descending, of equals the lower id first, and their ids.
    """
    S, ids = values.shape[0], jnp.broadcast_to(ids, values.shape)

    def take(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        last, last_id = found[0][i], found[1][i]
        # What comes after the token taken last.
        follows = (values < last[:, None]) | ((values == last[:, None]) & (ids > last_id[:, None]))
        token, value = best_in_one_pass(
            jnp.where(follows, values, -jnp.inf), jnp.where(follows, ids, NO_TOKEN), NO_TOKEN
        )
        return found[0].at[i + 1].set(value), found[1].at[i + 1].set(token)

    none = (jnp.full((count + 1, S), jnp.inf), jnp.full((count + 1, S), -1, jnp.int32))
    found, found_ids = jax.lax.fori_loop(0, count, take, none)
    return found[1:].T, found_ids[1:].T


def top_of(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return each row's k largest logits, descending, of equals the lower id first.

    The barrier keeps XLA from merging a later slice of the result into ``lax.top_k``, which then
    becomes a sort of the whole vocabulary on CPU, a hundred times slower.

    Args:
        logits: [S, V] float32.
        k: At most V.

    Returns:
        [S, k] float32 and their ids, [S, k] int32.
    """
    values, ids = jax.lax.top_k(logits, k)
    # Each by itself: XLA's CPU compiler (jax 0.10.2) crashes on one barrier around both.
    values, ids = (jax.lax.optimization_barrier(each) for each in (values, ids))  # type: ignore[no-untyped-call]
    return values, ids


def without_negative_zeros(logits: jax.Array) -> jax.Array:
    """Return the logits with 0 for -0: equally likely, but apart for sorts."""
    return jnp.where(logits == 0, 0.0, logits)


def _bound_of_lists(values: jax.Array, levels: int) -> jax.Array:
    """Return the most that a lane may have dropped, [S]: the last that it kept."""
    kept = levels * LANES
    ends = [values[:, end - LANES : end] for end in range(kept, values.shape[1] + 1, kept)]
    return jnp.max(jnp.stack(ends), axis=(0, 2))
