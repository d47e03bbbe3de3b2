"""Gumbel noise a token at a time: what a token gets depends on its row's key and its id alone.

``jax.random`` fills whole arrays. Sampling wants the noise of a few candidates in one step and of
the whole vocabulary in another, the same bits in both, so the counter is the token id here. The
bits are those of ``jax.random.bits(key, (V,))``, which the tests hold them to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def row_keys(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """Return each row's threefry key, folded from its seed and position.

    Args:
        seeds: [S] uint32.
        positions: [S] int32.

    Returns:
        [S, 2] uint32.
    """

    def fold(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    return jax.vmap(fold)(seeds, positions)


def random_bits(keys: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return 32 random bits for each token.

    Threefry-2x32 with 20 rounds (Salmon et al., 2011), written out so that XLA fuses it with what
    uses the bits.

    Args:
        keys: [S, 2] uint32.
        token_ids: [S, M] or [1, M] int32.

    Returns:
        [S, M] uint32.
    """
    k0, k1 = keys[:, :1], keys[:, 1:]
    schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(_PARITY))
    x0 = jnp.broadcast_to(k0, (keys.shape[0], token_ids.shape[1]))  # the counter's high word is 0
    x1 = token_ids.astype(jnp.uint32) + k1
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << distance) | (x1 >> (32 - distance))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0 ^ x1


def gumbel_noise(keys: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return standard Gumbel noise for each token.

    The uniform number is taken near 0, where float32 is fine, so that a token of probability 1e-9
    is still drawn about as often as it should be.

    Args:
        keys: [S, 2] uint32.
        token_ids: [S, M] or [1, M] int32.

    Returns:
        [S, M] float32, finite.
    """
    bits = random_bits(keys, token_ids).astype(jnp.float32)
    uniform = jnp.clip(bits * 2.0**-32, 2.0**-33, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
