"""Qwen2, Qwen2.5 and QwQ: Llama with biases on queries, keys and values.

Reference: transformers ``models/qwen2``. ``use_sliding_window`` gives the layers from
``max_window_layers`` on a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hexllm.model import blocks
from hexllm.model.config import ModelConfig, read_model_config, read_windows
from hexllm.model.family import DecoderFamily

if TYPE_CHECKING:
    from hexllm.model.hf_config import HfConfig
    from hexllm.model.specs import Specs


class Qwen2(DecoderFamily):
    """The Qwen2 family."""

    name: ClassVar[str] = "qwen2"

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration, with the defaults of transformers' Qwen2Config."""
        return read_model_config(
            hf,
            tie_word_embeddings=False,
            windows=read_qwen_windows(hf),
            max_position_embeddings=32_768,
        )

    def attention_specs(self, cfg: ModelConfig, i: int) -> Specs:
        """Return attention's specs: biases on all projections but the last."""
        del i
        return blocks.attention_specs(cfg, bias=True, out_bias=False)


def read_qwen_window(hf: HfConfig) -> int | None:
    """Read the window; ``sliding_window`` counts with ``use_sliding_window`` only."""
    window: int | None = hf.integer_or_null("sliding_window", 4096)
    return window if hf.boolean("use_sliding_window", False) else None


def read_qwen_windows(hf: HfConfig) -> tuple[int | None, ...]:
    """Read each layer's window: the first ``max_window_layers`` have none."""
    first = hf.integer("max_window_layers", 28, minimum=0)
    return read_windows(hf, read_qwen_window(hf), is_sliding=lambda i: i >= first)
