"""Mixtral 8x7B and 8x22B: Mistral with eight experts, of which a token passes two.

Reference: transformers ``models/mixtral``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.model import moe
from hexllm.model.config import extend, read_model_config, read_windows
from hexllm.model.family import DecoderFamily
from hexllm.model.rules import Rule, Stack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import jax

    from hexllm.model.config import ModelConfig
    from hexllm.model.hf_config import HfConfig
    from hexllm.model.specs import Specs
    from hexllm.ops.step import Step

#: Gate, up and down.
NAMES = ("w1", "w3", "w2")


class Mixtral(DecoderFamily):
    """The Mixtral family."""

    name: ClassVar[str] = "mixtral"
    ignored_keys: ClassVar[frozenset[str]] = moe.ROUTER_TRAINING_KEYS

    def read_config(self, hf: HfConfig) -> moe.MoEConfig:
        """Return the model's configuration, with the defaults of transformers' MixtralConfig."""
        cfg = read_model_config(
            hf,
            tie_word_embeddings=False,
            windows=read_windows(hf, hf.integer("sliding_window", None)),
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
        )
        experts = moe.read_experts(hf, count=8, per_tok=2)
        return extend(moe.MoEConfig, cfg, moe_intermediate_size=cfg.intermediate_size, **experts)

    def mlp_specs(self, cfg: Any, i: int) -> Specs:
        """Return the specs of router and experts."""
        del i
        experts = moe.expert_specs(cfg, NAMES)
        return {"block_sparse_moe": {"gate": moe.router_spec(cfg), "experts": experts}}

    def mlp(self, cfg: Any, i: int, p: Mapping[str, Any], x: jax.Array, step: Step) -> jax.Array:
        """Return what each token's experts make of x [T, D]."""
        del i
        p = p["block_sparse_moe"]
        logits = p["gate"](x, step)  # [T, E]
        weights, experts = moe.pick_by_softmax(logits, cfg.num_experts_per_tok, normalise=True)
        return moe.mix_experts(
            p["experts"],
            x,
            weights,
            experts,
            hidden_act=cfg.hidden_act,
            names=NAMES,
        )

    def weight_rules(self, cfg: ModelConfig) -> Sequence[Rule]:
        """Return how the experts' tensors are stacked."""
        del cfg
        return [Stack(f"experts.*.{name}", f"experts.{name}") for name in NAMES]
