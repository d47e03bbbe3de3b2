"""Qwen3-30B-A3B, Qwen3-235B-A22B: Qwen3 with experts in most layers, or all.

Reference: transformers ``models/qwen3_moe``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.model import moe
from hexllm.model.config import extend, read_model_config, read_windows
from hexllm.model.rules import Rule, Stack
from hexllm.plugins.models.qwen2 import read_qwen_window
from hexllm.plugins.models.qwen3 import Qwen3

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import jax

    from hexllm.model.config import ModelConfig
    from hexllm.model.hf_config import HfConfig
    from hexllm.model.specs import Specs
    from hexllm.ops.step import Step


@dataclass(frozen=True)
class Qwen3MoeConfig(moe.MoEConfig):
    """Its configuration; ``moe_layers`` says which layers have experts."""

    norm_topk_prob: bool
    moe_layers: tuple[bool, ...]


class Qwen3Moe(Qwen3):
    """The Qwen3-MoE family."""

    name: ClassVar[str] = "qwen3_moe"
    # max_window_layers is in the files, and transformers gives all layers the window, or none.
    ignored_keys: ClassVar[frozenset[str]] = moe.ROUTER_TRAINING_KEYS | {"max_window_layers"}

    def read_config(self, hf: HfConfig) -> Qwen3MoeConfig:
        """Return the model's configuration, with the defaults of transformers' Qwen3MoeConfig."""
        cfg = read_model_config(
            hf,
            tie_word_embeddings=False,
            windows=read_windows(hf, read_qwen_window(hf)),
            max_position_embeddings=32_768,
        )
        key = "num_local_experts" if "num_local_experts" in hf else "num_experts"
        step = hf.integer("decoder_sparse_step", 1)
        dense = hf.layer_numbers("mlp_only_layers") or ()
        return extend(
            Qwen3MoeConfig,
            cfg,
            moe_intermediate_size=hf.integer("moe_intermediate_size", 768),
            norm_topk_prob=hf.boolean("norm_topk_prob", False),
            moe_layers=tuple(
                i not in dense and (i + 1) % step == 0 for i in range(cfg.num_hidden_layers)
            ),
            **moe.read_experts(hf, key=key, count=128, per_tok=8),
        )

    def mlp_specs(self, cfg: Any, i: int) -> Specs:
        """Return the specs of router and experts, or of a plain MLP."""
        if not cfg.moe_layers[i]:
            return super().mlp_specs(cfg, i)
        return {"mlp": {"gate": moe.router_spec(cfg), "experts": moe.expert_specs(cfg)}}

    def mlp(self, cfg: Any, i: int, p: Mapping[str, Any], x: jax.Array, step: Step) -> jax.Array:
        """Return what each token's experts, or the layer's plain MLP, make of x [T, D]."""
        if not cfg.moe_layers[i]:
            return super().mlp(cfg, i, p, x, step)
        logits = p["mlp"]["gate"](x, step)  # [T, E]
        weights, experts = moe.pick_by_softmax(
            logits, cfg.num_experts_per_tok, normalise=cfg.norm_topk_prob
        )
        # As the reference rounds them.
        weights = weights.astype(x.dtype).astype(logits.dtype)
        return moe.mix_experts(
            p["mlp"]["experts"],
            x,
            weights,
            experts,
            hidden_act=cfg.hidden_act,
        )

    def weight_rules(self, cfg: ModelConfig) -> Sequence[Rule]:
        """Return how the experts' tensors are stacked."""
        del cfg
        return [Stack(f"experts.*.{name}", f"experts.{name}") for name in moe.EXPERT_NAMES]
