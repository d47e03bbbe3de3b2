"""Flags over config.json: the window, the length; and end tokens wherever a file has them."""

from __future__ import annotations

import functools
import json
import logging

import pytest

from hexllm.core.errors import ConfigError
from hexllm.core.plugins import load_plugins
from hexllm.core.settings.plugin_table import PluginSettings
from hexllm.engine.overrides import configure, end_tokens
from hexllm.model.family import DecoderFamily
from hexllm.model.hf_config import HfConfig
from tests.engine.tiny import CONFIG, make_engine, make_settings, request, run, write_model

QWEN = {"use_sliding_window": True, "max_window_layers": 1}

#: Architecture -> keys of a configuration with a window of 30 in some layers or all.
WINDOWED = {
    "MistralForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Phi3ForCausalLM": {},
    "Gemma2ForCausalLM": {"head_dim": 8},
    "Gemma3ForCausalLM": {"head_dim": 8, "sliding_window_pattern": 2},
    "Qwen2ForCausalLM": QWEN,
    "Qwen3ForCausalLM": QWEN,
    "Qwen3MoeForCausalLM": {"use_sliding_window": True, "num_experts": 4, "num_experts_per_tok": 2},
}

#: Architecture -> keys of a configuration in which no layer has a window.
FULL = {
    "LlamaForCausalLM": {},
    "GemmaForCausalLM": {"head_dim": 8},
    "Olmo2ForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": None},
    "MixtralForCausalLM": {"sliding_window": None, "num_local_experts": 4},
    "Phi3ForCausalLM": {"sliding_window": None},
    "Qwen2ForCausalLM": {"sliding_window": 30, "use_sliding_window": False},
    "Qwen3ForCausalLM": {**QWEN, "sliding_window": 30, "max_window_layers": 2},
    "Llama4ForCausalLM": {"attention_chunk_size": 30, "num_local_experts": 4},
}

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@functools.cache
def plugins():
    return load_plugins(PluginSettings())


def data_of(architecture, **keys):
    return {**CONFIG, "architectures": [architecture], "model_type": "", **keys}


def nested(architecture, **keys):
    """The same inside a multimodal checkpoint's configuration."""
    text = data_of(architecture, **keys)
    return {"architectures": text.pop("architectures"), "model_type": "", "text_config": text}


def read(data, *flags):
    family = plugins().resolve_model_family(data).build(None)
    return configure(family, data, "tiny", make_settings("tiny", *flags))


@pytest.mark.parametrize("architecture", WINDOWED)
@pytest.mark.parametrize("window", [1, 7, 4096])
def test_the_flag_is_the_key_with_another_value(architecture, window):
    keys = WINDOWED[architecture]
    asked = read(data_of(architecture, sliding_window=30, **keys), f"--sliding_window={window}")
    assert asked == read(data_of(architecture, sliding_window=window, **keys))
    assert window in asked.windows
    full = [w is None for w in read(data_of(architecture, sliding_window=30, **keys)).windows]
    assert [w is None for w in asked.windows] == full


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"]
)
def test_the_flag_reaches_a_multimodal_model_s_language_model(architecture):
    keys = {"head_dim": 8, "sliding_window": 30}
    asked = read(nested(architecture, **keys), "--sliding_window=7")
    assert 7 in asked.windows
    assert asked == read(nested(architecture, **keys | {"sliding_window": 7}))


@pytest.mark.parametrize("architecture", FULL)
def test_a_model_without_a_window_refuses_the_flag(architecture):
    with pytest.raises(ConfigError) as caught:
        read(data_of(architecture, **FULL[architecture]), "--sliding_window=7")
    for word in ("sliding_window=7", "tiny", "no layer", "family", "Leave --sliding_window out"):
        assert word in str(caught.value)


