"""The built-in model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hexllm.core.component import Component
from hexllm.core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator

HEXLLM_PLUGIN_API = 1


@hookimpl
def hexllm_model_families() -> Iterator[Component]:
    """Yield a component for each family."""
    yield Component(
        name="gemma",
        implementation="hexllm.plugins.models.gemma:Gemma",
        provides=("GemmaForCausalLM",),
        summary="Gemma 2B and 7B, CodeGemma",
    )
    yield Component(
        name="gemma2",
        implementation="hexllm.plugins.models.gemma2:Gemma2",
        provides=("Gemma2ForCausalLM",),
        summary="Gemma-2 2B, 9B and 27B",
    )
    yield Component(
        name="gemma3",
        implementation="hexllm.plugins.models.gemma3:Gemma3",
        provides=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        summary="Gemma-3 270M to 27B; of multimodal checkpoints the language model",
    )
    yield Component(
        name="llama",
        implementation="hexllm.plugins.models.llama:Llama",
        provides=("LlamaForCausalLM",),
        summary="Llama 2 to 3.3, Llama Guard 3, Code Llama, SmolLM2 and others of their shape",
    )
    yield Component(
        name="llama4",
        implementation="hexllm.plugins.models.llama4:Llama4",
        provides=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        summary="Llama-4 Scout and Maverick; of multimodal checkpoints the language model",
    )
    yield Component(
        name="mistral",
        implementation="hexllm.plugins.models.mistral:Mistral",
        provides=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
        summary="Mistral 7B, Nemo and Small; of multimodal checkpoints the language model",
    )
    yield Component(
        name="mixtral",
        implementation="hexllm.plugins.models.mixtral:Mixtral",
        provides=("MixtralForCausalLM",),
        summary="Mixtral 8x7B and 8x22B",
    )
    yield Component(
        name="olmo2",
        implementation="hexllm.plugins.models.olmo2:Olmo2",
        provides=("Olmo2ForCausalLM",),
        summary="OLMo-2 1B to 32B",
    )
    yield Component(
        name="phi3",
        implementation="hexllm.plugins.models.phi3:Phi3",
        provides=("Phi3ForCausalLM",),
        summary="Phi-3 and Phi-3.5 mini and medium, Phi-4, Phi-4-mini, Phi-4-reasoning",
    )
    yield Component(
        name="qwen2",
        implementation="hexllm.plugins.models.qwen2:Qwen2",
        provides=("Qwen2ForCausalLM",),
        summary="Qwen2, Qwen2.5, QwQ",
    )
    yield Component(
        name="qwen3",
        implementation="hexllm.plugins.models.qwen3:Qwen3",
        provides=("Qwen3ForCausalLM",),
        summary="Qwen3, the dense models",
    )
    yield Component(
        name="qwen3_moe",
        implementation="hexllm.plugins.models.qwen3_moe:Qwen3Moe",
        provides=("Qwen3MoeForCausalLM",),
        summary="Qwen3-30B-A3B and Qwen3-235B-A22B, the models with experts",
    )
