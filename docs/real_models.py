"""Real models' configurations, from their ``config.json``, and the parameters that are stated.

Only the keys that say how large a model is, or that its family must not pass over. Counts are those
of model cards and reports, in billions; of multimodal models they are the language model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RealModel:
    """A model that people serve.

    Attributes:
        name: Its name on the hub.
        parameters: Stated, in billions.
        config: The essentials of its ``config.json``.
    """

    name: str
    parameters: float
    config: dict[str, Any]


def config(
    architecture: str, V: int, D: int, F: int, L: int, N: int, K: int, **more: Any
) -> dict[str, Any]:
    """Return a ``config.json`` of these sizes."""
    return {
        "architectures": [architecture],
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        **more,
    }


def gemma3(D: int, F: int, L: int, N: int, K: int, **more: Any) -> dict[str, Any]:
    """Return a multimodal Gemma-3's ``config.json``; half of it is under ``text_config``."""
    text = config("", 262_208, D, F, L, N, K, sliding_window=1024, **more)
    del text["architectures"]
    scaling = {"rope_type": "linear", "factor": 8.0}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 256,
        "text_config": {**text, "rope_scaling": scaling},
        "vision_config": {"model_type": "siglip_vision_model"},
    }


LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GEMMA, GEMMA2, OLMO2 = "GemmaForCausalLM", "Gemma2ForCausalLM", "Olmo2ForCausalLM"
MISTRAL, MIXTRAL, PHI3 = "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"

_8K: dict[str, Any] = {"max_position_embeddings": 8192}
_128K: dict[str, Any] = {"max_position_embeddings": 131_072}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LLAMA31: dict[str, Any] = {
    **_128K,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA2: dict[str, Any] = {"max_position_embeddings": 4096}
_CODE: dict[str, Any] = {"max_position_embeddings": 16_384, "rope_theta": 1e6}
_LLAMA8B = (128_256, 4096, 14_336, 32, 32, 8)
_LLAMA70B = (128_256, 8192, 28_672, 80, 64, 8)
_QWEN_WINDOW: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 131_072,
    "max_window_layers": 28,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
}
_QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "use_sliding_window": False,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
_NEMO: dict[str, Any] = {"head_dim": 128, "sliding_window": None, **_128K, "rope_theta": 1e6}
_PHI3: dict[str, Any] = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}


