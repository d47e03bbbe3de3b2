"""The likeliest tokens of each row on a TPU, in one pass over the logits.

``lax.top_k`` on a TPU takes a pass for each token that it finds: 256 of 32,064 in 64 rows take
1.6 ms of a v5e by its instructions. Here the vocabulary runs by in vectors of 128 lanes, and every
lane keeps the few largest that it has seen, sorted: an insertion without a branch. What many lanes
keep together contains the likeliest tokens of the row unless more than a few of these fall to one
lane; the smallest logit that a lane keeps tells (see ``bound`` in ``sampling_candidates``).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
#: Rows that are computed together: one vector's sublanes.
_ROWS = 8
#: The id of a place in a lane's list that no token took.
NO_TOKEN = 2**30


def lane_lists(
    logits: jax.Array, *, levels: int, segment: int, unroll: int = 8
) -> tuple[jax.Array, jax.Array]:
    """Return what each lane keeps of each segment of the vocabulary.

    Args:
        logits: [S, W] float32.
        levels: How many tokens a lane keeps.
        segment: Tokens of a segment, a multiple of 128; each starts its own lists.
        unroll: Vectors that one turn of the loop takes.

    Returns:
        [S, G * levels * 128] float32 of G segments: the largest of every lane, then the second
        largest, and so on; of equals the lower id first; -inf where a lane had no more. And the
        ids, int32, from 0; ``NO_TOKEN`` where there is none.
    """
    S, W = logits.shape
    segment = min(segment, -(-W // LANES) * LANES)
    G = -(-W // segment)
    rows = min(_ROWS, S)
    kept = levels * LANES
    shape = (S, G * kept)
    values, ids = pl.pallas_call(
        functools.partial(_kernel, levels=levels, width=W, segment=segment, unroll=unroll),
        grid=(-(-S // rows), G),
        in_specs=[pl.BlockSpec((rows, segment), lambda s, g: (s, g))],
        out_specs=[pl.BlockSpec((rows, kept), lambda s, g: (s, g))] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="lane_lists",
    )(logits)
    return values, ids


def _kernel(
    logits: Any, values: Any, ids: Any, *, levels: int, width: int, segment: int, unroll: int
) -> None:
    rows = logits.shape[0]
    start = pl.program_id(1) * segment
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    empty = (
        (jnp.full((rows, LANES), -jnp.inf, jnp.float32),) * levels,
        (jnp.full((rows, LANES), NO_TOKEN, jnp.int32),) * levels,
    )

    def insert(vector: jax.Array, lists: Any) -> Any:
        """Put the tokens of one vector where they belong in the lists of their lanes."""
        kept_values, kept_ids = lists
        at = vector * LANES
        token = start + at + lane
        value = jnp.where(token < width, logits[:, pl.ds(at, LANES)], -jnp.inf)
        # An equal one came earlier and stays ahead. Where one is overtaken, so are all after it.
        is_larger = [value > kept for kept in kept_values]
        new_values, new_ids = [], []
        for level in range(levels):
            comes, coming = value, token
            if level:  # what moves down, where that is overtaken too
                comes = jnp.where(is_larger[level - 1], kept_values[level - 1], value)
                coming = jnp.where(is_larger[level - 1], kept_ids[level - 1], token)
            new_values.append(jnp.where(is_larger[level], comes, kept_values[level]))
            new_ids.append(jnp.where(is_larger[level], coming, kept_ids[level]))
        return tuple(new_values), tuple(new_ids)

    vectors = segment // LANES
    turns = vectors // unroll

    def turn(i: jax.Array, lists: Any) -> Any:
        for j in range(unroll):
            lists = insert(i * unroll + j, lists)
        return lists

    lists = jax.lax.fori_loop(0, turns, turn, empty)
    for vector in range(turns * unroll, vectors):
        lists = insert(jnp.int32(vector), lists)
    for level, (kept, kept_token) in enumerate(zip(*lists, strict=True)):
        at = slice(level * LANES, (level + 1) * LANES)
        values[:, at] = kept
        ids[:, at] = kept_token
