"""Builds steps by hand and drives a family with them, as the engine would."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hexllm.ops import kv_cache
from hexllm.ops.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_SIZE = 4
BUCKET = (48, 6)


def build_step(
    chunks: list[tuple[int, int]],
    block_tables: list[list[int]],
    num_slots: int,
    *,
    pad_tokens: int = 0,
    pad_seqs: int = 0,
    is_decode: bool = False,
) -> Step:
    """Return a step of (context, new) token counts, one pair a sequence, padding last."""
    S = len(chunks) + pad_seqs
    T = sum(new for _, new in chunks) + pad_tokens
    B = max([len(table) for table in block_tables] + [1])
    positions = np.zeros(T, np.int32)
    slots = np.full(T, num_slots, np.int32)  # out of range: dropped
    tables = np.zeros((S, B), np.int32)
    seq_lens = np.zeros(S, np.int32)
    starts = np.zeros(S + 1, np.int32)
    last = np.zeros(S, np.int32)
    at = 0
    for i, ((context, new), table) in enumerate(zip(chunks, block_tables, strict=True)):
        tables[i, : len(table)] = table
        for j in range(new):
            position = context + j
            positions[at] = position
            slots[at] = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            at += 1
        seq_lens[i] = context + new
        starts[i + 1] = at
        last[i] = at - 1
    starts[len(chunks) + 1 :] = at
    longest = 1 if is_decode else max(T, 1)
    return Step(
        positions=jnp.asarray(positions),
        slot_mapping=jnp.asarray(slots),
        block_tables=jnp.asarray(tables),
        seq_lens=jnp.asarray(seq_lens),
        query_start_loc=jnp.asarray(starts),
        num_seqs=jnp.asarray(len(chunks), jnp.int32),
        logits_indices=jnp.asarray(last),
        lora_slots=jnp.zeros(T, jnp.int32),
        max_query_len=longest,
    )


def bare_step(positions: np.ndarray, seq_lens: list[int], query_start_loc: list[int]) -> Step:
    """Return a step that has only what rotary embeddings look at."""
    S = len(seq_lens)
    T = len(positions)
    return Step(
        positions=jnp.asarray(positions, jnp.int32),
        slot_mapping=jnp.zeros(T, jnp.int32),
        block_tables=jnp.zeros((S, 1), jnp.int32),
        seq_lens=jnp.asarray(seq_lens, jnp.int32),
        query_start_loc=jnp.asarray(query_start_loc, jnp.int32),
        num_seqs=jnp.asarray(S, jnp.int32),
        logits_indices=jnp.zeros(S, jnp.int32),
        lora_slots=jnp.zeros(T, jnp.int32),
        max_query_len=T,
    )


@partial(jax.jit, static_argnums=(0, 1))
def _forward(family: Any, cfg: Any, params: Any, tokens: Any, kv: Any, step: Step) -> Any:
    hidden, kv = family.forward(cfg, params, tokens, kv, step)
    return family.logits(cfg, params, hidden), hidden, kv


def num_programs() -> int:
    """Return how many programs drivers have compiled so far in this process."""
    program: Any = _forward  # what jax.jit's stubs do not tell
    return int(program._cache_size())


@contextmanager
def quick_compiles() -> Iterator[None]:
    """Leave most optimizations out meanwhile: small programs that run a few times only."""
    before = jax.config.read("jax_disable_most_optimizations")  # type: ignore[no-untyped-call]
    jax.config.update("jax_disable_most_optimizations", True)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)  # type: ignore[no-untyped-call]


@dataclass
class Driver:
    """Feeds sequences to a model in whatever pieces a test asks for, and keeps all logits."""

    family: Any
    cfg: Any
    params: Any
    num_seqs: int
    max_len: int = 64
    dtype: Any = jnp.float32
    seed: int = 0
    kv: Any = None
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        per_seq = -(-self.max_len // BLOCK_SIZE)
        # Blocks are dealt out at random, so that a test notices a table that is not followed.
        # As many for any number of sequences, so that all of them share a compiled program.
        order = np.random.default_rng(self.seed).permutation(BUCKET[1] * per_seq + 3)
        self.tables = [
            [int(b) for b in order[i * per_seq : (i + 1) * per_seq]] for i in range(self.num_seqs)
        ]
        self.num_blocks = len(order)
        specs = [self.family.kv_spec(self.cfg, i) for i in range(self.cfg.num_hidden_layers)]
        # Garbage in unused blocks must not matter.
        self.kv = tuple(
            jax.tree.map(
                lambda pool: pool + jnp.asarray(7, pool.dtype),
                kv_cache.allocate(
                    self.num_blocks, BLOCK_SIZE, s.num_kv_heads, s.head_dim, self.dtype
                ),
            )
            for s in specs
        )
        self.lengths = [0] * self.num_seqs

    def feed(
        self, pieces: dict[int, list[int]], *, pad_to: tuple[int, int] | None = BUCKET
    ) -> dict[int, np.ndarray]:
        """Run one step over new tokens by sequence; return each one's logits [new, V].

        Padded to (T, S), so that few shapes compile; a step of one token each is not padded.
        """
        seqs = list(pieces)
        chunks = [(self.lengths[i], len(pieces[i])) for i in seqs]
        new_tokens = sum(new for _, new in chunks)
        is_decode = all(new == 1 for _, new in chunks)
        pad_tokens = pad_seqs = 0
        if pad_to is not None and not is_decode:
            pad_tokens, pad_seqs = max(0, pad_to[0] - new_tokens), pad_to[1] - len(seqs)
        step = build_step(
            chunks,
            [self.tables[i] for i in seqs],
            self.num_blocks * BLOCK_SIZE,
            pad_tokens=pad_tokens,
            pad_seqs=pad_seqs,
            is_decode=is_decode,
        )
        tokens = [t for i in seqs for t in pieces[i]] + [0] * pad_tokens
        logits, self.hidden, self.kv = _forward(
            self.family, self.cfg, self.params, jnp.asarray(tokens, jnp.int32), self.kv, step
        )
        out = {}
        at = 0
        for i in seqs:
            self.lengths[i] += len(pieces[i])
            out[i] = np.asarray(logits[at : at + len(pieces[i])])
            at += len(pieces[i])
        return out
