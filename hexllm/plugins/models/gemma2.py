"""Gemma-2 2B, 9B and 27B.

Reference: transformers ``models/gemma2``. Gemma with norms on both sides of attention and MLP, soft
caps, a scale of its own on the scores, and a window in every other layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.model import blocks
from hexllm.model.config import ModelConfig, extend, read_model_config, read_windows
from hexllm.model.family import LayerNorms
from hexllm.plugins.models.gemma import TANH_GELU, Gemma

if TYPE_CHECKING:
    from collections.abc import Mapping

    import jax

    from hexllm.model.hf_config import HfConfig


@dataclass(frozen=True)
class Gemma2Config(ModelConfig):
    """Gemma-2's configuration, under Hugging Face's keys."""

    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None


class Gemma2(Gemma):
    """The Gemma-2 family."""

    name: ClassVar[str] = "gemma2"
    # transformers reads hidden_activation and sliding_window; cache_implementation is a note on its
    # own cache.
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        {"hidden_act", "sliding_window_size", "cache_implementation"}
    )
    norms: ClassVar[LayerNorms] = LayerNorms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )

    def read_config(self, hf: HfConfig) -> Gemma2Config:
        """Return the model's configuration, with the defaults of transformers' Gemma2Config."""
        window = hf.integer("sliding_window", 4096)
        cfg = read_model_config(
            hf,
            tie_word_embeddings=True,
            windows=read_windows(hf, window, is_sliding=lambda i: i % 2 == 0),
            hidden_act=TANH_GELU,
            hidden_act_key="hidden_activation",
            head_dim=256,
            max_position_embeddings=8192,
        )
        return extend(Gemma2Config, cfg, **read_caps(hf, attention=50.0, final=30.0))

    def attention_options(self, cfg: Any, i: int) -> dict[str, Any]:
        """Return attention's options: the scale and cap of the configuration."""
        return super().attention_options(cfg, i) | {
            "scale": cfg.query_pre_attn_scalar**-0.5,
            "softcap": cfg.attn_logit_softcapping,
        }

    def logits(self, cfg: Any, params: Mapping[str, Any], hidden: jax.Array) -> jax.Array:
        """Return the logits [S, V] float32, capped."""
        logits = super().logits(cfg, params, hidden)
        cap = cfg.final_logit_softcapping
        return logits if cap is None else blocks.softcap(logits, cap)


def read_caps(
    hf: HfConfig, *, attention: float | None, final: float | None
) -> dict[str, float | None]:
    """Read the keys of Gemma2Config's own fields; null in the file means no cap."""

    def cap(key: str, default: float | None) -> float | None:
        value: float | None = hf.number(key, None) if key in hf else default
        return value

    return {
        "query_pre_attn_scalar": hf.number("query_pre_attn_scalar", 256.0),
        "attn_logit_softcapping": cap("attn_logit_softcapping", attention),
        "final_logit_softcapping": cap("final_logit_softcapping", final),
    }
