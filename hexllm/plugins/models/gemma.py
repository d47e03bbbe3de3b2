"""Gemma 2B and 7B, CodeGemma.

Reference: transformers ``models/gemma``. Norms multiply by one plus their weight, and embeddings
are scaled.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

from hexllm.model import blocks
from hexllm.model.config import ModelConfig, read_model_config
from hexllm.model.family import DecoderFamily
from hexllm.model.specs import Specs, norm_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import jax

    from hexllm.model.hf_config import HfConfig

TANH_GELU = "gelu_pytorch_tanh"


class Gemma(DecoderFamily):
    """The first Gemma, and what its successors share with it."""

    name: ClassVar[str] = "gemma"
    # transformers reads hidden_act only; some files have the other beside it.
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"hidden_activation"})

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration, with the defaults of transformers' GemmaConfig."""
        cfg = read_model_config(
            hf,
            tie_word_embeddings=True,
            hidden_act=TANH_GELU,
            head_dim=256,
            max_position_embeddings=8192,
        )
        # Google's own files say "gelu", and mean the approximation that Gemma was trained with.
        act = TANH_GELU if cfg.hidden_act == "gelu" else cfg.hidden_act
        return dataclasses.replace(cfg, hidden_act=act)

    def norm_spec(self, size: int) -> Specs:
        """Return a norm's specs: zero is its neutral weight."""
        return norm_spec(size, init="zeros")

    def norm(self, cfg: ModelConfig, p: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Return x [T, D], normed."""
        return blocks.rms_norm(x, p["weight"], cfg.rms_norm_eps, is_zero_centered=True)

    def embed(self, cfg: ModelConfig, params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        """Return the embeddings of ``tokens`` [T] times the root of D, rounded to their dtype."""
        x = super().embed(cfg, params, tokens)
        return x * jnp.asarray(cfg.hidden_size**0.5, x.dtype)
