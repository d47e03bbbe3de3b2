"""Llama-4 Scout and Maverick: the language model, of multimodal checkpoints too.

Reference: transformers ``models/llama4``. Most layers turn neighbouring dimensions, norm the turned
heads without weights and attend within chunks; the others (NoPE) know no positions, see all and
sharpen their scores as positions grow. One expert that all tokens pass stands beside the routed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from hexllm.model import blocks, moe
from hexllm.model.config import KVSpec, extend, read_layer_kinds, read_model_config
from hexllm.model.family import DecoderFamily
from hexllm.model.multimodal import MULTIMODAL_KEYS, MULTIMODAL_RULES
from hexllm.model.rules import Rename, Rule, Split, Transpose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import jax

    from hexllm.model.hf_config import HfConfig
    from hexllm.model.specs import Specs
    from hexllm.ops.step import Step


@dataclasses.dataclass(frozen=True)
class Llama4Config(moe.MoEConfig):
    """Its configuration: Hugging Face's keys, and what each layer is."""

    intermediate_size_mlp: int
    use_qk_norm: bool
    attn_scale: float  # 0 where attn_temperature_tuning is off
    floor_scale: float
    has_rope: tuple[bool, ...]
    has_experts: tuple[bool, ...]
    chunks: tuple[int | None, ...]


class Llama4(DecoderFamily):
    """The Llama-4 family."""

    name: ClassVar[str] = "llama4"
    # cache_implementation is a note on transformers' own cache.
    ignored_keys: ClassVar[frozenset[str]] = (
        MULTIMODAL_KEYS | moe.ROUTER_TRAINING_KEYS | {"cache_implementation"}
    )

    def read_config(self, hf: HfConfig) -> Llama4Config:
        """Return the model's configuration, with the defaults of transformers' Llama4TextConfig."""
        text = hf.language_model()
        layers = range(text.integer("num_hidden_layers"))
        cfg = read_model_config(
            hf,
            tie_word_embeddings=False,
            windows=(None,) * len(layers),
            head_dim=128,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            rope_theta=500_000.0,
        )
        every = text.integer("no_rope_layer_interval", 4)
        rope = text.get("no_rope_layers") or [(i + 1) % every != 0 for i in layers]
        step = text.integer("interleave_moe_layer_step", 1)
        routed = text.layer_numbers("moe_layers")
        if routed is None:
            routed = tuple(i for i in layers if (i + 1) % step == 0)
        if not isinstance(rope, list) or len(rope) < len(layers) or not set(rope) <= {0, 1}:
            text.refuse("no_rope_layers", f"num_hidden_layers={len(layers)} of 0 or 1 are needed.")
        # Early files say 4, which transformers takes for true.
        key = "attn_temperature_tuning"
        is_tuned = text.get(key) == 4 or text.boolean(key, True)
        scale = text.number("attn_scale", 0.1)
        chunk = text.integer_or_null("attention_chunk_size", 8192)
        kinds = read_layer_kinds(
            text,
            {"full_attention": None} | ({} if chunk is None else {"chunked_attention": chunk}),
            lambda i: "chunked_attention" if rope[i] and chunk else "full_attention",
        )
        cfg = dataclasses.replace(cfg, rope=dataclasses.replace(cfg.rope, is_interleaved=True))
        return extend(
            Llama4Config,
            cfg,
            moe_intermediate_size=cfg.intermediate_size,
            intermediate_size_mlp=text.integer("intermediate_size_mlp", 16_384),
            use_qk_norm=text.boolean("use_qk_norm", True),
            attn_scale=scale if is_tuned else 0.0,
            floor_scale=text.number("floor_scale", 8192),
            has_rope=tuple(bool(rope[i]) for i in layers),
            has_experts=tuple(i in routed for i in layers),
            chunks=kinds,
            **moe.read_experts(text, count=16, per_tok=1),
        )

    def kv_spec(self, cfg: Any, i: int) -> KVSpec:
        """Return what layer ``i`` keeps in the KV cache."""
        return KVSpec(cfg.num_key_value_heads, cfg.head_dim, chunk=cfg.chunks[i])

    def attention_options(self, cfg: Any, i: int) -> dict[str, Any]:
        """Return attention's options, of layers with positions and without."""
        options = super().attention_options(cfg, i)
        if not cfg.has_rope[i]:
            sharpen = blocks.sharpen_queries(cfg.attn_scale, cfg.floor_scale)
            return options | {"rope": None, "after_rope": sharpen}
        norm = blocks.norm_heads_plainly(cfg.rms_norm_eps) if cfg.use_qk_norm else None
        return options | {"after_rope": norm}

    def mlp_specs(self, cfg: Any, i: int) -> Specs:
        """Return the specs of router, experts and shared expert, or of a plain MLP."""
        if not cfg.has_experts[i]:
            return {"feed_forward": blocks.gated_mlp_specs(cfg, cfg.intermediate_size_mlp)}
        routed = {"router": moe.router_spec(cfg), "experts": moe.expert_specs(cfg)}
        return {"feed_forward": {**routed, "shared_expert": blocks.gated_mlp_specs(cfg)}}

    def mlp(self, cfg: Any, i: int, p: Mapping[str, Any], x: jax.Array, step: Step) -> jax.Array:
        """Return what the experts, or the layer's plain MLP, make of x [T, D]."""
        p, act = p["feed_forward"], cfg.hidden_act
        if not cfg.has_experts[i]:
            return blocks.gated_mlp(p, x, step, hidden_act=act)
        picked = moe.pick_by_sigmoid(p["router"](x, step), cfg.num_experts_per_tok)
        y = moe.mix_experts(p["experts"], x, *picked, hidden_act=act, is_input_weighted=True)
        return y + blocks.gated_mlp(p["shared_expert"], x, step, hidden_act=act)

    def weight_rules(self, cfg: Any) -> Sequence[Rule]:
        """Return how the language model is taken out, and the experts' tensors turned and cut."""
        F = cfg.moe_intermediate_size
        return (
            *MULTIMODAL_RULES,
            Transpose("experts.gate_up_proj"),
            Transpose("experts.down_proj"),
            Rename(
                r"(experts\.(gate_up|down)_proj)$",
                r"\1.weight",
                inverse=(r"(experts\.(gate_up|down)_proj)\.weight$", r"\1"),
            ),
            Split("experts.gate_up_proj", ("experts.gate_proj", "experts.up_proj"), (F, F), axis=1),
        )
