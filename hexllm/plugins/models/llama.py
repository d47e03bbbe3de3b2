"""Llama 2 to 3.3, Llama Guard 3, Code Llama, SmolLM2 and others of their shape.

Reference: transformers ``models/llama``. The shared decoder is Llama's own, so only the
configuration is left to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hexllm.model.config import ModelConfig, read_model_config
from hexllm.model.family import DecoderFamily

if TYPE_CHECKING:
    from hexllm.model.hf_config import HfConfig


class Llama(DecoderFamily):
    """The Llama family. Embeddings are tied only where ``config.json`` says so."""

    name: ClassVar[str] = "llama"
    # A note in SmolLM2's files.
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"is_llama_config"})

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration, with the defaults of transformers' LlamaConfig."""
        return read_model_config(hf, tie_word_embeddings=False)
