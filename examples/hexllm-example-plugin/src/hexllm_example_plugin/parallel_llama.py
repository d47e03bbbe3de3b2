"""Parallel Llama: a Llama whose attention and MLP read the same normed input, side by side.

``x + attention(norm(x)) + mlp(norm(x))`` instead of one after the other, as in GPT-J and PaLM; so a
layer has one norm. Everything else is the toolkit's decoder: only the odd block is written here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.model import blocks
from hexllm.model.config import ModelConfig, read_model_config
from hexllm.model.family import DecoderFamily, LayerNorms

if TYPE_CHECKING:
    from collections.abc import Mapping

    import jax

    from hexllm.model.hf_config import HfConfig
    from hexllm.ops.kv_cache import LayerKV
    from hexllm.ops.step import Step


class ParallelLlama(DecoderFamily):
    """The family; its checkpoints have Llama's names, less ``post_attention_layernorm``."""

    name: ClassVar[str] = "parallel_llama"
    norms: ClassVar[LayerNorms] = LayerNorms(before_mlp=None)

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration; a key that is not read here refuses to start."""
        return read_model_config(hf, tie_word_embeddings=False)

    def layer(
        self,
        cfg: ModelConfig,
        i: int,
        p: Mapping[str, Any],
        x: jax.Array,
        kv: LayerKV,
        step: Step,
    ) -> tuple[jax.Array, LayerKV]:
        """Run layer ``i`` on x [T, D]; return [T, D] and the new cache."""
        h = self.norm(cfg, p["input_layernorm"], x)
        options = self.attention_options(cfg, i)
        attended, kv = blocks.attention(p["self_attn"], h, kv, step, **options)
        return x + attended + self.mlp(cfg, i, p, h, step), kv
