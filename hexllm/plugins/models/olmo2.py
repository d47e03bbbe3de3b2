"""OLMo-2 1B to 32B.

Reference: transformers ``models/olmo2``. Norms stand after attention and MLP instead of before, and
all heads of a token's queries, and of its keys, are normed together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.model import blocks
from hexllm.model.config import ModelConfig, read_model_config
from hexllm.model.family import DecoderFamily, LayerNorms
from hexllm.model.specs import ParamSpec

if TYPE_CHECKING:
    from hexllm.model.hf_config import HfConfig
    from hexllm.model.specs import Specs


class Olmo2(DecoderFamily):
    """The OLMo-2 family."""

    name: ClassVar[str] = "olmo2"
    norms: ClassVar[LayerNorms] = LayerNorms(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    )

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration, with the defaults of transformers' Olmo2Config."""
        return read_model_config(hf, tie_word_embeddings=False, rms_norm_eps=1e-5)

    def attention_specs(self, cfg: ModelConfig, i: int) -> Specs:
        """Return attention's specs, with a norm over all queries and one over all keys."""
        N, K, H = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        norms = {
            "q_norm": {"weight": ParamSpec((N * H,), ("heads",), init="ones")},
            "k_norm": {"weight": ParamSpec((K * H,), ("kv_heads",), init="ones")},
        }
        return super().attention_specs(cfg, i) | norms

    def attention_options(self, cfg: ModelConfig, i: int) -> dict[str, Any]:
        """Return attention's options: queries and keys are normed before they are turned."""
        norm = blocks.norm_projections(cfg.rms_norm_eps)
        return super().attention_options(cfg, i) | {"before_rope": norm}
