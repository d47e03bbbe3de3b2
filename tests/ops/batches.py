"""Random ragged batches over a paged cache, for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from hexllm.ops import kv_cache
from hexllm.ops.kv_cache import PlainKV
from hexllm.ops.step import Step


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch's heads and blocks."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8


def tiled(kv, dtype=None, scales=None):
    """Return a PlainKV's keys and values as a TiledKV."""
    K, blocks, P, H = kv.k.shape
    empty = kv_cache.allocate(blocks, P, K, H, dtype or kv.k.dtype, is_tiled=True, scales=scales)
    slots = jnp.arange(blocks * P)
    k, v = (x.transpose(1, 2, 0, 3).reshape(blocks * P, K, H) for x in (kv.k, kv.v))
    return empty.write(k, v, slots)


def make_batch(rng, shape, sequences, *, pad_tokens=0, pad_seqs=0, pad_blocks=0):
    """Return (q, k, v, kv, step) for ``sequences`` of (context, new) lengths.

    Blocks of the sequences are interleaved at random in a pool that also holds rubbish.
    """
    T = sum(new for _, new in sequences)
    S = len(sequences)
    P = shape.block_size
    counts = [-(-(context + new) // P) for context, new in sequences]
    pool = rng.permutation(sum(counts) + 3)
    tables = np.zeros((S + pad_seqs, max(counts) + pad_blocks), np.int32)
    positions, slots, starts, used = [], [], [0], 0
    num_slots = len(pool) * P
    is_decode = all(new == 1 for _, new in sequences) and pad_tokens == pad_seqs
    for s, (context, new) in enumerate(sequences):
        blocks = pool[used : used + counts[s]]
        used += counts[s]
        tables[s, : counts[s]] = blocks
        at = np.arange(context, context + new)
        positions.extend(at)
        slots.extend(blocks[at // P] * P + at % P)
        starts.append(starts[-1] + new)
    starts += [starts[-1]] * pad_seqs
    step = Step(
        positions=jnp.asarray(positions + [0] * pad_tokens, jnp.int32),
        slot_mapping=jnp.asarray(slots + [num_slots] * pad_tokens, jnp.int32),
        block_tables=jnp.asarray(tables),
        seq_lens=jnp.asarray([c + n for c, n in sequences] + [0] * pad_seqs, jnp.int32),
        query_start_loc=jnp.asarray(starts, jnp.int32),
        num_seqs=jnp.asarray(S, jnp.int32),
        logits_indices=jnp.asarray([e - 1 for e in starts[1 : S + 1]] + [0] * pad_seqs, jnp.int32),
        lora_slots=jnp.zeros(T + pad_tokens, jnp.int32),
        max_query_len=1 if is_decode else max(T, 2),
    )

    def draw(*dims):
        return jnp.asarray(rng.standard_normal(dims), jnp.float32)

    K, H = shape.num_kv_heads, shape.head_dim
    kv = PlainKV(k=draw(K, len(pool), P, H), v=draw(K, len(pool), P, H))
    T += pad_tokens
    return draw(T, shape.num_heads, H), draw(T, K, H), draw(T, K, H), kv, step
