"""Real ``config.json`` files are served as they are, and mean what transformers takes them for.

One of each kind of file, every key of it: those that matter to nobody must not stop a model.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from hexllm.core.plugins import load_plugins
from hexllm.core.settings.plugin_table import PluginSettings
from hexllm.engine.overrides import end_tokens
from hexllm.model.hf_config import HfConfig
from hexllm.model.rope import inverse_frequencies

REAL_CONFIGS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "real_configs").glob("*.json"))
}
LLAMA_4_TEXT = "text-only-fine-tune-of-Llama-4-Scout"


@functools.cache
def plugins():
    return load_plugins(PluginSettings())


def read(name):
    data = REAL_CONFIGS[name]
    return plugins().resolve_model_family(data).build(None).config(HfConfig(data, name))


def transformers_config(name):
    data = dict(REAL_CONFIGS[name])
    if "attn_temperature_tuning" in data:  # early files' 4; transformers 5 wants the truth value
        data["attn_temperature_tuning"] = True
    cls = type(AutoConfig.for_model(data["model_type"]))
    return cls.from_dict(data).get_text_config()


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_every_key_is_read_or_known_to_be_without_effect(name):
    cfg = read(name)
    theirs = transformers_config(name)
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ):
        assert getattr(cfg, key) == getattr(theirs, key), key
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert cfg.head_dim == head_dim
    kinds = getattr(theirs, "layer_types", None)
    if kinds is not None:
        assert [w is not None for w in cfg.windows] == [k == "sliding_attention" for k in kinds]
        assert {w for w in cfg.windows if w} <= {getattr(theirs, "sliding_window", None)}


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_its_end_tokens_are_found(name):
    data = REAL_CONFIGS[name]
    ends = end_tokens(data)
    expected = data.get("eos_token_id", data.get("text_config", {}).get("eos_token_id", ()))
    assert set(ends) == set(expected if isinstance(expected, list | tuple) else [expected])
    assert ends or "Mistral-Small-3.1" in name  # whose tokenizer and generation_config say it


@pytest.mark.torch
@pytest.mark.parametrize("name", [n for n in REAL_CONFIGS if "Llama-" in n])
def test_its_frequencies_are_transformers(name):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = read(name).rope
    if rope.rope_type == "default":
        expected = rope.rope_theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    else:
        theirs, _ = ROPE_INIT_FUNCTIONS[rope.rope_type](transformers_config(name), "cpu")
        expected = theirs.numpy()
    np.testing.assert_allclose(inverse_frequencies(rope), expected, rtol=2e-5)


def test_a_number_in_place_of_a_truth_value_is_taken_for_true():
    assert REAL_CONFIGS[LLAMA_4_TEXT]["attn_temperature_tuning"] == 4
    assert read(LLAMA_4_TEXT).attn_scale == 0.1


def test_a_llama_4_whose_bands_meet_has_a_step_in_place_of_a_ramp():
    """Scout's file: low_freq_factor and high_freq_factor are both 1."""
    rope = read("Llama-4-Scout-17B-16E-Instruct").rope
    plain = rope.rope_theta ** -(np.arange(0, 128, 2) / 128)
    slowed = inverse_frequencies(rope) / plain
    turns = 8192 * plain / (2 * math.pi)
    np.testing.assert_allclose(slowed, np.where(turns < 1, 1 / 16, 1))
    assert 0 < np.sum(turns < 1) < 64
