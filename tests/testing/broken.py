"""A family that is right, and ones that are wrong in one way each, for the kit to catch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from hexllm.model.config import KVSpec, read_model_config, read_windows
from hexllm.model.family import DecoderFamily
from hexllm.model.hf_config import HfConfig
from hexllm.model.rules import Drop, Split, Transpose

CONFIG = {
    "architectures": ["PlainForCausalLM"],
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}


class Plain(DecoderFamily):
    """Right: a Llama with windows."""

    name = "plain"

    def read_config(self, hf: HfConfig) -> Any:
        windows = read_windows(hf, hf.integer("sliding_window", None))
        return read_model_config(hf, tie_word_embeddings=False, windows=windows)


def without(hf: HfConfig, **values: Any) -> HfConfig:
    """A configuration in which keys of ``hf``, which count as read, have other values."""
    for key in values:
        hf.get(key)
    kept = {key: value for key, value in hf.raw().items() if key not in values}
    return HfConfig({**kept, **{k: v for k, v in values.items() if v is not None}}, hf.source)


class ReadsAnything(Plain):
    def config(self, hf: HfConfig) -> Any:
        return self.read_config(hf)


class TakesAnyActivation(Plain):
    def read_config(self, hf: HfConfig) -> Any:
        for key in hf.raw():
            hf.get(key)
        return super().read_config(without(hf, hidden_act=None))


class TakesAnyRope(Plain):
    def read_config(self, hf: HfConfig) -> Any:
        hf.section("rope_scaling") or hf.section("rope_parameters")
        for key in hf.raw():
            if isinstance(hf[key], HfConfig):
                [hf[key].get(inner) for inner in hf[key].raw()]
            hf.get(key)
        return super().read_config(without(hf, rope_scaling=None, rope_parameters=None))


class TakesAnyHeads(Plain):
    def read_config(self, hf: HfConfig) -> Any:
        for key in hf.raw():
            hf.get(key)
        return super().read_config(without(hf, num_key_value_heads=2))


class ByIdentity:
    """Makes no two configurations equal."""


class NewConfigEachTime(Plain):
    def read_config(self, hf: HfConfig) -> Any:
        cfg = super().read_config(hf)
        return dataclasses.replace(cfg, source=ByIdentity())


class OwnDefault(Plain):
    """A file without ``rms_norm_eps`` means another model to it than to transformers."""

    def read_config(self, hf: HfConfig) -> Any:
        return read_model_config(hf, tie_word_embeddings=False, rms_norm_eps=1e-5)


class LosesATensor(Plain):
    def weight_rules(self, cfg: Any) -> Any:
        return [Drop(r".*layers\.1\.mlp\.up_proj\.weight")]


class TakesAnyTensor(Plain):
    def weight_rules(self, cfg: Any) -> Any:
        return [Drop(r".*\.extra\..*")]


class Turned(Plain):
    """Its weight is square, so that the wrong way round fits too."""

    def weight_rules(self, cfg: Any) -> Any:
        return [Transpose("self_attn.q_proj")]


class SwapsGateAndUp(Plain):
    """What the model's files call up_proj it takes for gate_proj."""

    def weight_rules(self, cfg: Any) -> Any:
        F = cfg.intermediate_size
        return [
            Split("mlp.gate_proj", ("mlp.swap",), (F,)),
            Split("mlp.up_proj", ("mlp.gate_proj",), (F,)),
            Split("mlp.swap", ("mlp.up_proj",), (F,)),
        ]


class WrongNorm(Plain):
    def norm(self, cfg: Any, p: Any, x: Any) -> Any:
        return super().norm(cfg, {"weight": 1 + p["weight"]}, x)


class HalfPrecisionLogits(Plain):
    def logits(self, cfg: Any, params: Any, hidden: Any) -> Any:
        return super().logits(cfg, params, hidden).astype(jnp.bfloat16).astype(jnp.float32)


class CountsPositionsFromTheChunk(Plain):
    def forward(self, cfg: Any, params: Any, tokens: Any, kv: Any, step: Any) -> Any:
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        positions -= step.query_start_loc[jnp.searchsorted(step.query_start_loc[1:], positions)]
        wrong = dataclasses.replace(step, positions=positions)
        return super().forward(cfg, params, tokens, kv, wrong)


class CountsPositionsOverTheBatch(Plain):
    """Right for the first sequence, from its start."""

    def embed(self, cfg: Any, params: Any, tokens: Any) -> Any:
        at = jnp.arange(tokens.shape[0], dtype=jnp.float32)[:, None]
        return super().embed(cfg, params, tokens) + 0.1 * at


class LooksAtTheBatch(Plain):
    def embed(self, cfg: Any, params: Any, tokens: Any) -> Any:
        x = super().embed(cfg, params, tokens)
        return x + 0.01 * x.mean(axis=0, keepdims=True)


class LooksAtPadding(Plain):
    """Shifted by one token: the last of a sequence sees the first of the next, or padding."""

    def layer(self, cfg: Any, i: int, p: Any, x: Any, kv: Any, step: Any) -> Any:
        y, kv = super().layer(cfg, i, p, x, kv, step)
        return y + 0.01 * jnp.roll(x, -1, axis=0), kv


class WindowTooLarge(Plain):
    def kv_spec(self, cfg: Any, i: int) -> KVSpec:
        spec = super().kv_spec(cfg, i)
        return spec if spec.window is None else dataclasses.replace(spec, window=spec.window - 1)

    def attention_options(self, cfg: Any, i: int) -> Any:
        return super().attention_options(cfg, i) | {"window": cfg.windows[i]}


class WindowTooSmall(WindowTooLarge):
    def kv_spec(self, cfg: Any, i: int) -> KVSpec:
        spec = DecoderFamily.kv_spec(self, cfg, i)
        return spec if spec.window is None else dataclasses.replace(spec, window=spec.window + 1)


class Chunked(Plain):
    """Right: chunks in the place of windows."""

    def kv_spec(self, cfg: Any, i: int) -> KVSpec:
        spec = super().kv_spec(cfg, i)
        return dataclasses.replace(spec, window=None, chunk=spec.window)


class ForgetsItsChunks(Chunked):
    def attention_options(self, cfg: Any, i: int) -> Any:
        return super().attention_options(cfg, i) | {"chunk": None}


class WidensActivations(Plain):
    def embed(self, cfg: Any, params: Any, tokens: Any) -> Any:
        return super().embed(cfg, params, tokens).astype(jnp.float32)


class WidensNorms(Plain):
    def norm_spec(self, size: int) -> Any:
        (spec,) = super().norm_spec(size).values()
        return {"weight": dataclasses.replace(spec, dtype="float32")}


class LosesPrecision(Plain):
    """In bfloat16 its residual stream is of whole numbers."""

    def layer(self, cfg: Any, i: int, p: Any, x: Any, kv: Any, step: Any) -> Any:
        y, kv = super().layer(cfg, i, p, x, kv, step)
        return (jnp.round(y) if y.dtype == jnp.bfloat16 else y), kv
