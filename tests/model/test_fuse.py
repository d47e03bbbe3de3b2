import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexllm.model.fuse import Fused, InFused, fuse_projections, project
from hexllm.model.hf_config import HfConfig
from hexllm.model.linear import Dense
from hexllm.model.loading import init_dummy_params
from hexllm.model.sharding import make_mesh
from hexllm.plugins.models.llama import Llama
from hexllm.testing.steps import Driver
from tests.engine.tiny import CONFIG


def dense(rng, outputs, inputs=6, bias=False, **fields):
    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return Dense(draw(outputs, inputs), draw(outputs) if bias else None, **fields)


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_group_gives_what_each_of_it_gives(bias):
    rng = np.random.default_rng(0)
    names = ("q_proj", "k_proj", "v_proj")
    params = {
        name: dense(rng, size, bias=bias) for name, size in zip(names, (8, 4, 2), strict=True)
    }
    x = jnp.asarray(rng.standard_normal((5, 6)), jnp.float32)
    apart = project([params[name] for name in names], x, None)
    tree = {"layer": {**params, "o_proj": dense(rng, 6)}}
    fuse_projections(tree)
    fused = tree["layer"]
    assert isinstance(fused["q_proj"], Fused)
    assert fused["k_proj"] == fused["v_proj"] == InFused()
    assert isinstance(fused["o_proj"], Dense)
    together = project([fused[name] for name in names], x, None)
    for one, other in zip(apart, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "odd",
    [
        {"bias": True},
        {"out_dtype": "float32"},
        {"inputs": 7},
    ],
)
def test_linears_that_differ_stay_apart(odd):
    rng = np.random.default_rng(0)
    params = {"gate_proj": dense(rng, 4), "up_proj": dense(rng, 4, **odd)}
    fuse_projections(params)
    assert all(isinstance(leaf, Dense) for leaf in params.values())


def test_another_kind_of_leaf_stays_apart():
    params = {"gate_proj": dense(np.random.default_rng(0), 4), "up_proj": "quantized"}
    fuse_projections(params)
    assert params["up_proj"] == "quantized"


def test_a_model_gives_the_same_logits_and_keeps_its_size():
    family = Llama()
    cfg = family.config(HfConfig(CONFIG, "test"))
    params = init_dummy_params(family, cfg, dtype=jnp.float32, mesh=make_mesh(), seed=3)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    apart = Driver(family, cfg, params, 1).feed({0: prompt})[0]
    fuse_projections(params)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == size
    assert len(jax.tree.leaves(params)) < 3 + 9 * cfg.num_hidden_layers
    together = Driver(family, cfg, params, 1).feed({0: prompt})[0]
    np.testing.assert_allclose(apart, together, rtol=1e-4, atol=1e-5)
