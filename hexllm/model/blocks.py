"""The blocks that families are put together from. Pure functions; parameters are nested dicts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hexllm.model.fuse import project
from hexllm.model.rope import rotate, shared_tables
from hexllm.model.specs import LinearSpec, Specs, norm_spec
from hexllm.ops.attention import attend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hexllm.model.config import ModelConfig
    from hexllm.model.rope_config import RopeConfig
    from hexllm.ops.kv_cache import LayerKV
    from hexllm.ops.step import Step

#: Hugging Face's ``hidden_act`` names. Those of one function are one function here too.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_fast": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def embed(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the embeddings of tokens.

    Args:
        weight: [V, D].
        tokens: [T] int32; an id out of range gives the nearest row, never NaN.

    Returns:
        [T, D] in weight's dtype.
    """
    return weight.at[tokens].get(mode="clip")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Return x over its root mean square, times weight; float32 inside.

    Args:
        x: [..., D].
        weight: [D].
        eps: Added to the mean square.

    Returns:
        [..., D] in x's dtype.
    """
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * weight.astype(jnp.float32)).astype(x.dtype)


def gated_mlp_specs(cfg: ModelConfig) -> Specs:
    """Return the specs of :func:`gated_mlp`."""
    D, F, bias = cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias
    return {
        "gate_proj": LinearSpec(D, F, bias, ("mlp", "embed")),
        "up_proj": LinearSpec(D, F, bias, ("mlp", "embed")),
        "down_proj": LinearSpec(F, D, bias, ("embed", "mlp")),
    }


def gated_mlp(p: Mapping[str, Any], x: jax.Array, step: Step, *, hidden_act: str) -> jax.Array:
    """Return ``down(act(gate(x)) * up(x))``.

    Args:
        p: ``gate_proj``, ``up_proj``, ``down_proj``.
        x: [T, D].
        step: The batch.
        hidden_act: A key of ACTIVATIONS.

    Returns:
        [T, D] in x's dtype.
    """
    gate, up = project((p["gate_proj"], p["up_proj"]), x, step)  # [T, F]
    hidden = ACTIVATIONS[hidden_act](gate.astype(jnp.float32)) * up.astype(jnp.float32)
    y: jax.Array = p["down_proj"](hidden.astype(x.dtype), step)
    return y


def attention_specs(cfg: ModelConfig) -> Specs:
    """Return the specs of :func:`attention`."""
    D, H, bias = cfg.hidden_size, cfg.head_dim, cfg.attention_bias
    N, K = cfg.num_attention_heads, cfg.num_key_value_heads
    return {
        "q_proj": LinearSpec(D, N * H, bias, ("heads", "embed")),
        "k_proj": LinearSpec(D, K * H, bias, ("kv_heads", "embed")),
        "v_proj": LinearSpec(D, K * H, bias, ("kv_heads", "embed")),
        "o_proj": LinearSpec(N * H, D, bias, ("embed", "heads")),
    }


def attention(
    p: Mapping[str, Any],
    x: jax.Array,
    kv: LayerKV,
    step: Step,
    *,
    head_dim: int,
    rope: RopeConfig | None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, LayerKV]:
    """Project, turn by position, attend to the cache, and project back.

    Args:
        p: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``.
        x: [T, D].
        kv: This layer's cache.
        step: The batch.
        head_dim: H.
        rope: None for a layer without positions.
        scale: Factor on the scores.
        window: See ``KVSpec``.
        softcap: See ``hexllm.ops.attention.attend``.

    Returns:
        [T, D] in x's dtype, and the new cache.
    """
    T = x.shape[0]
    projections = project((p["q_proj"], p["k_proj"], p["v_proj"]), x, step)
    q, k, v = (y.reshape(T, -1, head_dim) for y in projections)  # [T, N, H], [T, K, H] twice
    if rope is not None:
        cos, sin = shared_tables(rope, step)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    out, kv = attend(q, k, v, kv, step, scale=scale, window=window, softcap=softcap)
    return p["o_proj"](out.reshape(T, -1), step), kv


def decoder_layer_specs(cfg: ModelConfig) -> Specs:
    """Return the specs of :func:`decoder_layer`."""
    return {
        "input_layernorm": norm_spec(cfg.hidden_size),
        "self_attn": attention_specs(cfg),
        "post_attention_layernorm": norm_spec(cfg.hidden_size),
        "mlp": gated_mlp_specs(cfg),
    }


def decoder_layer(
    cfg: ModelConfig,
    p: Mapping[str, Any],
    x: jax.Array,
    kv: LayerKV,
    step: Step,
    *,
    window: int | None = None,
) -> tuple[jax.Array, LayerKV]:
    """Run the pre-norm decoder layer of Llama and its kin.

    Args:
        cfg: The model.
        p: The layer's parameters, as :func:`decoder_layer_specs` names them.
        x: [T, D].
        kv: The layer's cache.
        step: The batch.
        window: See ``KVSpec``.

    Returns:
        [T, D] in x's dtype, and the new cache.
    """
    with jax.named_scope("self_attn"):
        h = rms_norm(x, p["input_layernorm"]["weight"], cfg.rms_norm_eps)
        h, kv = attention(
            p["self_attn"],
            h,
            kv,
            step,
            head_dim=cfg.head_dim,
            rope=cfg.rope,
            scale=cfg.head_dim**-0.5,
            window=window,
        )
        x = x + h
    with jax.named_scope("mlp"):
        h = rms_norm(x, p["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
        x = x + gated_mlp(p["mlp"], h, step, hidden_act=cfg.hidden_act)
    return x, kv