def test_a_family_with_windows_from_elsewhere_refuses_the_flag():
    class Odd(DecoderFamily):
        name = "odd"

        def read_config(self, hf):
            hf.get("sliding_window")
            mistral = plugins().resolve_model_family(data_of("MistralForCausalLM")).build(None)
            return mistral.read_config(HfConfig({**hf.raw(), "sliding_window": 5}, "tiny"))

        def config(self, hf):
            return self.read_config(hf)

    settings = make_settings("tiny", "--sliding_window=7")
    with pytest.raises(ConfigError, match=r"sliding_window=7 cannot be honoured: family 'odd'"):
        configure(Odd(), data_of("MistralForCausalLM"), "tiny", settings)


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("limit", [16, 64, 256])
def test_the_length_is_the_flag_s_wherever_the_file_has_its_own(multimodal, limit):
    """Longer than the window, shorter, and equal to the file's."""
    make, architecture = (
        (nested, "Gemma3ForConditionalGeneration") if multimodal else (data_of, "Gemma3ForCausalLM")
    )
    data = make(architecture, head_dim=8, sliding_window=30, sliding_window_pattern=2)
    cfg = read(data, f"--max_model_len={limit}")
    assert cfg.max_position_embeddings == limit
    assert cfg.windows == (30, None)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
        ),
    ],
    ids=["dynamic", "yarn", "longrope"],
)
def test_another_length_does_not_change_the_rotary_embedding(architecture, keys):
    data = data_of(architecture, **keys)
    plain = read(data)
    assert plain.rope.attention_factor > 1 or plain.rope.rope_type == "dynamic"
    for limit in (32, 512):
        assert read(data, f"--max_model_len={limit}").rope == plain.rope


def test_a_length_past_what_the_model_is_made_for_is_warned_of(caplog):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    with caplog.at_level(logging.WARNING):
        read(data_of("LlamaForCausalLM"), "--max_model_len=256")
        read(data_of("LlamaForCausalLM", rope_scaling=yarn), "--max_model_len=1024")
        assert not caplog.records
        read(data_of("LlamaForCausalLM"), "--max_model_len=257")
        read(nested("Mistral3ForConditionalGeneration"), "--max_model_len=300")
    assert [r.args[0] for r in caplog.records] == [257, 300]
    assert "worse past 256 tokens" in caplog.text


def test_the_flag_changes_the_answers_as_the_key_does(tmp_path):
    def answer(name, window, *flags):
        (tmp_path / name).mkdir()
        directory = write_model(
            tmp_path / name, architectures=["MistralForCausalLM"], sliding_window=window
        )
        engine = make_engine(directory, "--no-warmup", *flags)
        [(tokens, logprobs, _)] = run(
            engine, request("a", [i % 90 for i in range(60)], 8, eos=(), logprobs=0)
        )
        return tokens, [entry.logprob for entry in logprobs]

    asked = answer("flag", 40, "--sliding_window=3")
    assert asked == answer("key", 3)
    assert asked[1] != pytest.approx(answer("neither", 40)[1], abs=1e-5)


@pytest.mark.parametrize("length", [8, 100])
def test_a_chunk_longer_or_shorter_than_max_model_len_is_served(tmp_path, length):
    """Chunks of 24 tokens in a multimodal configuration: the limit is no part of the model."""

    def answer(*flags):
        data = nested(
            "Llama4ForConditionalGeneration",
            head_dim=8,
            attention_chunk_size=24,
            num_local_experts=4,
            intermediate_size_mlp=40,
        )
        (tmp_path / "config.json").write_text(json.dumps(data))
        engine = make_engine(tmp_path, "--no-warmup", *flags)
        return engine, run(engine, request("a", range(length - 6), 6, eos=()))

    engine, answers = answer(f"--max_model_len={length}")
    assert engine.info.max_model_len == length
    assert answers[0][2] == "length"
    assert answers == answer()[1]


def test_end_tokens_are_the_union_wherever_they_stand():
    text = {"text_config": {"eos_token_id": [1, 106]}}
    assert end_tokens({"eos_token_id": 2}, None) == (2,)
    assert end_tokens({"eos_token_id": [2, 9]}, {"eos_token_id": 3}) == (2, 3, 9)
    assert end_tokens(text, {"eos_token_id": None}) == (1, 106)
    assert end_tokens({"eos_token_id": 5, **text}, {"eos_token_id": 7}) == (1, 5, 7, 106)
    assert end_tokens({"text_config": None}, {}) == ()
