"""Sampling in the plainest form: sorted, a row at a time, in float64. The oracle of the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from hexllm.ops.sampling_pallas_tpu import LANES, NO_TOKEN

if TYPE_CHECKING:
    from hexllm.ops.sampling import SamplingRows


def keep_reference(
    logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Return which tokens of one row are left, ties at an edge included.

    Args:
        logits: [V].
        temperature: Of the distribution that the masks look at; 1 in Hex-LLM's order.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.

    Returns:
        [V] bool.
    """
    logits = np.asarray(logits, np.float64)
    keep = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        keep = logits >= np.sort(logits)[::-1][top_k - 1]
    weights = np.exp((logits - logits.max()) / temperature)
    if top_p < 1:
        left = np.where(keep, weights, 0)
        order = np.argsort(-logits, kind="stable")
        held = np.cumsum(left[order]) / left.sum()
        last = min(int(np.searchsorted(held, top_p)), len(logits) - 1)
        keep &= logits >= logits[order[last]]
    return np.asarray(keep & (weights >= min_p))


def noise_reference(seed: int, position: int, V: int) -> np.ndarray:
    """Return the Gumbel noise of a row, from ``jax.random``'s bits for its key.

    Args:
        seed: Of the row.
        position: Of the token being sampled.
        V: How many tokens.

    Returns:
        [V] float64.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    bits = np.asarray(jax.random.bits(key, (V,))).astype(np.float32)  # which rounds, as in the op
    uniform = np.clip(bits.astype(np.float64) * 2.0**-32, 2.0**-33, 1 - 2.0**-24)
    return -np.log(-np.log1p(-uniform))


def sample_reference(logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
    """Return each row's next token.

    Args:
        logits: [S, V], without +inf.
        rows: Of S rows, numpy arrays.

    Returns:
        [S] int32.
    """
    S, V = logits.shape
    tokens = np.empty(S, np.int32)
    for i in range(S):
        temperature, top_k = float(rows.temperature[i]), int(rows.top_k[i])
        if temperature == 0 or top_k == 1:
            tokens[i] = np.argmax(logits[i])
            continue
        keep = keep_reference(
            logits[i],
            temperature=1.0 if rows.mask_unscaled[i] else temperature,
            top_k=top_k,
            top_p=float(rows.top_p[i]),
            min_p=float(rows.min_p[i]),
        )
        row = np.asarray(logits[i], np.float64)
        scores = (row - row.max()) / temperature
        scores += noise_reference(int(rows.seed[i]), int(rows.position[i]), V)
        tokens[i] = np.argmax(np.where(keep, scores, -np.inf))
    return tokens


def lane_lists_reference(
    logits: jax.Array, *, levels: int, segment: int
) -> tuple[jax.Array, jax.Array]:
    """Return what each lane keeps, as ``sampling_pallas_tpu.lane_lists`` does, by sorting lanes.

    Args:
        logits: [S, W] float32 without NaN.
        levels: How many tokens a lane keeps.
        segment: Tokens of a segment, a multiple of 128.

    Returns:
        [S, G * levels * 128] float32 and ids, int32.
    """
    S, W = logits.shape
    segment = min(segment, -(-W // LANES) * LANES)
    G = -(-W // segment)
    padding = ((0, 0), (0, G * segment - W))
    ids = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (S, W))
    ids = jnp.where(jnp.isneginf(logits), NO_TOKEN, ids)
    values = jnp.pad(logits, padding, constant_values=-jnp.inf)
    ids = jnp.pad(ids, padding, constant_values=NO_TOKEN)
    lanes = (S, G, -1, LANES)
    descending = -jnp.where(values == 0, 0.0, values).reshape(lanes)
    order = jax.lax.sort((descending, ids.reshape(lanes)), dimension=2, num_keys=2)
    values, ids = -order[0][:, :, :levels], order[1][:, :, :levels]
    missing = ((0, 0), (0, 0), (0, levels - values.shape[2]), (0, 0))
    values = jnp.pad(values, missing, constant_values=-jnp.inf)
    ids = jnp.pad(ids, missing, constant_values=NO_TOKEN)
    return values.reshape(S, -1), ids.reshape(S, -1)
