"""The blocks that families are put together from. Pure functions; parameters are nested dicts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from hexllm.model.fuse import project
from hexllm.model.rope import rotate, shared_tables
from hexllm.model.specs import LinearSpec, Specs
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


def rms_norm(
    x: jax.Array, weight: jax.Array | None, eps: float, *, is_zero_centered: bool = False
) -> jax.Array:
    """Return x over its root mean square, times weight; float32 inside.

    Args:
        x: [..., D].
        weight: [D]; None for a norm that has none.
        eps: Added to the mean square.
        is_zero_centered: Whether the factor is ``1 + weight``, as Gemma stores it.

    Returns:
        [..., D] in x's dtype.
    """
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if weight is not None:
        factor = weight.astype(jnp.float32)
        x32 *= 1.0 + factor if is_zero_centered else factor
    return x32.astype(x.dtype)


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """Return ``cap * tanh(x / cap)``: x, smoothly kept within ±cap."""
    return cap * jnp.tanh(x / cap)


def gated_mlp_specs(cfg: ModelConfig, intermediate_size: int | None = None) -> Specs:
    """Return the specs of :func:`gated_mlp`; F is ``cfg.intermediate_size`` by default."""
    D, F, bias = cfg.hidden_size, intermediate_size or cfg.intermediate_size, cfg.mlp_bias
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


def attention_specs(
    cfg: ModelConfig, *, bias: bool | None = None, out_bias: bool | None = None
) -> Specs:
    """Return the specs of :func:`attention`.

    Args:
        cfg: The model.
        bias: Whether q, k and v have biases; the model's ``attention_bias`` by default.
        out_bias: Whether the output projection has one; as ``bias`` by default.
    """
    D, H = cfg.hidden_size, cfg.head_dim
    N, K = cfg.num_attention_heads, cfg.num_key_value_heads
    bias = cfg.attention_bias if bias is None else bias
    return {
        "q_proj": LinearSpec(D, N * H, bias, ("heads", "embed")),
        "k_proj": LinearSpec(D, K * H, bias, ("kv_heads", "embed")),
        "v_proj": LinearSpec(D, K * H, bias, ("kv_heads", "embed")),
        "o_proj": LinearSpec(N * H, D, bias if out_bias is None else out_bias, ("embed", "heads")),
    }


Heads: TypeAlias = tuple[jax.Array, jax.Array]
#: (attention's parameters, q [T, N, H], k [T, K, H], step) -> q and k, of the same shapes.
HeadTransform: TypeAlias = "Callable[[Mapping[str, Any], jax.Array, jax.Array, Step], Heads]"


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
    chunk: int | None = None,
    softcap: float | None = None,
    before_rope: HeadTransform | None = None,
    after_rope: HeadTransform | None = None,
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
        chunk: See ``KVSpec``.
        softcap: See ``hexllm.ops.attention.attend``.
        before_rope: What is done to q and k before they are turned (:func:`norm_heads`).
        after_rope: And after; for layers without positions too.

    Returns:
        [T, D] in x's dtype, and the new cache.
    """
    T = x.shape[0]
    projections = project((p["q_proj"], p["k_proj"], p["v_proj"]), x, step)
    q, k, v = (y.reshape(T, -1, head_dim) for y in projections)  # [T, N, H], [T, K, H] twice
    if before_rope is not None:
        q, k = before_rope(p, q, k, step)
    if rope is not None:
        cos, sin = shared_tables(rope, step)
        q, k = (rotate(y, cos, sin, is_interleaved=rope.is_interleaved) for y in (q, k))
    if after_rope is not None:
        q, k = after_rope(p, q, k, step)
    out, kv = attend(q, k, v, kv, step, scale=scale, window=window, chunk=chunk, softcap=softcap)
    return p["o_proj"](out.reshape(T, -1), step), kv


def norm_heads(eps: float, *, is_zero_centered: bool = False) -> HeadTransform:
    """Return the transform that norms each head of q and k by ``q_norm`` and ``k_norm`` [H]."""

    def transform(p: Mapping[str, Any], q: jax.Array, k: jax.Array, step: Step) -> Heads:
        del step
        q, k = (
            rms_norm(y, p[name]["weight"], eps, is_zero_centered=is_zero_centered)
            for name, y in (("q_norm", q), ("k_norm", k))
        )
        return q, k

    return transform


def norm_heads_plainly(eps: float) -> HeadTransform:
    """Return the transform that norms each head of q and k, without weights."""

    def transform(p: Mapping[str, Any], q: jax.Array, k: jax.Array, step: Step) -> Heads:
        del p, step
        return rms_norm(q, None, eps), rms_norm(k, None, eps)

    return transform


def sharpen_queries(strength: float, floor_scale: float) -> HeadTransform:
    """Return the transform that scales q by 1 + strength * log(1 + floor((position + 1) / floor)).

    So that softmax stays as sharp over more positions (Nakanishi 2025, as Llama-4 uses it).
    """

    def transform(p: Mapping[str, Any], q: jax.Array, k: jax.Array, step: Step) -> Heads:
        del p
        steps = jnp.floor((step.positions.astype(jnp.float32) + 1.0) / floor_scale)  # [T]
        factor = jnp.log1p(steps) * strength + 1.0
        return (q.astype(jnp.float32) * factor[:, None, None]).astype(q.dtype), k

    return transform


def norm_projections(eps: float) -> HeadTransform:
    """Return the transform that norms all heads together, by weights [N * H] and [K * H]."""

    def transform(p: Mapping[str, Any], q: jax.Array, k: jax.Array, step: Step) -> Heads:
        del step
        T = q.shape[0]
        q, k = (
            rms_norm(y.reshape(T, -1), p[name]["weight"], eps).reshape(y.shape)
            for name, y in (("q_norm", q), ("k_norm", k))
        )
        return q, k

    return transform
