"""Mistral 7B, Mistral-Nemo, and Mistral-Small's language model.

Reference: transformers ``models/mistral`` and ``models/mistral3``. Llama with a window in all
layers (v0.1) or in none, and heads whose size need not be ``hidden_size / num_attention_heads``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hexllm.model.config import ModelConfig, read_model_config, read_windows
from hexllm.model.family import DecoderFamily
from hexllm.model.multimodal import MULTIMODAL_KEYS, MULTIMODAL_RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.model.hf_config import HfConfig
    from hexllm.model.rules import Rule


class Mistral(DecoderFamily):
    """The Mistral family."""

    name: ClassVar[str] = "mistral"
    ignored_keys: ClassVar[frozenset[str]] = MULTIMODAL_KEYS

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration, with the defaults of transformers' MistralConfig."""
        text = hf.language_model()
        # Absent it is 4,096, as for v0.1, whose file names it; null is none.
        window = text.integer_or_null("sliding_window", 4096)
        return read_model_config(
            hf,
            tie_word_embeddings=False,
            windows=read_windows(text, window),
            max_position_embeddings=131_072,
        )

    def weight_rules(self, cfg: ModelConfig) -> Sequence[Rule]:
        """Return how the language model is taken out of a multimodal checkpoint."""
        del cfg
        return MULTIMODAL_RULES
