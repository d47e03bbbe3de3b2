"""Writes tiny GGUF files with the gguf package: a Llama model of every quantization type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HIDDEN, MLP, HEADS, KV_HEADS, VOCAB, LAYERS = 256, 512, 4, 2, 512, 2
HEAD_DIM = HIDDEN // HEADS

Type = GGMLQuantizationType


def byte_alphabet() -> list[str]:
    """GPT-2's 256 characters for the bytes, in the order of the bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in kept else next(spare)) for byte in range(256)]


def byte_level_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges of a small byte-level BPE with two control tokens."""
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ a", "l l", "e ll", "Ċ Ċ", "Ġ Ġ", "à ¸"]
    tokens = ["<|end|>", "<|turn|>", *byte_alphabet(), *(m.replace(" ", "") for m in merges)]
    tokens.append("<tool>")
    kinds = [3, 3] + [1] * (len(tokens) - 3) + [4]
    return tokens, kinds, merges


def random_blocks(kind: Type, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a K-quant or IQ tensor, which the gguf package cannot make from floats.

    Every float16 in a block is kept small and finite.
    """
    block, nbytes = GGML_QUANT_SIZES[kind]
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    raw = rng.integers(0, 256, (rows, columns // block, nbytes), dtype=np.uint8)
    for offset in scales.get(kind.name, (0,)):
        scale = rng.uniform(0.001, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def encode(values: np.ndarray, kind: Type, rng: np.random.Generator) -> np.ndarray:
    try:
        return quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind, *values.shape, rng)


def llama_tensors(rng: np.random.Generator, *, tied: bool = True, biases: bool = False) -> dict:
    """A tiny Llama's float32 tensors by their GGUF names."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (MLP, HIDDEN),
            f"blk.{i}.ffn_up.weight": (MLP, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, MLP),
        }
        if biases:
            shapes |= {
                f"blk.{i}.attn_q.bias": (HIDDEN,),
                f"blk.{i}.attn_k.bias": (KV_HEADS * HEAD_DIM,),
                f"blk.{i}.attn_v.bias": (KV_HEADS * HEAD_DIM,),
                f"blk.{i}.attn_output.bias": (HIDDEN,),
            }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    *,
    kind: Type = Type.F32,
    architecture: str = "llama",
    tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    vocabulary: tuple[list[str], list[int], list[str]] | None = None,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
) -> dict[str, np.ndarray]:
    """Write a GGUF file and return its tensors as they were encoded, by GGUF name.

    Args:
        kind: Type of every matrix; vectors are F32.
        architecture: ``general.architecture``.
        tensors: float32 values by GGUF name; a tiny Llama when None.
        metadata: Keys to add or replace (str, bool, int, float, list).
        without: Keys to leave out.
        vocabulary: Tokens, token types and merges; a small byte-level BPE when None.
        change: Called with the writer before the file is written.
    """
    rng = np.random.default_rng(0)
    tensors = llama_tensors(rng) if tensors is None else tensors
    tokens, kinds, merges = vocabulary or byte_level_vocabulary()
    values: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": MLP,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (
            "{% for message in messages %}<|turn|>{{ message['role'] }}: "
            "{{ message['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
        ),
        **(metadata or {}),
    }
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        if key not in without:
            _add(writer, key, value)
    encoded = {}
    for name, value in tensors.items():
        stored = encode(value, kind, rng) if value.ndim == 2 else value
        encoded[name] = stored
        writer.add_tensor(name, stored, raw_dtype=kind if value.ndim == 2 else Type.F32)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return encoded


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
