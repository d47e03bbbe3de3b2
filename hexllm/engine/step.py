"""Lays a plan out as the padded arrays of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hexllm.ops.sampling import SamplingRows, rows_from_params
from hexllm.ops.step import Step

if TYPE_CHECKING:
    from hexllm.engine.buckets import Buckets, StepShape
    from hexllm.engine.scheduler import Plan


class StepInputs(NamedTuple):
    """What the programs of one step take.

    Attributes:
        tokens: [T] int32. A negative one, -1 - slot, is the last token sampled for that slot: the
            step before may still be computing it, so it never passes the host.
        step: The batch.
        rows: How its S sequences are sampled.
        slots: [S] int32, where the table of last tokens takes each sequence's token; padding, and
            a piece with more to come, has an index past its end and is dropped.
    """

    tokens: np.ndarray
    step: Step
    rows: SamplingRows
    slots: np.ndarray


def shape_of(plan: Plan, buckets: Buckets) -> StepShape:
    """Return the smallest shape that holds ``plan``."""
    if plan.phase == "decode":
        return buckets.decode(len(plan.works), max(len(w.request.blocks) for w in plan.works))
    return buckets.prefill(sum(work.length for work in plan.works), len(plan.works))


def build(
    plan: Plan, shape: StepShape, *, block_size: int, num_blocks: int, num_slots: int
) -> StepInputs:
    """Return a step's inputs as numpy arrays.

    Args:
        plan: The step's sequences.
        shape: Its padded sizes, from ``shape_of``.
        block_size: P.
        num_blocks: Blocks of the pool; padding tokens are written past its end, that is nowhere.
        num_slots: Rows of the table of last tokens; padding sequences write past its end.
    """
    # numpy's arrays stand in for JAX's all through: a compiled call takes both.
    T, S, B = shape.tokens, shape.seqs, shape.blocks
    tokens: Any = np.zeros(T, np.int32)
    positions: Any = np.zeros(T, np.int32)
    slot_mapping: Any = np.full(T, num_blocks * block_size, np.int32)
    block_tables: Any = np.zeros((S, B), np.int32)
    seq_lens: Any = np.zeros(S, np.int32)
    query_start_loc: Any = np.zeros(S + 1, np.int32)
    logits_indices: Any = np.zeros(S, np.int32)
    lora_slots: Any = np.zeros(T, np.int32)
    slots: Any = np.full(S, num_slots, np.int32)
    num_seqs: Any = np.asarray(len(plan.works), np.int32)
    at = 0
    for s, work in enumerate(plan.works):
        request, start, end = work.request, work.start, work.start + work.length
        blocks = np.asarray(request.blocks, np.int32)
        block_tables[s, : len(blocks)] = blocks
        span = slice(at, at + work.length)
        at += work.length
        known = request.tokens[start:end]
        tokens[span] = known if known else -1 - request.slot  # type: ignore[operator]
        if work.is_last:
            slots[s] = request.slot
        where = np.arange(start, end, dtype=np.int32)
        positions[span] = where
        slot_mapping[span] = blocks[where // block_size] * block_size + where % block_size
        seq_lens[s] = end
        query_start_loc[s + 1] = at
        logits_indices[s] = at - 1
    query_start_loc[len(plan.works) + 1 :] = at
    step = Step(
        positions=positions,
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        num_seqs=num_seqs,
        logits_indices=logits_indices,
        lora_slots=lora_slots,
        max_query_len=shape.max_query_len,
    )
    rows = rows_from_params(
        [work.request.sampling for work in plan.works],
        [work.start + work.length for work in plan.works],  # the position the new token will have
        S,
    )
    return StepInputs(tokens, step, rows, slots)
