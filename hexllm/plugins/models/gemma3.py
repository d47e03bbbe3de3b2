"""Gemma-3, 270M to 27B: the language model, of multimodal checkpoints too.

Reference: transformers ``models/gemma3``. Gemma-2 without caps, with normed queries and keys, and
two kinds of layers: most have a window and a rotary embedding of a small base, the rest see all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.model import blocks
from hexllm.model.config import extend, read_model_config, read_windows
from hexllm.model.multimodal import MULTIMODAL_KEYS, MULTIMODAL_RULES
from hexllm.model.rope_config import RopeConfig, read_rope
from hexllm.plugins.models.gemma import TANH_GELU
from hexllm.plugins.models.gemma2 import Gemma2, Gemma2Config, read_caps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.model.config import ModelConfig
    from hexllm.model.hf_config import HfConfig
    from hexllm.model.rules import Rule
    from hexllm.model.specs import Specs


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """Gemma-3's configuration; ``rope_local`` is of the layers with a window."""

    rope_local: RopeConfig


class Gemma3(Gemma2):
    """The Gemma-3 family."""

    name: ClassVar[str] = "gemma3"
    ignored_keys: ClassVar[frozenset[str]] = (
        Gemma2.ignored_keys | MULTIMODAL_KEYS | {"_sliding_window_pattern"}
    )

    def read_config(self, hf: HfConfig) -> Gemma3Config:
        """Return the model's configuration, with the defaults of transformers' Gemma3TextConfig."""
        text = hf.language_model()
        pattern = text.integer("sliding_window_pattern", 6)
        window = text.integer("sliding_window", 4096)
        shape: dict[str, Any] = {
            "head_dim": text.integer("head_dim", 256),
            "max_position_embeddings": text.integer("max_position_embeddings", 131_072),
        }
        rope = read_rope(text, default_theta=1e6, layer_type="full_attention", **shape)
        rope_local = read_rope(
            text,
            default_theta=1e4,
            layer_type="sliding_attention",
            theta_key="rope_local_base_freq",
            is_scaled=False,
            **shape,
        )
        cfg = read_model_config(
            hf,
            tie_word_embeddings=True,
            windows=read_windows(text, window, is_sliding=lambda i: (i + 1) % pattern != 0),
            rope=rope,
            hidden_act=TANH_GELU,
            hidden_act_key="hidden_activation",
            # Google's multimodal files leave out what is equal to these.
            sizes={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
            **shape,
        )
        caps = read_caps(text, attention=None, final=None)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            # transformers passes the first one over, and the second in multimodal models.
            if caps[key] is not None and (key[0] == "a" or text is not hf):
                text.refuse(key, "Gemma-3 models have no such cap. Remove it, or set it to null.")
        return extend(Gemma3Config, cfg, rope_local=rope_local, **caps)

    def ropes(self, cfg: Any) -> tuple[RopeConfig, ...]:
        """Return both rotary embeddings."""
        return cfg.rope, cfg.rope_local

    def attention_specs(self, cfg: ModelConfig, i: int) -> Specs:
        """Return attention's specs, with the norms of heads."""
        norms = {name: self.norm_spec(cfg.head_dim) for name in ("q_norm", "k_norm")}
        return super().attention_specs(cfg, i) | norms

    def attention_options(self, cfg: Any, i: int) -> dict[str, Any]:
        """Return attention's options: normed heads, and the layer's own rotary embedding."""
        return super().attention_options(cfg, i) | {
            "rope": cfg.rope if cfg.windows[i] is None else cfg.rope_local,
            "before_rope": blocks.norm_heads(cfg.rms_norm_eps, is_zero_centered=True),
        }

    def weight_rules(self, cfg: ModelConfig) -> Sequence[Rule]:
        """Return how the language model is taken out of a multimodal checkpoint."""
        del cfg
        return MULTIMODAL_RULES
