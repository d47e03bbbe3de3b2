"""Random small configurations of every architecture that is served, as transformers' objects.

A generator takes a ``random.Random``: a seeded one, a :class:`tests.families.spread.Spread`, or
hypothesis' ``st.randoms(use_true_random=False)``, which shrinks. Options stand plainest first, so
that shrinking ends at a plain model. Every configuration is one that transformers runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from tests.families import ropes

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    Draw = Callable[[random.Random], Any]

#: (N, K) of each kind of attention, odd counts among them.
HEADS = {
    "mha": [(3, 3), (4, 4), (5, 5)],
    "gqa": [(6, 3), (4, 2), (9, 3), (10, 2)],
    "mqa": [(3, 1), (5, 1), (7, 1)],
}

#: Of the smallest vision tower, which hexllm leaves out.
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def base(rng: random.Random, **more: Any) -> dict[str, Any]:
    """Return the keys that all families share; heads divide the hidden size.

    With ``head_dim`` left out of the configuration a head has hidden_size / N dimensions, an even
    number.
    """
    N, K = rng.choice(HEADS[rng.choice(["mha", "gqa", "mqa"])])
    return {
        "vocab_size": rng.choice([96, 67, 131]),
        "hidden_size": N * rng.choice([8, 6, 10]),
        "intermediate_size": rng.choice([40, 36, 52]),
        "num_hidden_layers": rng.choice([2, 3]),
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "max_position_embeddings": rng.choice([512, 2048]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "tie_word_embeddings": rng.choice([False, True]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def head_dim(rng: random.Random, keys: dict[str, Any]) -> dict[str, Any]:
    """Return no head_dim, or one that is not hidden_size / N."""
    default = keys["hidden_size"] // keys["num_attention_heads"]
    own = rng.choice([None, 12, 16])
    return {} if own is None or own == default else {"head_dim": own}


def layer_types(rng: random.Random, num_layers: int) -> list[str]:
    """Return a pattern with a sliding layer in it, and where there is room a full one."""
    kinds = ["sliding_attention", "full_attention"]
    pattern = [rng.choice(kinds) for _ in range(num_layers)]
    pattern[rng.choice(range(num_layers))] = kinds[0]
    return pattern


def llama(rng: random.Random) -> Any:
    keys = base(rng)
    return transformers.LlamaConfig(
        **keys,
        **head_dim(rng, keys),
        rope_parameters=ropes.draw(rng, ["default", "llama3", "linear", "yarn"]),
        attention_bias=rng.choice([False, True]),
        mlp_bias=rng.choice([False, True]),
        hidden_act=rng.choice(["silu", "gelu", "gelu_pytorch_tanh"]),
    )


def llama4_text(rng: random.Random) -> Any:
    keys = base(rng)
    keys["num_hidden_layers"] = rng.choice([3, 4])
    return transformers.Llama4TextConfig(
        **keys,
        head_dim=rng.choice([8, 12, 16]),
        rope_parameters=ropes.draw(rng, ["default", "llama3"]),
        intermediate_size_mlp=rng.choice([44, 60]),
        num_local_experts=rng.choice([4, 8]),
        num_experts_per_tok=rng.choice([1, 2]),
        interleave_moe_layer_step=rng.choice([1, 2]),
        no_rope_layer_interval=rng.choice([4, 2, 3]),
        attention_chunk_size=rng.choice([64, 16, 5]),
        use_qk_norm=rng.choice([True, False]),
        attn_temperature_tuning=rng.choice([True, False]),
        floor_scale=rng.choice([32, 7]),
        attn_scale=rng.choice([0.1, 0.7]),
    )


def llama4(rng: random.Random) -> Any:
    text = llama4_text(rng)
    return transformers.Llama4Config(
        text_config=text.to_dict(),
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "image_size": 16,
            "patch_size": 4,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        tie_word_embeddings=text.tie_word_embeddings,
        **_image_tokens(text),
    )


def mistral(rng: random.Random) -> Any:
    keys = base(rng)
    return transformers.MistralConfig(
        **keys,
        **head_dim(rng, keys),
        rope_parameters=ropes.draw(rng, ["default", "linear", "yarn"]),
        sliding_window=rng.choice([None, 33, 6]),
    )


def mistral3(rng: random.Random) -> Any:
    text = mistral(rng)
    text.sliding_window = None
    return transformers.Mistral3Config(
        text_config=text.to_dict(),
        vision_config={"model_type": "pixtral", **VISION},
        image_token_index=text.vocab_size - 1,
        tie_word_embeddings=text.tie_word_embeddings,
    )


def mixtral(rng: random.Random) -> Any:
    keys = base(rng)
    return transformers.MixtralConfig(
        **keys,
        **head_dim(rng, keys),
        rope_parameters=ropes.draw(rng, ["default", "linear"]),
        sliding_window=rng.choice([None, 17]),
        num_local_experts=rng.choice([4, 8]),
        num_experts_per_tok=rng.choice([2, 1, 3]),
    )


def gemma(rng: random.Random) -> Any:
    return transformers.GemmaConfig(
        **base(rng),
        head_dim=rng.choice([8, 12, 16]),
        rope_parameters=ropes.draw(rng, ["default", "linear"]),
        attention_bias=rng.choice([False, True]),
    )


def gemma2(rng: random.Random) -> Any:
    keys = base(rng)
    return transformers.Gemma2Config(
        **keys,
        head_dim=rng.choice([8, 12, 16]),
        rope_parameters=ropes.draw(rng, ["default", "linear"]),
        attention_bias=rng.choice([False, True]),
        query_pre_attn_scalar=rng.choice([16, 9, 40]),
        sliding_window=rng.choice([40, 16, 5]),
        layer_types=rng.choice([None, layer_types(rng, keys["num_hidden_layers"])]),
        attn_logit_softcapping=rng.choice([50.0, 2.0, None]),
        final_logit_softcapping=rng.choice([30.0, 3.0, None]),
    )


def gemma3_text(rng: random.Random) -> Any:
    keys = base(rng)
    keys["num_hidden_layers"] = rng.choice([3, 2, 4])
    period = rng.choice([2, 3])  # of six in the real models
    return transformers.Gemma3TextConfig(
        **keys,
        head_dim=rng.choice([8, 12, 16]),
        rope_parameters={
            "sliding_attention": ropes.draw(rng, ["default"]),
            "full_attention": ropes.draw(rng, ["default", "linear"]),
        },
        attention_bias=rng.choice([False, True]),
        query_pre_attn_scalar=rng.choice([16, 9, 40]),
        sliding_window=rng.choice([40, 16, 5]),
        layer_types=[
            "sliding_attention" if (i + 1) % period else "full_attention"
            for i in range(keys["num_hidden_layers"])
        ],
        # No cap on attention's scores: transformers keeps the key and does not apply it.
        final_logit_softcapping=rng.choice([None, 3.0]),
    )


def gemma3(rng: random.Random) -> Any:
    text = gemma3_text(rng)
    text.final_logit_softcapping = None  # transformers applies it in the text-only model alone
    return transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config={"model_type": "siglip_vision_model", **VISION},
        mm_tokens_per_image=4,
        tie_word_embeddings=text.tie_word_embeddings,
        **_image_tokens(text),
    )


def phi3(rng: random.Random) -> Any:
    keys = base(rng)
    # 3/4 of 96 is 72, of 128 is 96, in the real ones; here 3/4 of 8 is 6.
    keys["hidden_size"] = keys["num_attention_heads"] * rng.choice([8, 12, 16])
    partial = rng.choice([1.0, 0.5, 0.75])
    rotary_dim = int(keys["hidden_size"] // keys["num_attention_heads"] * partial)
    if rotary_dim % 2:
        partial, rotary_dim = 1.0, keys["hidden_size"] // keys["num_attention_heads"]
    kind = rng.choice(["default", "longrope"])
    rope = ropes.draw(rng, [kind], rotary_dim=rotary_dim)
    if kind == "longrope":
        keys["original_max_position_embeddings"] = rng.choice([64, 40])
    return transformers.Phi3Config(
        **keys,
        rope_parameters={**rope, "partial_rotary_factor": partial},
        partial_rotary_factor=partial,
        sliding_window=rng.choice([None, 47, 9]),
    )


def qwen2(rng: random.Random) -> Any:
    keys = base(rng)
    return transformers.Qwen2Config(
        **keys,
        rope_parameters=ropes.draw(rng, ["default", "yarn"]),
        **_late_windows(rng, keys["num_hidden_layers"]),
    )


def qwen3(rng: random.Random) -> Any:
    keys = base(rng)
    return transformers.Qwen3Config(
        **keys,
        head_dim=rng.choice([8, 12, 16]),
        rope_parameters=ropes.draw(rng, ["default", "yarn"]),
        attention_bias=rng.choice([False, True]),
        **_late_windows(rng, keys["num_hidden_layers"]),
    )


def qwen3_moe(rng: random.Random) -> Any:
    keys = base(rng)
    keys["num_hidden_layers"] = rng.choice([2, 3, 4])
    return transformers.Qwen3MoeConfig(
        **keys,
        head_dim=rng.choice([8, 12, 16]),
        rope_parameters=ropes.draw(rng, ["default", "yarn"]),
        attention_bias=rng.choice([False, True]),
        moe_intermediate_size=rng.choice([24, 20]),
        num_experts=rng.choice([4, 8]),
        num_experts_per_tok=rng.choice([2, 1, 3]),
        norm_topk_prob=rng.choice([True, False]),
        decoder_sparse_step=rng.choice([1, 2]),
        mlp_only_layers=rng.choice([[], [0]]),
        use_sliding_window=rng.choice([False, True]),
        sliding_window=rng.choice([30, 7]),
    )


def olmo2(rng: random.Random) -> Any:
    return transformers.Olmo2Config(
        **base(rng),
        rope_parameters=ropes.draw(rng, ["default", "linear", "yarn"]),
        attention_bias=rng.choice([False, True]),
    )


def _image_tokens(text: Any) -> dict[str, int]:
    V = text.vocab_size
    return {"boi_token_index": V - 3, "eoi_token_index": V - 2, "image_token_index": V - 1}


def _late_windows(rng: random.Random, num_layers: int) -> dict[str, Any]:
    """Qwen's windows: the first ``max_window_layers`` layers see everything."""
    return {
        "use_sliding_window": rng.choice([False, True]),
        "sliding_window": rng.choice([30, 7]),
        "max_window_layers": rng.choice([0, num_layers - 1]),
    }


#: Each architecture that transformers writes into config.json, with its generator.
ARCHITECTURES: dict[str, Draw] = {
    "LlamaForCausalLM": llama,
    "Llama4ForCausalLM": llama4_text,
    "Llama4ForConditionalGeneration": llama4,
    "MistralForCausalLM": mistral,
    "Mistral3ForConditionalGeneration": mistral3,
    "MixtralForCausalLM": mixtral,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3_text,
    "Gemma3ForConditionalGeneration": gemma3,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Olmo2ForCausalLM": olmo2,
}
