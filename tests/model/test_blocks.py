"""Blocks and leaves: float32 where it matters, the model's dtype in between."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexllm.model.blocks import ACTIVATIONS, embed, gated_mlp, rms_norm
from hexllm.model.hf_config import HfConfig
from hexllm.model.linear import Dense
from hexllm.model.loading import init_dummy_params
from hexllm.model.sharding import make_mesh
from hexllm.ops import kv_cache
from hexllm.plugins.models.llama import Llama
from hexllm.testing.steps import build_step


def test_rms_norm_is_float32_inside() -> None:
    # 8 large values: their squares and the small rest are lost in a bfloat16 sum
    x = np.concatenate([np.full(8, 100.0), np.full(4088, 1.0)]).astype(np.float32)
    weight = np.linspace(0.5, 1.5, 4096).astype(np.float32)
    exact = x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5) * weight
    out = rms_norm(jnp.asarray(x, jnp.bfloat16)[None], jnp.asarray(weight), 1e-5)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out[0].astype(jnp.float32), exact, rtol=2**-8)


@pytest.mark.torch
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.activations import ACT2FN

    x = np.linspace(-8, 8, 401).astype(np.float32)
    theirs = ACT2FN[name](torch.tensor(x)).numpy()
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), theirs, atol=2e-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_dense_accumulates_in_float32_and_keeps_the_dtype(has_bias: bool) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 2048)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((5, 2048)), jnp.bfloat16)
    b = jnp.asarray(rng.standard_normal(5), jnp.bfloat16) if has_bias else None
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    exact = exact + np.asarray(b, np.float64) if has_bias else exact
    y = Dense(weight=w, bias=b)(x, None)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8, atol=1e-2)
    wide = Dense(weight=w, bias=b, out_dtype="float32")(x, None)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, rtol=1e-4, atol=1e-3)


def test_gated_mlp() -> None:
    rng = np.random.default_rng(0)
    gate, up, down = (rng.standard_normal(s).astype(np.float32) for s in ((6, 4), (6, 4), (4, 6)))
    x = rng.standard_normal((3, 4)).astype(np.float32)
    names = ("gate_proj", "up_proj", "down_proj")
    p = {
        name: Dense(weight=jnp.asarray(w)) for name, w in zip(names, (gate, up, down), strict=True)
    }
    step: Any = None
    y = gated_mlp(p, jnp.asarray(x), step, hidden_act="relu")
    np.testing.assert_allclose(
        y, (np.maximum(x @ gate.T, 0) * (x @ up.T)) @ down.T, rtol=1e-4, atol=1e-5
    )


def test_an_id_out_of_range_embeds_to_numbers() -> None:
    weight = jnp.arange(6.0).reshape(3, 2)
    out = embed(weight, jnp.asarray([0, 2, 99], jnp.int32))
    np.testing.assert_array_equal(out, [[0, 1], [4, 5], [4, 5]])


def test_rotary_tables_are_computed_once_a_step() -> None:
    """In the compiled program too, where XLA's CPU back end would repeat them for every use."""
    family = Llama()
    counts = []
    for num_layers in (1, 4):
        cfg = family.config(
            HfConfig(
                {
                    "vocab_size": 16,
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_hidden_layers": num_layers,
                    "num_attention_heads": 2,
                    "rope_scaling": {"type": "dynamic", "factor": 2.0},
                },
                "config.json",
            )
        )
        params = init_dummy_params(family, cfg, dtype=jnp.float32, mesh=make_mesh(), seed=0)
        kv = tuple(kv_cache.allocate(8, 4, 2, 8, jnp.float32) for _ in range(num_layers))
        step = build_step([(0, 3), (0, 2)], [[1], [2]], 32)
        forward = jax.jit(family.forward, static_argnums=0)
        text = forward.lower(cfg, params, jnp.zeros(5, jnp.int32), kv, step).compile().as_text()
        counts.append((text.count(" cosine("), text.count(" sine(")))
    assert counts[0] == counts[1]
    assert min(counts[0]) >= 1
