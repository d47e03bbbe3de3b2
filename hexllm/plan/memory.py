"""What a model takes of memory, computed from its specs: weights by number format, and KV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hexllm.model.loading import param_specs
from hexllm.model.specs import LinearSpec, flatten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hexllm.model.config import ModelConfig
    from hexllm.model.family import DecoderFamily

GIB = 1 << 30

#: Values of a weight that share a scale (2 bytes) and a zero point (half a byte) in AWQ's int4.
INT4_GROUP = 128

#: Bits of one value of a quantized linear, by what people call the format.
BITS = {"float32": 32, "bf16": 16, "int8": 8, "int4": 4}


def count_parameters(family: DecoderFamily, cfg: ModelConfig) -> int:
    """Return how many numbers a model's checkpoint holds."""
    return sum(math.prod(spec.shape) for spec in flatten(param_specs(family, cfg)).values())


def weight_bytes(family: DecoderFamily, cfg: ModelConfig, kind: str) -> float:
    """Return the bytes of a model's weights, over all chips.

    Of the quantized formats int8 has a scale for each row, int4 (AWQ) a scale and a zero point for
    ``INT4_GROUP`` values; embeddings, heads, norms and routers stay in bfloat16.

    Args:
        family: The model's.
        cfg: The model.
        kind: One of ``BITS``.
    """
    if kind == "float32":
        return 2 * weight_bytes(family, cfg, "bf16")
    total = 0.0
    for path, spec in flatten(family.specs(cfg)).items():
        if not isinstance(spec, LinearSpec):
            total += 2 * math.prod(spec.shape)
            continue
        rows = spec.out_features * (spec.num_experts or 1)
        values = rows * spec.in_features
        is_whole = path == "lm_head" or spec.out_dtype is not None
        if kind == "bf16" or is_whole:
            total += 2 * values
        elif kind == "int8":
            total += values + 2 * rows
        else:
            total += values / 2 + 2.5 * values / INT4_GROUP
        total += 2 * rows if spec.bias else 0
    return total


def linears(family: DecoderFamily, cfg: ModelConfig) -> Iterator[tuple[str, LinearSpec]]:
    """Go through the products of one token with the weights, but for those of a tied head."""
    for path, spec in flatten(family.specs(cfg)).items():
        if isinstance(spec, LinearSpec):
            yield path, spec


def kv_bytes(family: DecoderFamily, cfg: ModelConfig, seqs: int, length: int) -> int:
    """Return the bytes of the bfloat16 KV cache of sequences of ``length`` tokens, over all chips.

    Every layer keeps all tokens, whatever its window.
    """
    specs = [family.kv_spec(cfg, i) for i in range(cfg.num_hidden_layers)]
    return sum(2 * 2 * s.num_kv_heads * s.head_dim * seqs * length for s in specs)


def kv_copies(N: int, K: int, count: int) -> int | None:
    """Return how often each KV head is kept so that ``count`` chips have as many; None if never."""
    return None if N % count else math.lcm(K, count) // K


def blocks_for(tokens: int, block_size: int) -> int:
    """Return how many KV blocks a sequence of so many tokens takes."""
    return -(-tokens // block_size)
