"""Attention over paged keys and values in plain XLA: the oracle's fast twin, and the CPU's path.

Both forms walk the cache in chunks with a running softmax and a trip count that depends on the
lengths in use, so that cost follows the tokens that exist and not the width of the block tables.
A chunk that holds nothing for a sequence leaves its sums bit for bit, so batch neighbours cannot
change a result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from hexllm.ops.platform import platform

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from hexllm.ops.kv_cache import LayerKV
    from hexllm.ops.step import Step


def chunk_tokens(num_seqs: int) -> int:
    """Return how many tokens of each cache a decode looks at together.

    Measured on a CPU, 300 tokens a sequence: a few rows pay for each trip around the loop, many
    rows for tokens past their sequence's end.
    """
    return 256 if num_seqs <= 2 else 64


def tile_tokens(max_query_len: int) -> int:
    """Return how many queries, and how many tokens of the cache, a prefill looks at together."""
    return 256 if max_query_len >= 1024 else min(128, max_query_len)


_MASKED = -1e30  # finite, so that a wholly masked row stays a number


def decode(
    q: jax.Array,
    kv: LayerKV,
    step: Step,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
) -> jax.Array:
    """Attend one token a sequence; arguments and result as ``attend_reference``."""
    S, N, H = q.shape
    K = kv.num_kv_heads
    compute_dtype = _compute_dtype(q.dtype)
    grouped = q.astype(compute_dtype).reshape(S, K, N // K, H).swapaxes(0, 1)  # [K, S, G, H]
    blocks, C, tables = _chunking(kv, step.block_tables, chunk_tokens(S))
    ends = step.seq_lens
    starts = _first_seen(ends - 1, window, chunk)
    # Sequences that hold nothing must not pull the first chunk back to 0.
    first = jnp.min(jnp.where(ends > 0, starts, jnp.iinfo(jnp.int32).max)) // C
    last = (jnp.max(ends) + C - 1) // C

    def body(i: jax.Array, carry: _Sums) -> _Sums:
        part = lax.dynamic_slice(tables, (0, i * blocks), (S, blocks))
        k, v = _gather(kv, part, compute_dtype)  # [K, S, C, H]
        scores = jnp.einsum("ksgh,ksch->ksgc", grouped, k, preferred_element_type=jnp.float32)
        at = (i * C + jnp.arange(C))[None]  # [1, C]
        seen = (at < ends[:, None]) & (at >= starts[:, None])  # [S, C]
        return _accumulate(carry, scores, seen[None, :, None], v, scale, softcap, "ksgc,ksch->ksgh")

    m, total, out = lax.fori_loop(first, last, body, _empty((K, S, N // K), H))
    del m
    return _normalised(total, out).swapaxes(0, 1).reshape(S, N, H).astype(q.dtype)


def ragged(
    q: jax.Array,
    kv: LayerKV,
    step: Step,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
) -> jax.Array:
    """Attend any mix of query lengths; arguments and result as ``attend_reference``.

    Sequences are taken one after another, their queries in tiles, so that the cost is that of the
    tokens present. A tile may run past its sequence: the rows beyond are overwritten by the next.
    """
    T, N, H = q.shape
    K = kv.num_kv_heads
    Q = tile_tokens(step.max_query_len)
    blocks, C, tables = _chunking(kv, step.block_tables, max(Q, 128))
    compute_dtype = q.dtype if Q >= _TILE_OF_NATIVE_PRODUCTS else _compute_dtype(q.dtype)
    padded = jnp.pad(q.astype(compute_dtype), ((0, Q), (0, 0), (0, 0)))

    def tile(s: jax.Array, t: jax.Array, out: jax.Array) -> jax.Array:
        row = step.query_start_loc[s] + t * Q
        context = step.seq_lens[s] - (step.query_start_loc[s + 1] - step.query_start_loc[s])
        at_q = context + t * Q + jnp.arange(Q)  # [Q] positions
        rows = lax.dynamic_slice(padded, (row, 0, 0), (Q, N, H))
        grouped = rows.reshape(Q, K, N // K, H).transpose(1, 2, 0, 3)  # [K, G, Q, H]
        grouped = grouped.reshape(K, N // K * Q, H)
        from_q = _first_seen(at_q, window, chunk)  # [Q]
        low = from_q[0] // C
        high = (jnp.minimum(at_q[-1] + 1, step.seq_lens[s]) + C - 1) // C

        def body(i: jax.Array, carry: _Sums) -> _Sums:
            part = lax.dynamic_slice(tables, (s, i * blocks), (1, blocks))
            k, v = _gather(kv, part, compute_dtype)  # [K, 1, C, H]
            scores = jnp.einsum(
                "kqh,kch->kqc", grouped, k[:, 0], preferred_element_type=jnp.float32
            )
            at = i * C + jnp.arange(C)
            seen = at[None] <= at_q[:, None]  # [Q, C]
            if not (window is None and chunk is None):
                seen &= at[None] >= from_q[:, None]
            seen = jnp.tile(seen, (N // K, 1))[None]  # [1, G * Q, C]
            return _accumulate(carry, scores, seen, v[:, 0], scale, softcap, "kqc,kch->kqh")

        _, total, sums = lax.fori_loop(low, high, body, _empty((K, N // K * Q), H))
        done = _normalised(total, sums).reshape(K, N // K, Q, H).transpose(2, 0, 1, 3)
        return lax.dynamic_update_slice(out, done.reshape(Q, N, H), (row, 0, 0))

    def sequence(s: jax.Array, out: jax.Array) -> jax.Array:
        length = step.query_start_loc[s + 1] - step.query_start_loc[s]
        return lax.fori_loop(0, (length + Q - 1) // Q, lambda t, out: tile(s, t, out), out)

    out = jnp.zeros((T + Q, N, H), jnp.float32)
    return lax.fori_loop(0, step.num_seqs, sequence, out)[:T].astype(q.dtype)


_TILE_OF_NATIVE_PRODUCTS = 64  # from here on a CPU's bfloat16 products beat its float32 ones
_Sums = tuple[jax.Array, jax.Array, jax.Array]  # running maximum, weight total, weighted values


def _compute_dtype(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype of products of few rows: in bfloat16 they are slow on CPUs."""
    return jnp.float32 if platform() == "cpu" else dtype


