"""Builds Hugging Face's ``config.json`` and ``generation_config.json`` from GGUF metadata."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.gguf_names import ROPE_FREQS, find_architecture
from hexllm.plugins.loaders.gguf_tensors import read_rows

if TYPE_CHECKING:
    from hexllm.plugins.loaders.gguf_file import GgufFile

#: Keys below the architecture's name that are read here, or say nothing about the computation.
_KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "tensor_data_layout",
        "expert_count",
        "expert_used_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
    }
)


def build_config(file: GgufFile) -> dict[str, Any]:
    """Return ``config.json`` as Hugging Face would have it for this file.

    Raises:
        CheckpointError: The metadata lacks something, or asks for something that
            ``config.json`` of this architecture cannot say.
    """
    prefix, known = find_architecture(file)
    _refuse_unknown_keys(file, prefix)
    hidden_size = _positive(file, f"{prefix}.embedding_length")
    num_heads = _positive(file, f"{prefix}.attention.head_count")
    head_dim = _positive(file, f"{prefix}.attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = file.integer(f"{prefix}.{key}", head_dim)
        if other != head_dim:
            raise CheckpointError(
                f"{file.path}: {prefix}.{key}={other} differs from the head's size {head_dim}, "
                f"which a {known.architecture} cannot have."
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{file.path}: there is no tensor 'token_embd.weight' of 2 dimensions."
        )
    config: dict[str, Any] = {
        "architectures": [known.architecture],
        "model_type": known.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _positive(file, f"{prefix}.feed_forward_length"),
        "num_hidden_layers": _positive(file, f"{prefix}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _positive(file, f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _positive(file, f"{prefix}.context_length"),
        "rms_norm_eps": file.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{prefix}.rope.freq_base", 10000.0),
        "rope_scaling": None,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _original_dtype(file),
        **_token_ids(file),
    }
    config["rope_scaling"] = _rope_scaling(file, prefix, config)
    return config


def build_generation_config(file: GgufFile) -> dict[str, Any]:
    """Return ``generation_config.json``: every token that ends a turn, as llama.cpp knows them."""
    ids = _token_ids(file)
    ends = {ids["eos_token_id"]} if "eos_token_id" in ids else set()
    for key in ("eot", "eom"):
        if f"tokenizer.ggml.{key}_token_id" in file.metadata:
            ends.add(file.integer(f"tokenizer.ggml.{key}_token_id"))
    if ends:
        ids["eos_token_id"] = sorted(ends) if len(ends) > 1 else next(iter(ends))
    return ids


def _positive(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.integer(key, default)
    if value < 1:
        raise CheckpointError(f"{file.path}: metadata key {key!r} is {value}; it must be positive.")
    return value


def _refuse_unknown_keys(file: GgufFile, prefix: str) -> None:
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{prefix}.")
        if name != key and name not in _KNOWN_KEYS:
            raise CheckpointError(
                f"{file.path}: metadata key {key!r} ({str(value)[:40]}) is not understood, and "
                f"leaving it out could change the model's answers. "
                f"Serve the model's safetensors checkpoint instead."
            )
    if file.integer(f"{prefix}.expert_count", 0):
        raise CheckpointError(
            f"{file.path}: {prefix}.expert_count={file.metadata[f'{prefix}.expert_count']}: a GGUF "
            f"with experts cannot be read. Serve the model's safetensors checkpoint instead."
        )


def _token_ids(file: GgufFile) -> dict[str, Any]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {
        name: file.integer(f"tokenizer.ggml.{key}_token_id")
        for name, key in keys.items()
        if f"tokenizer.ggml.{key}_token_id" in file.metadata
    }


def _original_dtype(file: GgufFile) -> str:
    """Return the type that the model was most likely published in.

    Only files of plain floats say it. Nearly every quantized model was bfloat16.
    """
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.nbytes
    largest = max(sizes, key=lambda kind: sizes[kind], default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(largest, "bfloat16")


def _rope_scaling(file: GgufFile, prefix: str, config: dict[str, Any]) -> dict[str, Any] | None:
    key = f"{prefix}.rope.scaling.type"
    kind = file.text(key, "none")
    factor = file.number(f"{prefix}.rope.scaling.factor", 0.0)
    if kind == "none" and factor == 0.0 and f"{prefix}.rope.scale_linear" in file.metadata:
        kind, factor = "linear", file.number(f"{prefix}.rope.scale_linear")
    if ROPE_FREQS in file.tensors:
        if kind not in ("none", "linear") or factor not in (0.0, 1.0):
            raise CheckpointError(
                f"{file.path}: both the tensor {ROPE_FREQS!r} and {key}={kind!r} scale the rotary "
                f"embedding; only one of them is understood."
            )
        return _llama3_scaling(file, config)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if factor <= 0.0:
        raise CheckpointError(f"{file.path}: {key}={kind!r} needs {prefix}.rope.scaling.factor.")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = _positive(file, f"{prefix}.rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise CheckpointError(f"{file.path}: {key}={kind!r} is not one of none, linear, yarn.")


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the ``llama3`` scaling whose factors the tensor ``rope_freqs.weight`` holds.

    The converter wrote the factors out; the settings they came from are found again by trying
    the powers of two as original context, and taken only when every factor agrees.
    """
    tensor = file.tensors[ROPE_FREQS]
    half = config["head_dim"] // 2
    if tensor.shape != (half,):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FREQS!r} has the shape {tensor.shape}, not ({half},)."
        )
    factors = read_rows(file.path, tensor, slice(None)).astype(np.float64)
    if np.all(factors == 1.0):
        return None
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(half) * 2 / config["head_dim"])
    factor = float(np.max(factors))
    low, high = 1.0, 4.0
    for original in (2**power for power in range(11, 18)):
        smooth = (original / wavelengths - low) / (high - low)
        with np.errstate(all="ignore"):
            expected = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(wavelengths < original / high, 1.0, expected)
        expected = np.where(wavelengths > original / low, factor, expected)
        if np.allclose(expected, factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{file.path}: tensor {ROPE_FREQS!r} holds rotary factors that are not Llama 3's. "
        f"Serve the model's safetensors checkpoint instead."
    )
