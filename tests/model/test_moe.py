"""Routers and experts, against every token through every expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexllm.core.errors import UnsupportedConfigError
from hexllm.model import moe
from hexllm.model.hf_config import HfConfig
from hexllm.model.linear import Dense, DenseExperts, dense_leaf
from hexllm.model.specs import LinearSpec

T, D, F, E = 11, 16, 24, 5


def make(seed: int, dtype: Any = jnp.float32) -> tuple[dict[str, DenseExperts], jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"gate_proj": (E, F, D), "up_proj": (E, F, D), "down_proj": (E, D, F)}
    leaves = {
        name: DenseExperts(jnp.asarray(rng.standard_normal(shape) * 0.3, dtype))
        for name, shape in shapes.items()
    }
    return leaves, jnp.asarray(rng.standard_normal((T, D)), dtype)


def dense(
    p: dict[str, DenseExperts], x: Any, weights: Any, experts: Any, is_input_weighted: bool
) -> np.ndarray:
    gate, up, down = (np.asarray(p[name].weight, np.float64) for name in moe.EXPERT_NAMES)
    x, weights, experts = np.asarray(x, np.float64), np.asarray(weights), np.asarray(experts)
    out = np.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], experts[t], strict=True):
            row = x[t] * weight if is_input_weighted else x[t]
            g = gate[e] @ row
            y = down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row))
            out[t] += y if is_input_weighted else y * weight
    return out


@pytest.mark.parametrize("is_input_weighted", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_mixed_experts_equal_a_dense_reference(k: int, is_input_weighted: bool) -> None:
    p, x = make(k)
    logits = jnp.asarray(np.random.default_rng(9).standard_normal((T, E)), jnp.float32)
    weights, experts = moe.pick_by_softmax(logits, k, normalise=True)
    got = jax.jit(
        lambda *a: moe.mix_experts(*a, hidden_act="silu", is_input_weighted=is_input_weighted)
    )(p, x, weights, experts)
    expected = dense(p, x, weights, experts, is_input_weighted)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_token_does_not_depend_on_the_others() -> None:
    p, x = make(0)
    weights, experts = moe.pick_by_softmax(
        jax.random.normal(jax.random.key(0), (T, E)), 2, normalise=True
    )
    together = moe.mix_experts(p, x, weights, experts, hidden_act="silu")
    other = x.at[1:].set(jnp.inf)
    moved = experts.at[1:].set(experts[0])  # all crowd into the first token's experts
    beside = moe.mix_experts(p, other, weights, moved, hidden_act="silu")
    np.testing.assert_allclose(beside[0], together[0], rtol=1e-6)


def test_picks() -> None:
    logits = jnp.asarray([[0.0, 3.0, 1.0, -1.0]])
    soft = np.exp(logits[0]) / np.exp(logits[0]).sum()
    weights, experts = moe.pick_by_softmax(logits, 2, normalise=False)
    np.testing.assert_array_equal(experts, [[1, 2]])
    np.testing.assert_allclose(weights, [[soft[1], soft[2]]], rtol=1e-6)
    weights, _ = moe.pick_by_softmax(logits, 2, normalise=True)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)
    weights, experts = moe.pick_by_sigmoid(logits, 1)
    np.testing.assert_array_equal(experts, [[1]])
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(-3.0))]], rtol=1e-6)


def test_bfloat16_stays_bfloat16_and_near() -> None:
    p, x = make(3, jnp.bfloat16)
    weights, experts = moe.pick_by_softmax(
        jax.random.normal(jax.random.key(1), (T, E)), 2, normalise=True
    )
    got = moe.mix_experts(p, x, weights, experts, hidden_act="silu")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        got.astype(jnp.float32), dense(p, x, weights, experts, False), rtol=0.05, atol=0.1
    )


def test_leaves_of_specs() -> None:
    assert isinstance(dense_leaf("a", LinearSpec(2, 3)), Dense)
    leaf = dense_leaf("a", LinearSpec(2, 3, axes=("mlp", "embed"), num_experts=4))
    assert leaf.weight.shape == (4, 3, 2)
    assert leaf.weight.axes == ("expert", "mlp", "embed")
    with pytest.raises(ValueError, match="biases"):
        dense_leaf("a", LinearSpec(2, 3, bias=True, num_experts=4))


def test_more_experts_a_token_than_there_are() -> None:
    hf = HfConfig({"num_local_experts": 2, "num_experts_per_tok": 3}, "config.json")
    with pytest.raises(UnsupportedConfigError, match=r"num_experts_per_tok=3.*num_local_experts=2"):
        moe.read_experts(hf, count=8, per_tok=2)
