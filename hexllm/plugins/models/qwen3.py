"""Qwen3, the dense models: Qwen2 with normed heads in place of biases.

Reference: transformers ``models/qwen3``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.model import blocks
from hexllm.model.config import ModelConfig, read_model_config
from hexllm.model.family import DecoderFamily
from hexllm.plugins.models.qwen2 import read_qwen_windows

if TYPE_CHECKING:
    from hexllm.model.hf_config import HfConfig
    from hexllm.model.specs import Specs


class Qwen3(DecoderFamily):
    """The Qwen3 family."""

    name: ClassVar[str] = "qwen3"

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration, with the defaults of transformers' Qwen3Config."""
        return read_model_config(
            hf,
            tie_word_embeddings=False,
            windows=read_qwen_windows(hf),
            head_dim=128,
            max_position_embeddings=32_768,
        )

    def attention_specs(self, cfg: ModelConfig, i: int) -> Specs:
        """Return attention's specs, with the norms of heads."""
        norms = {name: self.norm_spec(cfg.head_dim) for name in ("q_norm", "k_norm")}
        return super().attention_specs(cfg, i) | norms

    def attention_options(self, cfg: ModelConfig, i: int) -> dict[str, Any]:
        """Return attention's options: heads are normed before they are turned."""
        norm = blocks.norm_heads(cfg.rms_norm_eps)
        return super().attention_options(cfg, i) | {"before_rope": norm}
