"""The built-in families, each by the conformance kit: what a stranger's must pass too."""

from __future__ import annotations

from typing import Any

import pytest

from hexllm.core.errors import UnsupportedConfigError
from hexllm.model.hf_config import HfConfig
from hexllm.plugins.models.gemma import Gemma
from hexllm.plugins.models.gemma2 import Gemma2
from hexllm.plugins.models.gemma3 import Gemma3
from hexllm.plugins.models.llama4 import Llama4
from hexllm.plugins.models.mistral import Mistral
from hexllm.plugins.models.mixtral import Mixtral
from hexllm.plugins.models.olmo2 import Olmo2
from hexllm.plugins.models.phi3 import Phi3
from hexllm.plugins.models.qwen2 import Qwen2
from hexllm.plugins.models.qwen3 import Qwen3
from hexllm.plugins.models.qwen3_moe import Qwen3Moe
from hexllm.testing import ModelFamilyTests
from tests.families.small import small

LONGROPE = {
    "rope_type": "longrope",
    "factor": 8.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


class TestGemma(ModelFamilyTests):
    family = Gemma
    hf_config = small("GemmaForCausalLM", "gemma", head_dim=16, pad_token_id=0)
    configs = {"mqa": {"num_key_value_heads": 1, "head_dim": 12, "hidden_act": "gelu"}}


class TestGemma2(ModelFamilyTests):
    family = Gemma2
    hf_config = small(
        "Gemma2ForCausalLM", "gemma2", head_dim=16, sliding_window=7, query_pre_attn_scalar=20
    )
    configs = {
        "tight-caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "no-caps": {"attn_logit_softcapping": None, "sliding_window": 5},
    }


class TestGemma3(ModelFamilyTests):
    family = Gemma3
    hf_config = small("Gemma3ForCausalLM", "gemma3_text", head_dim=16, sliding_window=7)
    configs = {
        "pattern": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
        "old-ropes": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 2e6},
        "new-ropes": {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
    }


class TestLlama4(ModelFamilyTests):
    family = Llama4
    hf_config = small(
        "Llama4ForCausalLM",
        "llama4_text",
        head_dim=16,
        attention_chunk_size=6,
        no_rope_layer_interval=2,
        floor_scale=5,
        attn_scale=0.3,
        num_local_experts=4,
        intermediate_size_mlp=40,
    )
    configs = {
        "two-of-eight": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "interleaved": {"interleave_moe_layer_step": 2, "use_qk_norm": False},
        "untuned": {"attn_temperature_tuning": False, "no_rope_layers": [0, 1]},
    }


@pytest.mark.parametrize(
    "change", [{"moe_layers": 1}, {"no_rope_layers": [1]}, {"no_rope_layers": 3}]
)
def test_llama4_refuses_lists_that_do_not_fit(change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(UnsupportedConfigError, match=key):
        Llama4().config(HfConfig({**TestLlama4.hf_config, **change}, "config.json"))


class TestMistral(ModelFamilyTests):
    family = Mistral
    hf_config = small("MistralForCausalLM", "mistral", sliding_window=9)
    configs = {"no-window-nemo": {"head_dim": 12, "rope_theta": 1e6, "layer_types": None}}


class TestMixtral(ModelFamilyTests):
    family = Mixtral
    hf_config = small("MixtralForCausalLM", "mixtral", num_local_experts=4)
    configs = {"window": {"sliding_window": 6, "num_local_experts": 8, "num_experts_per_tok": 3}}


class TestOlmo2(ModelFamilyTests):
    family = Olmo2
    hf_config = small("Olmo2ForCausalLM", "olmo2")
    configs = {"mha-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True}}


class TestPhi3(ModelFamilyTests):
    family = Phi3
    hf_config = small("Phi3ForCausalLM", "phi3", pad_token_id=0, sliding_window=9)
    configs = {
        "longrope": {
            "sliding_window": None,
            "original_max_position_embeddings": 16,
            "rope_scaling": LONGROPE,
        },
        "partial": {"partial_rotary_factor": 0.75, "num_key_value_heads": 1},
    }


class TestQwen2(ModelFamilyTests):
    family = Qwen2
    hf_config = small("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True)
    configs = {
        "window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "yarn": {"rope_scaling": YARN, "rope_theta": 1e6},
    }


class TestQwen3(ModelFamilyTests):
    family = Qwen3
    hf_config = small("Qwen3ForCausalLM", "qwen3", head_dim=12)
    configs = {
        "window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "biases": {"attention_bias": True, "tie_word_embeddings": True},
    }


class TestQwen3Moe(ModelFamilyTests):
    family = Qwen3Moe
    hf_config = small(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    )
    configs = {
        "mixed": {"mlp_only_layers": [1], "norm_topk_prob": False, "num_experts": 4},
        "sparse": {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6},
    }