def _first_seen(positions: jax.Array, window: int | None, chunk: int | None) -> jax.Array:
    """Return the first position that tokens at ``positions`` see; rises with them."""
    first = jnp.zeros_like(positions)
    if window is not None:
        first = jnp.maximum(positions - window + 1, first)
    if chunk is not None:
        first = jnp.maximum(positions // chunk * chunk, first)
    return first


def _chunking(kv: LayerKV, tables: jax.Array, tokens: int) -> tuple[int, int, jax.Array]:
    """Return blocks a chunk, tokens a chunk, and the tables padded to whole chunks."""
    blocks = min(max(1, tokens // kv.block_size), tables.shape[1])
    return blocks, blocks * kv.block_size, jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % blocks)))


def _gather(kv: LayerKV, part: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return keys and values [K, S, C, H] of the blocks ``part`` [S, blocks]."""
    k, v = kv.gather(part)  # [K, S, blocks, P, H]
    K, S, blocks, P, H = k.shape
    return (
        k.reshape(K, S, blocks * P, H).astype(dtype),
        v.reshape(K, S, blocks * P, H).astype(dtype),
    )


def _empty(shape: tuple[int, ...], H: int) -> _Sums:
    return jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, H))


def _accumulate(
    carry: _Sums,
    scores: jax.Array,
    seen: jax.Array,
    v: jax.Array,
    scale: float,
    softcap: float | None,
    product: str,
) -> _Sums:
    """Add one chunk to the running softmax (Milakov and Gimelshein 2018)."""
    m, total, out = carry
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, _MASKED)
    peak = jnp.maximum(m, scores.max(axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0)
    shrink = jnp.exp(m - peak)
    values = jnp.einsum(product, weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return peak, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + values


def _normalised(total: jax.Array, out: jax.Array) -> jax.Array:
    """Divide by the weights; a row that saw nothing (padding) gives zeros."""
    return out / jnp.where(total > 0, total, 1.0)[..., None]
