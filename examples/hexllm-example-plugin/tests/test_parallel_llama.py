from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hexllm_example_plugin import hexllm_model_families
from hexllm_example_plugin.parallel_llama import ParallelLlama
from plain_parallel_llama import plain_logits

from hexllm.testing import ModelFamilyTests

if TYPE_CHECKING:
    from pathlib import Path


class TestParallelLlama(ModelFamilyTests):
    family = ParallelLlama
    hf_config = {
        "architectures": ["ParallelLlamaForCausalLM"],
        "vocab_size": 83,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    configs = {
        "mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 500.0},
    }
    test_logits_equal_the_golden = None
    deviations = {
        "test_logits_equal_the_golden": "the reference is numpy, which every machine has",
    }

    def reference(self, directory: Path) -> Any:
        return plain_logits(directory)


def test_the_record_is_right() -> None:
    (record,) = hexllm_model_families()
    assert record.implementation == f"{ParallelLlama.__module__}:{ParallelLlama.__name__}"
    assert record.provides == tuple(TestParallelLlama.hf_config["architectures"])
