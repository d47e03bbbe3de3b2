"""Configurations of families with experts, as the hub has them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hexllm.core.errors import UnsupportedConfigError
from hexllm.model.hf_config import HfConfig
from hexllm.model.loading import param_specs
from hexllm.model.specs import flatten
from hexllm.plugins.models.mixtral import Mixtral
from hexllm.plugins.models.qwen3_moe import Qwen3Moe

SHARED = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "output_router_logits": False,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
MIXTRAL_8X7B: dict[str, Any] = {
    **SHARED,
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "router_aux_loss_coef": 0.02,
    "vocab_size": 32000,
}
MIXTRAL_8X22B = {
    **MIXTRAL_8X7B,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "vocab_size": 32768,
}
QWEN3_30B_A3B: dict[str, Any] = {
    **SHARED,
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("family", "config", "billions"),
    [
        (Mixtral(), MIXTRAL_8X7B, 46.7),
        (Mixtral(), MIXTRAL_8X22B, 140.6),
        (Qwen3Moe(), QWEN3_30B_A3B, 30.5),
    ],
    ids=["8x7B", "8x22B", "30B-A3B"],
)
def test_models_have_their_published_size(family: Any, config: Any, billions: float) -> None:
    specs = param_specs(family, family.config(HfConfig(config, "config.json")))
    count = sum(math.prod(spec.shape) for spec in flatten(specs).values())
    assert round(count / 1e9, 1) == billions


@pytest.mark.parametrize("value", ["0", 5, [True], [0.5], [[0]]])
def test_layers_that_are_no_list_of_numbers(value: Any) -> None:
    config = {**QWEN3_30B_A3B, "mlp_only_layers": value}
    with pytest.raises(UnsupportedConfigError, match=r"mlp_only_layers=.*numbers"):
        Qwen3Moe().config(HfConfig(config, "config.json"))


def test_a_layer_is_dense_where_it_says_so() -> None:
    config = {**QWEN3_30B_A3B, "num_hidden_layers": 6, "mlp_only_layers": [3]}
    cfg = Qwen3Moe().config(HfConfig({**config, "decoder_sparse_step": 2}, "config.json"))
    assert cfg.moe_layers == (False, True, False, False, False, True)
    assert "experts" not in Qwen3Moe().layer_specs(cfg, 3)["mlp"]
    assert "experts" in Qwen3Moe().layer_specs(cfg, 5)["mlp"]
