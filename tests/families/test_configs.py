"""The three configurations that are served of each architecture differ in all that matters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.families.configs import ARCHITECTURES
from tests.families.spread import Spread

#: Longer than every window, chunk and original context: some prompts of every test are.
LONG_PROMPT = 70


@pytest.fixture(params=ARCHITECTURES)
def served(request: pytest.FixtureRequest) -> list[Any]:
    draw = ARCHITECTURES[request.param]
    return [draw(Spread(request.param, seed)).get_text_config() for seed in range(3)]


def values(configs: list[Any], key: str) -> set[Any]:
    return {getattr(config, key) for config in configs if hasattr(config, key)}


def ropes(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def test_heads_are_shared_in_all_ways_and_odd_in_number(served: list[Any]) -> None:
    heads = [(c.num_attention_heads, c.num_key_value_heads) for c in served]
    assert any(N == K for N, K in heads)
    assert any(1 < K < N for N, K in heads)
    assert any(K == 1 < N for N, K in heads)
    assert any(N % 2 for N, _ in heads)


def test_embeddings_are_tied_and_not(served: list[Any]) -> None:
    assert values(served, "tie_word_embeddings") == {True, False}


def test_mixtures_have_4_and_8_experts(served: list[Any]) -> None:
    assert values(served, "num_local_experts") in (set(), {4, 8})


def test_windows_are_shorter_than_a_prompt(served: list[Any]) -> None:
    model_type = served[0].model_type
    keys = {"attention_chunk_size"} if model_type == "llama4_text" else {"sliding_window"}
    found = [value for key in keys for value in values(served, key) if value]
    if model_type in ("llama", "gemma", "olmo2"):
        assert found == []
    elif not any(c.model_type == "mistral" and c.sliding_window is None for c in served):
        assert found
    assert all(value < LONG_PROMPT for value in found)


def test_rotary_embeddings_differ(served: list[Any]) -> None:
    assert len({ropes(config)["rope_type"] for config in served}) > 1
    for config in served:
        rope = ropes(config)
        if rope["rope_type"] == "longrope":
            assert rope["original_max_position_embeddings"] < LONG_PROMPT


def test_head_dim_is_not_always_hidden_size_over_heads(served: list[Any]) -> None:
    if served[0].model_type in ("qwen2", "phi3", "olmo2"):
        assert not any("head_dim" in c.to_dict() for c in served)
        return
    assert any(c.head_dim != c.hidden_size // c.num_attention_heads for c in served)


def test_spread_takes_each_option_once_in_as_many_seeds() -> None:
    for count in (2, 3, 5):
        options = list(range(count))
        for question in range(4):
            drawn = []
            for seed in range(count):
                rng = Spread("x", seed)
                drawn.append([rng.choice(options) for _ in range(4)][question])
            assert sorted(drawn) == options


def test_a_plain_source_of_choices_serves_too() -> None:
    for architecture, draw in ARCHITECTURES.items():
        config = draw(random.Random(architecture)).get_text_config()
        assert config.num_attention_heads % config.num_key_value_heads == 0
