"""The one layout of a step: prefill, decode and mixed batches alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import struct

if TYPE_CHECKING:
    import jax


@struct.dataclass
class Step:
    """What attention and the layers need to know of the T tokens of a step.

    Sequences lie one after another along T; padding tokens come last, padding sequences have
    ``seq_lens`` 0 and an empty token range.

    Attributes:
        positions: [T] int32, each token's position in its sequence; 0 for padding.
        slot_mapping: [T] int32, the KV slot (block × block size + offset) each token is written
            to; padding has an index out of the pool's range and is dropped.
        block_tables: [S, B] int32, the blocks of each sequence; unused entries are 0.
        seq_lens: [S] int32, tokens in the cache after this step (context + new); 0 for padding.
        query_start_loc: [S + 1] int32, where each sequence's new tokens start along T.
        num_seqs: [] int32, sequences that are not padding.
        logits_indices: [S] int32, the token along T whose logits each sequence samples from.
        lora_slots: [T] int32, the adapter slot of each token; 0 is none.
        max_query_len: Static. No sequence has more new tokens than this; 1 means that every
            sequence has exactly one, token i belonging to sequence i (decode).
    """

    positions: jax.Array
    slot_mapping: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    num_seqs: jax.Array
    logits_indices: jax.Array
    lora_slots: jax.Array
    max_query_len: int = struct.field(pytree_node=False)
