"""What no program for a step can be faster than: the bytes it must read, the products it must do.

Everything here is computed from the model's shapes, not from a compiled program, and is what one
device moves and multiplies. Weights are read once; of experts those that are expected to be picked
by some token, if each token's choice is as likely as any other; of embeddings that are no head at
the same time, nothing. Of the KV cache each sequence's tokens that a layer's window or chunk shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from hexllm.model.loading import param_specs
from hexllm.model.sharding import spec_sharding
from hexllm.model.specs import LinearSpec, flatten

if TYPE_CHECKING:
    from hexllm.engine.programs import Programs
    from hexllm.model.config import KVSpec
    from hexllm.plan.chips import Chip

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Work:
    """What a step must do on each device.

    Attributes:
        weight_bytes: Of weights that are read.
        kv_bytes: Of keys and values that are read.
        flops: Of its products.
        attention_flops: Of these, those of queries with keys, and of scores with values.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float
    attention_flops: float

    @property
    def hbm_bytes(self) -> float:
        """All that is read."""
        return self.weight_bytes + self.kv_bytes

    def memory_us(self, chip: Chip) -> float:
        """Return the microseconds that reading takes at the datasheet's bandwidth."""
        return self.hbm_bytes / chip.hbm_bytes_per_s * 1e6

    def compute_us(self, chip: Chip) -> float:
        """Return the microseconds that the products take at the datasheet's peak."""
        return self.flops / chip.peak_flops * 1e6

    def floor_us(self, chip: Chip) -> float:
        """Return the larger of the two."""
        return max(self.memory_us(chip), self.compute_us(chip))


def decode_work(programs: Programs, seqs: int, context: int) -> Work:
    """Return the work of a decode step.

    Args:
        programs: Of the model on its mesh.
        seqs: Sequences, each of which gets a token.
        context: Tokens of each, with the one that is computed.
    """
    pairs = seqs * sum(visible(spec, context) for spec in kv_specs(programs))
    kv = seqs * sum(layer_kv_bytes(programs, context))
    return _work(programs, tokens=seqs, heads=seqs, pairs=pairs, kv_bytes=kv)


def prefill_work(programs: Programs, tokens: int) -> Work:
    """Return the work of a step that computes one prompt of ``tokens`` tokens.

    Its keys and values count as read once, though they are the step's own.
    """
    pairs = sum(_pairs(spec, tokens) for spec in kv_specs(programs))
    kv = sum(layer_kv_bytes(programs, tokens, only_visible=False))
    return _work(programs, tokens=tokens, heads=1, pairs=pairs, kv_bytes=kv)


def layer_kv_bytes(programs: Programs, context: int, *, only_visible: bool = True) -> list[float]:
    """Return the bytes of each layer's cache, on one device, of a sequence.

    Args:
        programs: Of the model on its mesh.
        context: Tokens of the sequence.
        only_visible: Whether to count only what the last of them sees.
    """
    found = []
    for layer, spec in zip(programs.kv_shapes(1), kv_specs(programs), strict=True):
        block = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(layer)
        )
        tokens = visible(spec, context) if only_visible else context
        found.append(block / programs.block_size * tokens)
    return found


def _work(programs: Programs, *, tokens: int, heads: int, pairs: float, kv_bytes: float) -> Work:
    """Put a step's work together.

    Args:
        programs: Of the model on its mesh.
        tokens: T.
        heads: Tokens whose logits are computed.
        pairs: Of a query and a key that it sees, over all layers.
        kv_bytes: Bytes of one device's cache that are read.
    """
    cfg, size = programs.cfg, programs.mesh.size
    attention = 4.0 * cfg.num_attention_heads * cfg.head_dim * pairs
    products = 2.0 * _multiplications(programs, tokens, heads)
    return Work(
        weight_bytes=_weight_bytes(programs, tokens),
        kv_bytes=kv_bytes,
        flops=(attention + products) / size,
        attention_flops=attention / size,
    )


def kv_specs(programs: Programs) -> list[KVSpec]:
    """Return what each layer keeps in the cache."""
    cfg = programs.cfg
    return [programs.family.kv_spec(cfg, i) for i in range(cfg.num_hidden_layers)]


def _weight_bytes(programs: Programs, tokens: int) -> float:
    """Return the bytes of one device's weights that a step of so many tokens reads."""
    total = 0.0
    is_tied = programs.cfg.tie_word_embeddings
    for path, spec in flatten(param_specs(programs.family, programs.cfg)).items():
        if path == _EMBEDDING and not is_tied:
            continue
        held = spec_sharding(path, spec, programs.mesh).shard_shape(spec.shape)
        itemsize = jnp.dtype(spec.dtype or programs.dtype).itemsize
        read = _touched(programs, spec.shape[0], tokens) if "expert" in spec.axes else 1.0
        total += math.prod(held) * itemsize * read
    return total


def _multiplications(programs: Programs, tokens: int, heads: int) -> float:
    """Return how many multiplications the products of a step with weights are, on all devices."""
    cfg = programs.cfg
    total = 0.0
    for path, spec in flatten(programs.family.specs(cfg)).items():
        if not isinstance(spec, LinearSpec):
            continue
        rows = heads if path == "lm_head" else tokens
        if spec.num_experts:
            rows *= _per_token(programs)
        total += float(spec.in_features) * spec.out_features * rows
    if cfg.tie_word_embeddings:
        total += float(cfg.vocab_size) * cfg.hidden_size * heads
    return total


def _per_token(programs: Programs) -> int:
    """Return how many experts a token passes."""
    return int(getattr(programs.cfg, "num_experts_per_tok", 1))


def _touched(programs: Programs, experts: int, tokens: int) -> float:
    """Return the share of experts that at least one of ``tokens`` tokens is expected to pick."""
    missed: float = (1 - _per_token(programs) / experts) ** tokens
    return 1 - missed


def visible(spec: KVSpec, context: int) -> int:
    """Return how many tokens the last of ``context`` ones sees in a layer, itself with them."""
    seen = context
    if spec.window is not None:
        seen = min(seen, spec.window)
    if spec.chunk is not None:
        seen = min(seen, (context - 1) % spec.chunk + 1)
    return seen


def _pairs(spec: KVSpec, tokens: int) -> float:
    """Return how many pairs of a query and a key that it sees a prompt has in a layer."""
    if spec.chunk is not None and spec.chunk < tokens:
        whole, rest = divmod(tokens, spec.chunk)
        return whole * _triangle(spec.chunk) + _triangle(rest)
    if spec.window is not None and spec.window < tokens:
        return _triangle(spec.window) + float(tokens - spec.window) * spec.window
    return _triangle(tokens)


def _triangle(n: int) -> float:
    return n * (n + 1) / 2
