"""Sampling in the plainest form: sorted, a row at a time, in float64. The oracle of the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

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
