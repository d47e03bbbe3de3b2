"""Mixtures of experts: a router sends each token through a few of many MLPs. No token is dropped.

The experts' weights are one leaf a projection, stacked; tokens are sorted by expert, so that each
expert's are one slice, and the cost is that of the tokens routed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hexllm.model.blocks import ACTIVATIONS
from hexllm.model.config import ModelConfig
from hexllm.model.specs import LinearSpec, Specs
from hexllm.ops import platform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hexllm.model.hf_config import HfConfig

#: Keys that concern a router's training only.
ROUTER_TRAINING_KEYS = frozenset(
    ["output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef"]
)

#: Names of an expert's projections: gate, up, down.
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MoEConfig(ModelConfig):
    """The configuration of a decoder with experts.

    Attributes:
        num_experts: E.
        num_experts_per_tok: How many of them a token passes.
        moe_intermediate_size: F of an expert.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int


def read_experts(
    hf: HfConfig, *, key: str = "num_local_experts", count: int, per_tok: int
) -> dict[str, int]:
    """Read how many experts there are, and how many of them a token passes.

    Args:
        hf: The model's ``config.json``.
        key: The key of E.
        count: The family's default of E.
        per_tok: The family's default of ``num_experts_per_tok``.

    Raises:
        UnsupportedConfigError: A value is missing or wrong.
    """
    E = hf.integer(key, count)
    k = hf.integer("num_experts_per_tok", per_tok)
    if k > E:
        hf.refuse("num_experts_per_tok", f"there are only {key}={E} experts.")
    return {"num_experts": E, "num_experts_per_tok": k}


def router_spec(cfg: MoEConfig) -> LinearSpec:
    """Return the spec of a router, whose logits are float32."""
    return LinearSpec(cfg.hidden_size, cfg.num_experts, out_dtype="float32")


def expert_specs(cfg: MoEConfig, names: Sequence[str] = EXPERT_NAMES) -> Specs:
    """Return the specs of the experts' projections gate, up and down, under ``names``."""
    gate, up, down = names
    D, F, E = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_experts
    return {
        gate: LinearSpec(D, F, axes=("mlp", "embed"), num_experts=E),
        up: LinearSpec(D, F, axes=("mlp", "embed"), num_experts=E),
        down: LinearSpec(F, D, axes=("embed", "mlp"), num_experts=E),
    }


def pick_by_softmax(logits: jax.Array, k: int, *, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """Pick each token's k experts and their weights: the largest of a softmax over all.

    Args:
        logits: [T, E] float32.
        k: Experts a token.
        normalise: Whether the k weights are divided by their sum.

    Returns:
        Weights [T, k] float32 and experts [T, k] int32.
    """
    with jax.named_scope("router"):
        weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), k)
        if normalise:
            weights /= weights.sum(axis=-1, keepdims=True)
        return weights, experts


def pick_by_sigmoid(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Pick each token's k experts by their logits, weighted by the sigmoid of these.

    Args:
        logits: [T, E] float32.
        k: Experts a token.

    Returns:
        Weights [T, k] float32 and experts [T, k] int32.
    """
    with jax.named_scope("router"):
        largest, experts = jax.lax.top_k(logits, k)
        return jax.nn.sigmoid(largest), experts


def mix_experts(
    p: Mapping[str, Any],
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    *,
    hidden_act: str,
    names: Sequence[str] = EXPERT_NAMES,
    is_input_weighted: bool = False,
) -> jax.Array:
    """Return the weighted sum of what each token's experts make of it.

    Args:
        p: The experts' leaves, under ``names``.
        x: [T, D].
        weights: [T, k] float32.
        experts: [T, k] int32.
        hidden_act: A key of ACTIVATIONS.
        names: Of gate, up and down.
        is_input_weighted: Whether the weight is on what goes into an expert, as in Llama-4, rather
            than on what it gives.

    Returns:
        [T, D] in x's dtype.
    """
    leaves = tuple(p[name] for name in names)
    mix = partial(_mix, hidden_act=hidden_act, is_input_weighted=is_input_weighted)
    with jax.named_scope("experts"):
        if platform.tensor_shards() == 1:
            return mix(leaves, x, weights, experts)
        # Each device has a part of every expert's F, and sums over it: XLA does not divide the
        # products of groups by itself.
        whole = PartitionSpec()  # type: ignore[no-untyped-call]
        spread = jax.shard_map(
            lambda *args: jax.lax.psum(mix(*args), platform.TENSOR_AXIS),
            mesh=platform.mesh(),
            in_specs=(tuple(leaf.partition() for leaf in leaves), whole, whole, whole),
            out_specs=whole,
            check_vma=False,
        )
        y: jax.Array = spread(leaves, x, weights, experts)
        return y


def _mix(
    leaves: tuple[Any, Any, Any],
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    *,
    hidden_act: str,
    is_input_weighted: bool,
) -> jax.Array:
    """Do what ``mix_experts`` does, with the part of F that the leaves hold."""
    T, k = experts.shape
    gate, up, down = leaves
    order = jnp.argsort(experts.reshape(-1), stable=True)  # [T * k]
    sizes = jnp.zeros(gate.num_experts, jnp.int32).at[experts.reshape(-1)].add(1)
    scale = weights.reshape(-1)[order][:, None]  # [T * k, 1]
    rows = x[order // k]  # [T * k, D]
    if is_input_weighted:
        rows = (rows * scale).astype(x.dtype)
    hidden = ACTIVATIONS[hidden_act](gate(rows, sizes).astype(jnp.float32))
    hidden *= up(rows, sizes).astype(jnp.float32)  # [T * k, F]
    out = down(hidden.astype(x.dtype), sizes).astype(jnp.float32)  # [T * k, D]
    if not is_input_weighted:
        out *= scale
    # Back to the tokens' order, so that each sums its own k in the order of their weights.
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return out.reshape(T, k, -1).sum(axis=1).astype(x.dtype)
