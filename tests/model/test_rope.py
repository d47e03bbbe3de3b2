"""Every rotary embedding against transformers' own, in each of its spellings."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexllm.core.errors import UnsupportedConfigError
from hexllm.model.hf_config import HfConfig
from hexllm.model.rope import inverse_frequencies, rope_tables, rotate
from hexllm.model.rope_config import RopeConfig, read_rope
from hexllm.testing.steps import bare_step

MAX = 4096
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 50 for i in range(32)],
    "long_factor": [1.5 + i * 1.7 for i in range(32)],
    "original_max_position_embeddings": 1024,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-int": {"rope_type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic-8": {"rope_type": "dynamic", "factor": 8.0},
    "llama3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "llama3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.9,
        "original_max_position_embeddings": 1024,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.1,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "yarn-mscale-one": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.707,
        "original_max_position_embeddings": 1024,
    },
    "yarn-smooth": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {**LONGROPE},
    "longrope-factor": {**LONGROPE, "factor": 16.0},
    "longrope-attention": {**LONGROPE, "attention_factor": 1.25},
}
POSITIONS = np.unique(np.geomspace(1, 100_000, 400).astype(int)) - 1


def read(data: dict[str, Any], **kwargs: Any) -> RopeConfig:
    hf = HfConfig(data, "config.json")
    rope = read_rope(
        hf,
        head_dim=data.get("head_dim", 64),
        max_position_embeddings=data.get("max_position_embeddings", MAX),
        **kwargs,
    )
    hf.check({"head_dim", "max_position_embeddings"}, family="test")
    return rope


def spellings(scaling: dict[str, Any], theta: float) -> dict[str, dict[str, Any]]:
    old = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    return {
        "old, theta outside": {"rope_scaling": old, "rope_theta": theta},
        "old, rope_type": {"rope_scaling": scaling, "rope_theta": theta},
        "old, both names": {"rope_scaling": {**old, **scaling}, "rope_theta": theta},
        "new, theta inside": {"rope_parameters": {**scaling, "rope_theta": theta}},
        "new, theta outside": {"rope_parameters": scaling, "rope_theta": theta},
        "new, theta in both": {
            "rope_parameters": {**scaling, "rope_theta": theta},
            "rope_theta": 77.0,
        },
    }


def assert_tables_close(
    ours: Any, theirs: Any, inv_freq: np.ndarray, positions: Any, *, relative: float
) -> None:
    """Compare cos or sin, allowing what float32 loses of the phase (a few units in its last)."""
    phases = np.abs(np.asarray(positions, np.float64)[:, None] * inv_freq[None])
    tolerance = relative * phases + 3e-6
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
    assert (difference <= tolerance).all(), (difference / tolerance).max()


@pytest.mark.torch
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_in_every_spelling(name: str, theta: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"head_dim": 64, "max_position_embeddings": MAX}
    configs = {
        spelling: read({**sizes, **copy.deepcopy(data)})
        for spelling, data in spellings(CASES[name], theta).items()
    }
    assert len(set(configs.values())) == 1, configs
    rope = configs["new, theta inside"]
    # The reference blends YaRN's two frequencies, up to `factor` apart, in float32.
    relative = 4e-7 + (6e-8 * rope.factor if rope.rope_type == "yarn" else 0)

    for data in spellings(CASES[name], theta).values():
        reference = LlamaRotaryEmbedding(
            transformers.LlamaConfig(
                hidden_size=256, num_attention_heads=4, **sizes, **copy.deepcopy(data)
            )
        )
        # One sequence within the trained context, one up to 100k, each in its own forward.
        for positions in (POSITIONS[POSITIONS < 900], POSITIONS):
            seq_len = int(positions.max()) + 1
            step = bare_step(positions, [seq_len], [0, len(positions)])
            cos, sin = jax.jit(rope_tables, static_argnums=0)(rope, step)
            theirs = reference(torch.zeros(1), torch.tensor(positions)[None])
            inv_freq = reference.inv_freq.double().numpy()
            for ours, other in zip((cos, sin), theirs, strict=True):
                assert ours.dtype == jnp.float32
                assert_tables_close(
                    ours, other[0, :, :32].numpy(), inv_freq, positions, relative=relative
                )


@pytest.mark.torch
@pytest.mark.parametrize("name", ["linear", "llama3.1", "yarn", "yarn-smooth"])
@pytest.mark.parametrize("factor", [0.25, 0.5])
def test_partial_rotary_equals_transformers(name: str, factor: float) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**CASES[name], "rope_theta": 10_000.0, "partial_rotary_factor": factor}
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=MAX,
        rope_parameters=dict(parameters),
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    inside = read({"rope_parameters": parameters}, is_partial=True)
    outside = read({"rope_scaling": CASES[name], "partial_rotary_factor": factor}, is_partial=True)
    assert inside == outside
    assert inside.rotary_dim == 64 * factor
    np.testing.assert_allclose(inverse_frequencies(inside), theirs.numpy(), rtol=1e-6)
    assert inside.attention_factor == pytest.approx(attention_factor)


@pytest.mark.torch
def test_rotate_equals_transformers_whole_and_partial() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    rng = np.random.default_rng(0)
    q = rng.standard_normal((5, 3, 16)).astype(np.float32)  # [T, N, H]
    for rotary_dim in (16, 8):
        phases = rng.uniform(-9, 9, (5, rotary_dim // 2)).astype(np.float32)
        cos, sin = np.cos(phases), np.sin(phases)
        wide = [torch.tensor(np.concatenate([t, t], -1))[None] for t in (cos, sin)]
        theirs, _ = apply_rotary_pos_emb(
            torch.tensor(q.swapaxes(0, 1))[None], torch.tensor(q.swapaxes(0, 1))[None], *wide
        )
        ours = rotate(jnp.asarray(q), jnp.asarray(cos), jnp.asarray(sin))
        np.testing.assert_allclose(ours, theirs[0].numpy().swapaxes(0, 1), atol=1e-6)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_each_token_uses_the_length_of_its_own_sequence(name: str) -> None:
    rope = read({"rope_scaling": CASES[name]})
    tables = jax.jit(rope_tables, static_argnums=0)
    short = bare_step(np.arange(5), [5], [0, 5])
    long = bare_step(np.arange(9000, 9004), [9004], [0, 4])
    both = bare_step(
        np.concatenate([np.arange(5), np.arange(9000, 9004), np.zeros(3)]),
        [5, 9004, 0, 0],
        [0, 5, 9, 9, 9],
    )
    for alone, part in ((short, slice(0, 5)), (long, slice(5, 9))):
        for a, b in zip(tables(rope, alone), tables(rope, both), strict=True):
            np.testing.assert_array_equal(a, b[part])
    # and the length does matter: the same positions in a longer sequence turn otherwise
    stretched = bare_step(np.arange(5), [9004], [0, 5])
    assert np.abs(tables(rope, stretched)[1] - tables(rope, short)[1]).max() > 0.01


def test_phases_are_float32_in_a_bfloat16_model() -> None:
    rope = read({"rope_theta": 10_000.0})
    step = bare_step(np.array([99_999, 100_000]), [100_001], [0, 2])
    cos, _ = rope_tables(rope, step)
    exact = np.cos(np.array([99_999.0, 100_000.0]))
    np.testing.assert_allclose(cos[:, 0], exact, atol=1e-4)  # the first pair turns 1 rad a token
    x = jnp.ones((2, 1, 64), jnp.bfloat16)
    assert rotate(x, *rope_tables(rope, step)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"rope_scaling": {"type": "su"}}, ["rope_scaling.type='su'", "longrope"]),
        ({"rope_parameters": {"rope_type": "proportional"}}, ["rope_parameters.rope_type"]),
        ({"rope_scaling": {"type": 3}}, ["rope_scaling.type=3"]),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            ["rope_scaling.type='linear'", "yarn"],
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            ["rope_scaling", "rope_parameters"],
        ),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, ["rope_scaling.factor=2.0"]),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, ["rope_scaling.factor=-2.0"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["rope_scaling.factor='2'"]),
        ({"rope_theta": 0}, ["rope_theta=0"]),
        ({"rope_theta": True}, ["rope_theta=True"]),
        (
            {"rope_scaling": {**CASES["llama3.1"], "high_freq_factor": 0.9}},
            ["high_freq_factor=0.9", "low_freq_factor=1"],
        ),
        (
            {"rope_scaling": {**CASES["yarn"], "truncate": "yes"}},
            ["rope_scaling.truncate='yes'"],
        ),
        (
            {"rope_scaling": {**CASES["longrope"], "long_factor": [1.0]}},
            ["long_factor=[1.0]", "32 numbers"],
        ),
        (
            {"rope_scaling": {**CASES["longrope"], "short_factor": ["a"] * 32}},
            ["short_factor", "numbers"],
        ),
        ({"rope_scaling": {**CASES["yarn"], "zeta": 1}}, ["rope_scaling.zeta=1"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["rope_parameters.full_attention"],
        ),
    ],
)
def test_refuses(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        read(data)
    for word in words:
        assert word in str(caught.value)


def test_an_outer_original_length_wins_as_in_transformers() -> None:
    rope = read(
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True},
            "original_max_position_embeddings": 256,
        }
    )
    assert rope.original_max_position_embeddings == 256