def phi_128k(H: int) -> dict[str, Any]:
    """Return what the files of long contexts have, for heads of H rotated dimensions."""
    factors = {"short_factor": [1.0] * (H // 2), "long_factor": [4.0] * (H // 2)}
    return {
        **_128K,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **factors},
    }


MODELS = (
    RealModel("google/gemma-2b", 2.51, config(GEMMA, 256_000, 2048, 16_384, 18, 8, 1, **_8K)),
    *(
        RealModel(name, 8.54, config(GEMMA, 256_000, 3072, 24_576, 28, 16, 16, **_8K))
        for name in ("google/gemma-7b", "google/codegemma-7b")
    ),
    RealModel("google/gemma-2-2b", 2.61, config(GEMMA2, 256_000, 2304, 9216, 26, 8, 4, **_8K)),
    RealModel("google/gemma-2-9b", 9.24, config(GEMMA2, 256_000, 3584, 14_336, 42, 16, 8, **_8K)),
    RealModel(
        "google/gemma-2-27b",
        27.23,
        config(
            *(GEMMA2, 256_000, 4608, 36_864, 46, 32, 16),
            **_8K,
            head_dim=128,
            query_pre_attn_scalar=144,
        ),
    ),
    RealModel(
        "google/gemma-3-1b-it",
        1.0,
        config(
            *("Gemma3ForCausalLM", 262_144, 1152, 6912, 26, 4, 1),
            max_position_embeddings=32_768,
            sliding_window=512,
            rope_local_base_freq=10_000,
            sliding_window_pattern=6,
        ),
    ),
    RealModel(
        "google/gemma-3-270m-it",
        0.268,
        config(
            *("Gemma3ForCausalLM", 262_144, 640, 2048, 18, 4, 1),
            max_position_embeddings=32_768,
            sliding_window=512,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
        ),
    ),
    RealModel("google/gemma-3-4b-it", 3.88, gemma3(2560, 10_240, 34, 8, 4)),
    RealModel("google/gemma-3-12b-it", 11.77, gemma3(3840, 15_360, 48, 16, 8)),
    RealModel(
        "google/gemma-3-27b-it",
        27.01,
        gemma3(5376, 21_504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    ),
    *(
        RealModel(
            f"meta-llama/Llama-2-{name}", parameters, config(LLAMA, 32_000, *sizes, **_LLAMA2)
        )
        for name, parameters, sizes in (
            ("7b", 6.74, (4096, 11_008, 32, 32, 32)),
            ("13b", 13.02, (5120, 13_824, 40, 40, 40)),
            ("70b", 68.98, (8192, 28_672, 80, 64, 8)),
        )
    ),
    RealModel("meta-llama/Meta-Llama-3-8B", 8.03, config(LLAMA, *_LLAMA8B, **_8K, rope_theta=5e5)),
    RealModel(
        "meta-llama/Meta-Llama-3-70B", 70.55, config(LLAMA, *_LLAMA70B, **_8K, rope_theta=5e5)
    ),
    RealModel("meta-llama/Llama-3.1-8B", 8.03, config(LLAMA, *_LLAMA8B, **_LLAMA31)),
    RealModel("meta-llama/Llama-3.1-70B", 70.55, config(LLAMA, *_LLAMA70B, **_LLAMA31)),
    RealModel(
        "meta-llama/Llama-3.1-405B",
        405.85,
        config(LLAMA, 128_256, 16_384, 53_248, 126, 128, 8, **_LLAMA31),
    ),
    RealModel(
        "meta-llama/Llama-3.2-1B",
        1.24,
        config(LLAMA, 128_256, 2048, 8192, 16, 32, 8, **_LLAMA31, **_TIED, head_dim=64),
    ),
    RealModel(
        "meta-llama/Llama-3.2-3B",
        3.21,
        config(LLAMA, 128_256, 3072, 8192, 28, 24, 8, **_LLAMA31, **_TIED, head_dim=128),
    ),
    RealModel("meta-llama/Llama-3.3-70B-Instruct", 70.55, config(LLAMA, *_LLAMA70B, **_LLAMA31)),
    RealModel("meta-llama/Llama-Guard-3-8B", 8.03, config(LLAMA, *_LLAMA8B, **_LLAMA31)),
    RealModel(
        "meta-llama/Llama-4-Scout-17B-16E",
        107.8,
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": {
                "vocab_size": 202_048,
                "hidden_size": 5120,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16_384,
                "num_hidden_layers": 48,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
                "attention_chunk_size": 8192,
                "max_position_embeddings": 10_485_760,
                "rope_scaling": {
                    **_LLAMA31["rope_scaling"],
                    "factor": 16.0,
                    "high_freq_factor": 1.0,
                },
            },
            "vision_config": {"model_type": "llama4_vision_model"},
        },
    ),
    *(
        RealModel(f"codellama/CodeLlama-{name}-hf", parameters, config(LLAMA, *sizes, **_CODE))
        for name, parameters, sizes in (
            ("7b", 6.74, (32_016, 4096, 11_008, 32, 32, 32)),
            ("13b", 13.02, (32_016, 5120, 13_824, 40, 40, 40)),
            ("34b", 33.74, (32_000, 8192, 22_016, 48, 64, 8)),
            ("70b", 68.98, (32_016, 8192, 28_672, 80, 64, 8)),
        )
    ),
    RealModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        0.1345,
        config(LLAMA, 49_152, 576, 1536, 30, 9, 3, **_8K, **_TIED, rope_theta=1e5),
    ),
    RealModel(
        "mistralai/Mistral-7B-v0.1",
        7.24,
        config(
            *(MISTRAL, 32_000, 4096, 14_336, 32, 32, 8),
            sliding_window=4096,
            max_position_embeddings=32_768,
        ),
    ),
    *(
        RealModel(
            f"mistralai/Mistral-7B-Instruct-{version}",
            parameters,
            config(
                *(MISTRAL, V, 4096, 14_336, 32, 32, 8),
                sliding_window=None,
                max_position_embeddings=32_768,
                rope_theta=1e6,
            ),
        )
        for version, parameters, V in (("v0.2", 7.24, 32_000), ("v0.3", 7.25, 32_768))
    ),
    RealModel(
        "mistralai/Mistral-Nemo-Instruct-2407",
        12.25,
        config(MISTRAL, 131_072, 5120, 14_336, 40, 32, 8, **_NEMO),
    ),
    RealModel(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        23.57,
        config(MISTRAL, 131_072, 5120, 32_768, 40, 32, 8, **_NEMO),
    ),
    RealModel(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        23.57,
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": config("", 131_072, 5120, 32_768, 40, 32, 8, **_NEMO),
        },
    ),
    RealModel(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        46.7,
        config(
            *(MIXTRAL, 32_000, 4096, 14_336, 32, 32, 8),
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32_768,
            router_aux_loss_coef=0.02,
        ),
    ),
    RealModel(
        "mistralai/Mixtral-8x22B-Instruct-v0.1",
        140.6,
        config(
            *(MIXTRAL, 32_768, 6144, 16_384, 56, 48, 8),
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=65_536,
        ),
    ),
    RealModel(
        "microsoft/Phi-3-mini-4k-instruct",
        3.82,
        config(PHI3, 32_064, 3072, 8192, 32, 32, 32, **_PHI3, sliding_window=2047),
    ),
    RealModel(
        "microsoft/Phi-3-mini-128k-instruct",
        3.82,
        config(PHI3, 32_064, 3072, 8192, 32, 32, 32, **phi_128k(96), sliding_window=262_144),
    ),
    RealModel(
        "microsoft/Phi-3-medium-4k-instruct",
        13.96,
        config(PHI3, 32_064, 5120, 17_920, 40, 40, 10, **_PHI3, sliding_window=2047),
    ),
    RealModel(
        "microsoft/Phi-3-medium-128k-instruct",
        13.96,
        config(
            *(PHI3, 32_064, 5120, 17_920, 40, 40, 10),
            **phi_128k(128),
            sliding_window=131_072,
        ),
    ),
    *(
        RealModel(
            f"microsoft/{name}",
            14.66,
            config(
                *(PHI3, 100_352, 5120, 17_920, 40, 40, 10),
                max_position_embeddings=limit,
                rope_theta=theta,
            ),
        )
        for name, limit, theta in (
            ("phi-4", 16_384, 250_000),
            ("Phi-4-reasoning", 32_768, 500_000),
        )
    ),
    RealModel(
        "microsoft/Phi-4-mini-instruct",
        3.84,
        config(
            *(PHI3, 200_064, 3072, 8192, 32, 24, 8),
            **phi_128k(96),
            **_TIED,
            partial_rotary_factor=0.75,
        ),
    ),
    *(
        RealModel(
            f"Qwen/{name}",
            parameters,
            config(QWEN2, *sizes, **_QWEN_WINDOW, tie_word_embeddings=is_tied),
        )
        for name, parameters, sizes, is_tied in (
            ("Qwen2-0.5B-Instruct", 0.494, (151_936, 896, 4864, 24, 14, 2), True),
            ("Qwen2-1.5B-Instruct", 1.54, (151_936, 1536, 8960, 28, 12, 2), True),
            ("Qwen2-7B-Instruct", 7.62, (152_064, 3584, 18_944, 28, 28, 4), False),
            ("Qwen2-72B-Instruct", 72.71, (152_064, 8192, 29_568, 80, 64, 8), False),
            ("Qwen2.5-0.5B-Instruct", 0.494, (151_936, 896, 4864, 24, 14, 2), True),
            ("Qwen2.5-1.5B-Instruct", 1.54, (151_936, 1536, 8960, 28, 12, 2), True),
            ("Qwen2.5-3B-Instruct", 3.09, (151_936, 2048, 11_008, 36, 16, 2), True),
            ("Qwen2.5-7B-Instruct", 7.62, (152_064, 3584, 18_944, 28, 28, 4), False),
            ("Qwen2.5-14B-Instruct", 14.77, (152_064, 5120, 13_824, 48, 40, 8), False),
            ("Qwen2.5-32B-Instruct", 32.76, (152_064, 5120, 27_648, 64, 40, 8), False),
            ("Qwen2.5-72B-Instruct", 72.71, (152_064, 8192, 29_568, 80, 64, 8), False),
        )
    ),
    *(
        RealModel(
            f"Qwen/{name}",
            parameters,
            config(QWEN3, 151_936, *sizes, **_QWEN3, tie_word_embeddings=is_tied),
        )
        for name, parameters, sizes, is_tied in (
            ("Qwen3-0.6B", 0.596, (1024, 3072, 28, 16, 8), True),
            ("Qwen3-1.7B", 1.72, (2048, 6144, 28, 16, 8), True),
            ("Qwen3-4B", 4.02, (2560, 9728, 36, 32, 8), True),
            ("Qwen3-8B", 8.19, (4096, 12_288, 36, 32, 8), False),
            ("Qwen3-14B", 14.77, (5120, 17_408, 40, 40, 8), False),
            ("Qwen3-32B", 32.76, (5120, 25_600, 64, 64, 8), False),
        )
    ),
    *(
        RealModel(
            f"Qwen/{name}",
            parameters,
            config(
                *(QWEN3_MOE, 151_936, *sizes),
                **_QWEN3,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=F,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            ),
        )
        for name, parameters, sizes, F in (
            ("Qwen3-30B-A3B", 30.53, (2048, 6144, 48, 32, 4), 768),
            ("Qwen3-235B-A22B", 235.1, (4096, 12_288, 94, 64, 4), 1536),
        )
    ),
    *(
        RealModel(
            f"allenai/{name}",
            parameters,
            config(OLMO2, 100_352, *sizes, max_position_embeddings=4096, rope_theta=500_000),
        )
        for name, parameters, sizes in (
            ("OLMo-2-0425-1B", 1.48, (2048, 8192, 16, 16, 16)),
            ("OLMo-2-1124-7B", 7.3, (4096, 11_008, 32, 32, 32)),
            ("OLMo-2-1124-13B", 13.72, (5120, 13_824, 40, 40, 40)),
            ("OLMo-2-0325-32B", 32.23, (5120, 27_648, 64, 40, 8)),
        )
    ),
)
