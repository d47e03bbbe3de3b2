"""The part of the vocabulary that one device looks at, and how devices agree.

Each device reduces the logits it holds to a few numbers a row, and only those travel. Everything
exchanged is a maximum, a whole number or a choice by the lowest token id, none of which depends on
how the vocabulary was dealt out: the same tokens come of every number of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hexllm.ops import platform


@dataclass(frozen=True)
class Vocabulary:
    """V tokens in equal, consecutive parts of ``width``, one a device; seen from one of them.

    Attributes:
        size: V. Ids from V on are padding.
        width: W, the tokens of one part.
        shards: How many parts there are.
        axis: The mesh axis over which they are dealt out; read only if there are several.
    """

    size: int
    width: int
    shards: int = 1
    axis: str = ""

    @property
    def is_padded(self) -> bool:
        """Whether some ids stand for no token."""
        return self.width * self.shards > self.size

    def ids(self) -> jax.Array:
        """Return the ids of this part, [1, W] int32."""
        local = jnp.arange(self.width, dtype=jnp.int32)[None]
        return local + self.first() if self.shards > 1 else local

    def first(self) -> jax.Array:
        """Return the first id of this part, int32."""
        if self.shards == 1:
            return jnp.int32(0)
        return jax.lax.axis_index(self.axis) * jnp.int32(self.width)

    def summed(self, parts: jax.Array) -> jax.Array:
        """Return the sum over all parts."""
        return jax.lax.psum(parts, self.axis) if self.shards > 1 else parts

    def largest(self, parts: jax.Array) -> jax.Array:
        """Return the maximum over all parts."""
        return jax.lax.pmax(parts, self.axis) if self.shards > 1 else parts

    def joined(self, parts: jax.Array) -> jax.Array:
        """Return all parts [S, M] side by side, in the order of their ids."""
        if self.shards == 1:
            return parts
        return jax.lax.all_gather(parts, self.axis, axis=1, tiled=True)

    def at(self, logits: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return each row's logit of one token.

        Args:
            logits: [S, W] float32, of this part.
            tokens: [S] int32, of any part.

        Returns:
            [S] float32.
        """
        local = tokens - self.first()
        inside = (local >= 0) & (local < self.width)
        at = jnp.clip(local, 0, self.width - 1)[:, None]
        own = jnp.take_along_axis(logits, at, axis=1)[:, 0]
        return own if self.shards == 1 else self.summed(jnp.where(inside, own, 0.0))

    def best(self, scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the token that scores most in each row, the lowest id of equals.

        Args:
            scores: [S, M] float32, of some tokens of this part.
            ids: [S, M] or [1, M] int32, theirs.

        Returns:
            [S] int32, where a row has a NaN any token; and [S] float32, the score.
        """
        # XLA's CPU back end does not vectorize a reduction of pairs; TPUs save a pass by it.
        reduce = best_in_one_pass if platform.platform() == "tpu" else best_in_two_passes
        token, peak = reduce(scores, jnp.broadcast_to(ids, scores.shape), self.size - 1)
        if self.shards == 1:
            return token, peak
        # One exchange of both, as integers, whose bits nothing rounds.
        bits = jax.lax.bitcast_convert_type(peak, jnp.int32)
        pairs = jax.lax.all_gather(jnp.stack([bits, token]), self.axis)
        peaks = jax.lax.bitcast_convert_type(pairs[:, 0], jnp.float32)
        peak = jnp.max(peaks, axis=0)
        return jnp.min(jnp.where(peaks == peak, pairs[:, 1], self.size - 1), axis=0), peak


def best_in_two_passes(scores: jax.Array, ids: jax.Array, last: int) -> tuple[jax.Array, jax.Array]:
    """Return each row's best token and score: a maximum, then who has it.

    Args:
        scores: [S, M] float32.
        ids: [S, M] int32.
        last: The id that is returned of a row with a NaN.

    Returns:
        [S] int32, the lowest id of equals, and [S] float32.
    """
    peak = jnp.max(scores, axis=1, keepdims=True)
    return jnp.min(jnp.where(scores == peak, ids, last), axis=1), peak[:, 0]


def best_in_one_pass(scores: jax.Array, ids: jax.Array, last: int) -> tuple[jax.Array, jax.Array]:
    """Return the same by a reduction of pairs; of a row with a NaN, any id up to ``last``."""

    def better(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
        is_first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(is_first, a[0], b[0]), jnp.where(is_first, a[1], b[1])

    none = (jnp.float32(-jnp.inf), jnp.int32(last))
    peak, token = jax.lax.reduce((scores, ids), none, better, (1,))
    return jnp.minimum(token, last), peak
