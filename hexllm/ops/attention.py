"""Ragged paged attention: the public front and the plain reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from hexllm.ops import attention_xla

if TYPE_CHECKING:
    from hexllm.ops.kv_cache import LayerKV
    from hexllm.ops.step import Step


def attend_reference(
    q: jax.Array,
    kv: LayerKV,
    step: Step,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
) -> jax.Array:
    """Attend each token to its own sequence's cache, in the plainest form; the oracle.

    Args:
        q: [T, N, H].
        kv: The cache with this step's keys and values written.
        step: The batch.
        scale: Factor on the scores.
        window: A token sees itself and the ``window - 1`` tokens before it; None sees all.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        chunk: Positions are cut into chunks of so many tokens, and a token sees its own only.

    Returns:
        [T, N, H] in q's dtype; padding tokens hold zeros.
    """
    T, N, H = q.shape
    P, K = kv.block_size, kv.num_kv_heads
    B = step.block_tables.shape[1]
    token = jnp.arange(T)
    seq = jnp.searchsorted(step.query_start_loc[1:], token, side="right")  # [T]
    valid = token < step.query_start_loc[-1]
    tables = step.block_tables[jnp.minimum(seq, step.block_tables.shape[0] - 1)]  # [T, B]
    k, v = (x.reshape(K, T, B * P, H).astype(jnp.float32) for x in kv.gather(tables))
    grouped = q.reshape(T, K, N // K, H).astype(jnp.float32)
    scores = jnp.einsum("tkgh,ktch->tkgc", grouped, k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    at = jnp.arange(B * P)
    seen = at[None] <= step.positions[:, None]  # [T, B * P]
    if window is not None:
        seen &= at[None] > step.positions[:, None] - window
    if chunk is not None:
        seen &= at[None] // chunk == step.positions[:, None] // chunk
    scores = jnp.where(seen[:, None, None], scores, -math.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("tkgc,ktch->tkgh", weights, v, precision="highest").reshape(T, N, H)
    return jnp.where(valid[:, None, None], out, 0).astype(q.dtype)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: LayerKV,
    step: Step,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, LayerKV]:
    """Write the step's keys and values into the cache and attend to it.

    Args:
        q: [T, N, H].
        k: [T, K, H].
        v: [T, K, H].
        kv: This layer's cache.
        step: The batch.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.
        window: A token sees itself and the ``window - 1`` tokens before it; None sees all.
        softcap: Gemma-2's cap on the scores; None for none.
        chunk: Llama-4's local attention: positions are cut into chunks of so many tokens, and a
            token sees those of its own up to itself; None for none.

    Returns:
        [T, N, H] in q's dtype (what padding tokens hold is not specified), and the new cache.
    """
    kv = kv.write(k, v, step.slot_mapping)
    form = attention_xla.decode if step.max_query_len == 1 else attention_xla.ragged
    return form(q, kv, step, scale=scale, window=window, softcap=softcap, chunk=chunk), kv
