"""What a step's programs are, from shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexllm.core.errors import ConfigError
from hexllm.engine.buckets import StepShape
from hexllm.engine.programs import Programs
from hexllm.model.hf_config import HfConfig
from hexllm.model.loading import init_dummy_params
from hexllm.model.sharding import make_mesh
from hexllm.plugins.models.llama import Llama
from tests.engine.tiny import CONFIG

DECODE = StepShape(tokens=4, seqs=4, blocks=3, max_query_len=1)


def make_programs(**changes):
    family = Llama()
    cfg = family.config(HfConfig({**CONFIG, **changes}, "test"))
    programs = Programs(family, cfg, make_mesh(), "float32", block_size=8, num_slots=6)
    return programs, cfg


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "tie_word_embeddings": True}])
def test_shapes_are_those_of_what_is_loaded(changes):
    programs, cfg = make_programs(**changes)
    params = init_dummy_params(programs.family, cfg, dtype="float32", mesh=programs.mesh, seed=0)
    programs.arrange(params)
    shapes = programs.param_shapes()
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(params), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)
    assert programs.param_bytes() == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_a_block_takes_what_an_allocated_one_does():
    programs, _ = make_programs()
    kv = programs.allocate_kv(10)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kv)) == 10 * programs.bytes_per_block()
    for shape, array in zip(
        jax.tree.leaves(programs.kv_shapes(10)), jax.tree.leaves(kv), strict=True
    ):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert not np.any(np.asarray(array))


def test_a_program_lowered_from_shapes_runs():
    programs, cfg = make_programs()
    kv = programs.allocate_kv(5)
    step = programs.lower_step(DECODE, programs.param_shapes(), programs.kv_shapes(5)).compile()
    sampler = programs.lower_sample(DECODE.seqs).compile()
    params = init_dummy_params(programs.family, cfg, dtype="float32", mesh=programs.mesh, seed=0)
    programs.arrange(params)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.args_info[0][2:])
    last, tokens, batch = jax.tree.map(lambda x: jnp.asarray(x), zeros)
    logits, kv = step(params, kv, last, tokens, batch)
    assert logits.shape == (4, cfg.vocab_size)
    rows, last, slots = (
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), part)
        for part in sampler.args_info[0][1:]
    )
    sampled, _ = sampler(logits, rows, last, slots)
    assert np.array_equal(sampled.tokens, np.argmax(logits, axis=1))


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_loaded():
    family = Llama()
    cfg = family.config(HfConfig(CONFIG, "some/model"))
    mesh = jax.sharding.AbstractMesh((3,), ("tensor",))
    with pytest.raises(ConfigError) as refusal:
        Programs(family, cfg, mesh, "float32", block_size=8, num_slots=6)
    assert str(refusal.value) == (
        "tensor_parallel_size=3 does not divide num_attention_heads=4 (some/model). Use 1, 2 or 4."
    )
