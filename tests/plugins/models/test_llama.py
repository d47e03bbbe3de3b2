"""The Llama family: the conformance kit, and what only this family has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest

from hexllm.core.errors import UnsupportedConfigError
from hexllm.model.hf_config import HfConfig
from hexllm.model.loading import init_dummy_params, load_params
from hexllm.model.sharding import make_mesh
from hexllm.model.specs import flatten
from hexllm.plugins.models import hexllm_model_families
from hexllm.plugins.models.llama import Llama
from hexllm.testing import Driver, ModelFamilyTests
from hexllm.testing.checkpoints import write_checkpoint
from hexllm.testing.synthetic import make_tensors, write_model
from tests.families.small import small

if TYPE_CHECKING:
    from pathlib import Path

FAMILY = Llama()
BASE = small("LlamaForCausalLM", "llama", rms_norm_eps=1e-5)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


class TestLlama(ModelFamilyTests):
    family = Llama
    hf_config = BASE
    configs = {
        "mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
        "mha-default-heads": {"num_key_value_heads": None},
        "head-dim": {"head_dim": 12},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "gelu": {"hidden_act": "gelu"},
        "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        "llama3-new": {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        "yarn": {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        # Within the trained length dynamic is the default; test_rope.py has the lengths beyond.
        "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "longrope": {
            "max_position_embeddings": 16,
            "rope_scaling": {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": 8,
            },
        },
    }


def read(config: dict[str, Any], source: str = "config.json") -> Any:
    return FAMILY.config(HfConfig(config, source))


def tokens_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], length).tolist()


def made_up(name: str, directory: Path) -> tuple[Any, Any]:
    config = {**BASE, **TestLlama.configs[name]}
    cfg = read(config)
    checkpoint = write_model(FAMILY, cfg, config, directory)
    return cfg, load_params(FAMILY, cfg, checkpoint, dtype=jnp.float32, mesh=make_mesh())


@pytest.mark.torch
@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_decode_past_the_trained_length_equals_transformers_with_its_cache(
    name: str, tmp_path: Path
) -> None:
    import torch
    import transformers

    cfg, params = made_up(name, tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    limit = 8 if name == "longrope" else 128
    tokens = tokens_of(limit + 6, seed=5)
    driver = Driver(FAMILY, cfg, params, num_seqs=1, max_len=limit + 8)
    ours = [driver.feed({0: tokens[: limit - 1]})[0]]
    ours += [driver.feed({0: [token]})[0] for token in tokens[limit - 1 :]]
    with torch.no_grad():
        out = model(torch.tensor([tokens[: limit - 1]]), use_cache=True)
        theirs = [out.logits[0].numpy()]
        for token in tokens[limit - 1 :]:
            out = model(torch.tensor([[token]]), cache=out.past_key_values)
            theirs.append(out.logits[0].numpy())
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), atol=1e-4)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_a_neighbour_past_the_trained_length_changes_nothing(name: str, tmp_path: Path) -> None:
    cfg, params = made_up(name, tmp_path)
    tokens = tokens_of(6, seed=6)
    long = tokens_of(150, seed=7)  # stretches its own frequencies only
    alone, beside = (
        Driver(FAMILY, cfg, params, num_seqs=3, max_len=160).feed(
            {**others, 1: tokens}, pad_to=(180, 5)
        )[1]
        for others in ({}, {0: long})
    )
    np.testing.assert_allclose(beside, alone, atol=2e-5)


def test_a_decoder_saved_without_its_head_loads(tmp_path: Path) -> None:
    cfg = read({**BASE, "tie_word_embeddings": True})
    tensors = make_tensors(FAMILY, cfg)  # what LlamaModel saves: names without "model."
    bare = {name.removeprefix("model."): array for name, array in tensors.items()}
    assert "embed_tokens.weight" in bare
    checkpoint = write_checkpoint(tmp_path, bare)
    params = load_params(FAMILY, cfg, checkpoint, dtype=jnp.float32, mesh=make_mesh())
    for name, array in flatten(params).items():
        np.testing.assert_array_equal(array, tensors[name])


def test_the_entry_names_this_class() -> None:
    (component,) = [c for c in hexllm_model_families() if c.name == "llama"]
    assert component.implementation == f"{Llama.__module__}:{Llama.__qualname__}"
    assert component.provides == ("LlamaForCausalLM",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"hidden_size": 34}, ["hidden_size=34", "num_attention_heads=4"]),
        ({"hidden_size": 36}, ["hidden_size=36", "head_dim 9", "even"]),
        ({"head_dim": 7}, ["head_dim=7", "even"]),
        ({"hidden_act": "mish"}, ["hidden_act='mish'", "silu"]),
        ({"hidden_size": None}, ["hidden_size=None"]),
        ({"vocab_size": "97"}, ["vocab_size='97'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings='no'"]),
        ({"num_attention_heads": True}, ["num_attention_heads=True"]),
        ({"rope_scaling": {"type": "mrope"}}, ["rope_scaling.type='mrope'", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, ["rope_scaling.x=1", "llama"]),
        ({"rope_scaling": [1]}, ["rope_scaling=[1]", "mapping"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"sliding_window": 16}, ["sliding_window=16", "llama"]),
        ({"layer_types": ["full_attention"] * 3}, ["layer_types", "num_hidden_layers=2"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "layer 1", "sliding_attention"],
        ),
        ({"logit_scale": 0.5}, ["logit_scale=0.5", "'llama'"]),
        ({"rope_interleaved": True}, ["rope_interleaved=True"]),
        ({"pretraining_tp": 2}, ["pretraining_tp=2"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config=", "awq"]),
    ],
)
def test_refuses_what_it_cannot_honour(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        read({**BASE, **change}, "models/x/config.json")
    for word in ["models/x/config.json", *words]:
        assert word in str(caught.value)


def test_missing_sizes_are_named() -> None:
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        config = {k: v for k, v in BASE.items() if k != key}
        with pytest.raises(UnsupportedConfigError, match=f"{key} is missing"):
            read(config)


def test_notes_of_real_checkpoints_are_accepted() -> None:
    # As SmolLM2, Llama 3.1 and Llama Guard 3 carry them.
    cfg = read(
        {
            **BASE,
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
            "torch_dtype": "bfloat16",
            "pretraining_tp": 1,
            "attention_dropout": 0.0,
            "eos_token_id": [128001, 128008],
            "use_cache": True,
            "rope_scaling": None,
            "layer_types": ["full_attention"] * 2,
        }
    )
    assert cfg.tie_word_embeddings is False
    assert cfg.rope.rope_type == "default"
    assert hash(cfg) == hash(read({**BASE}))


def test_kv_spec_and_dummy_shapes() -> None:
    cfg = read({**BASE, "head_dim": 12, "attention_bias": True})
    assert FAMILY.kv_spec(cfg, 0).num_kv_heads == 2
    assert FAMILY.kv_spec(cfg, 1).head_dim == 12
    assert FAMILY.kv_spec(cfg, 1).window is None
    params = init_dummy_params(FAMILY, cfg, dtype=jnp.bfloat16, mesh=make_mesh(), seed=0)
    shapes = {path: leaf.shape for path, leaf in flatten(params).items()}
    layer = "model.layers.1."
    assert shapes["model.embed_tokens.weight"] == (97, 32)
    assert shapes["lm_head.weight"] == (97, 32)
    assert shapes[layer + "self_attn.q_proj.weight"] == (48, 32)
    assert shapes[layer + "self_attn.k_proj.weight"] == (24, 32)
    assert shapes[layer + "self_attn.v_proj.bias"] == (24,)
    assert shapes[layer + "self_attn.o_proj.weight"] == (32, 48)
    assert shapes[layer + "mlp.down_proj.weight"] == (32, 56)
    assert shapes[layer + "post_attention_layernorm.weight"] == (32,)
    assert len(shapes) == 3 + 2 * (2 + 4 * 2 + 3)
    driver = Driver(FAMILY, cfg, params, num_seqs=1, dtype=jnp.bfloat16)
    logits = driver.feed({0: tokens_of(9, seed=0)})[0]
    assert np.isfinite(logits).all()
