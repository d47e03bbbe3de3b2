"""A model small enough to be compiled in a second, for every family."""

from __future__ import annotations

from typing import Any


def small(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    """Return a ``config.json`` of these, and the keys in ``more``."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **more,
    }
