"""Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4-mini, Phi-4-reasoning.

Reference: transformers ``models/phi3``. Llama with longrope and fused projections in its files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hexllm.model.config import ModelConfig, read_model_config, read_windows
from hexllm.model.family import DecoderFamily
from hexllm.model.rope_config import read_rope
from hexllm.model.rules import Rule, Split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.model.hf_config import HfConfig


class Phi3(DecoderFamily):
    """The Phi-3 and Phi-4 family."""

    name: ClassVar[str] = "phi3"
    # Read with longrope; the other models carry it as a note.
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"original_max_position_embeddings"})

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration, with the defaults of transformers' Phi3Config."""
        N = hf.integer("num_attention_heads")
        limit = hf.integer("max_position_embeddings", 4096)
        rope = read_rope(
            hf,
            head_dim=hf.integer("head_dim", hf.integer("hidden_size") // N),
            max_position_embeddings=limit,
            is_partial=True,
            aliases={"su": "longrope", "yarn": "longrope"},  # what the first files called it
        )
        return read_model_config(
            hf,
            tie_word_embeddings=False,
            windows=read_windows(hf, hf.integer("sliding_window", None)),
            rope=rope,
            rms_norm_eps=1e-5,
            max_position_embeddings=limit,
        )

    def weight_rules(self, cfg: ModelConfig) -> Sequence[Rule]:
        """Return how the fused projections are cut."""
        H, F = cfg.head_dim, cfg.intermediate_size
        N, K = cfg.num_attention_heads, cfg.num_key_value_heads
        return (
            Split(
                "self_attn.qkv_proj",
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                (N * H, K * H, K * H),
            ),
            Split("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), (F, F)),
        )
