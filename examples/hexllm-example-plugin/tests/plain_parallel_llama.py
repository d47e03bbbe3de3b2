"""Parallel Llama once more, in plain numpy and float64: what the family's logits must equal.

It shares no code with hexllm: a mistake would have to be made twice to be missed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def plain_logits(directory: Path) -> Callable[[Sequence[int]], np.ndarray]:
    """Return a function from token ids to logits [tokens, V] of the model in ``directory``."""
    config = json.loads((directory / "config.json").read_text())
    files = {**load_file(directory / "model.safetensors")}
    weights = {name: array.astype(np.float64) for name, array in files.items()}
    return lambda tokens: run(config, weights, np.asarray(tokens))


def run(config: dict[str, Any], w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Return the logits [T, V] of ``tokens`` [T]."""
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        p = {name.removeprefix(layer): w[name] for name in w if name.startswith(layer)}
        h = norm(x, p["input_layernorm.weight"], config["rms_norm_eps"])
        x = x + attention(config, p, h) + mlp(p, h)
    x = norm(x, w["model.norm.weight"], config["rms_norm_eps"])
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return (x @ w[f"{head}.weight"].T).astype(np.float32)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def mlp(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up = (x @ p[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ p["mlp.down_proj.weight"].T


def attention(config: dict[str, Any], p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    T, N = len(x), config["num_attention_heads"]
    H = config["hidden_size"] // N
    q, k, v = (
        (x @ p[f"self_attn.{name}_proj.weight"].T).reshape(T, -1, H).swapaxes(0, 1)
        for name in "qkv"
    )  # [heads, T, H]
    theta = config.get("rope_theta", 10_000.0)
    q, k = turn(q, theta), turn(k, theta)
    group = N // len(k)
    k, v = k.repeat(group, axis=0), v.repeat(group, axis=0)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(H)
    scores[:, np.triu(np.ones((T, T), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).swapaxes(0, 1).reshape(T, N * H) @ p["self_attn.o_proj.weight"].T


def turn(x: np.ndarray, theta: float) -> np.ndarray:
    """Turn the pairs (d, d + H/2) of x [heads, T, H] by their position times a frequency."""
    _, T, H = x.shape
    angle = np.arange(T)[:, None] * theta ** (-np.arange(0, H, 2) / H)  # [T, H / 2]
    a, b = x[..., : H // 2], x[..., H // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
