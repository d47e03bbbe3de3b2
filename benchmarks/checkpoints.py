"""Writes made-up checkpoints of a given size, a shard a layer, for the loading benchmark."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from hexllm.core.plugins import load_plugins
from hexllm.core.settings.plugin_table import PluginSettings
from hexllm.model.hf_config import HfConfig
from hexllm.model.loading import param_specs
from hexllm.model.rules import undo_rules
from hexllm.model.specs import flatten

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hexllm.model.config import ModelConfig
    from hexllm.model.family import DecoderFamily
    from hexllm.model.specs import ParamSpec

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Case:
    """One checkpoint, and what its weights are loaded as.

    Attributes:
        name: In the table.
        architecture: Hugging Face's name.
        stored: Number format in the file.
        dtype: Number format to load into.
        config: Keys that differ from ``BASE``.
    """

    name: str
    architecture: str
    stored: str
    dtype: str
    config: dict[str, Any] = field(default_factory=dict)


#: A layer of Llama-3.2-1B's width, with a smaller vocabulary so that layers are most of it.
BASE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "pad_token_id": 0,
}

_EXPERTS = {"hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 8}

CASES = (
    Case("llama f32", "LlamaForCausalLM", "float32", "float32"),
    Case("llama bf16", "LlamaForCausalLM", "bfloat16", "bfloat16"),
    Case("llama f32 as bf16", "LlamaForCausalLM", "float32", "bfloat16"),
    Case("phi3 bf16, fused", "Phi3ForCausalLM", "bfloat16", "bfloat16"),
    Case("phi3 f32 as bf16, fused", "Phi3ForCausalLM", "float32", "bfloat16"),
    Case("mixtral bf16, 8 experts", "MixtralForCausalLM", "bfloat16", "bfloat16", _EXPERTS),
    Case("mixtral f32 as bf16", "MixtralForCausalLM", "float32", "bfloat16", _EXPERTS),
    Case(
        "llama4 bf16, transposed",
        "Llama4ForCausalLM",
        "bfloat16",
        "bfloat16",
        _EXPERTS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 3584},
    ),
)


def read_model(config: dict[str, Any]) -> tuple[DecoderFamily, ModelConfig]:
    """Return the family and configuration of a ``config.json``."""
    family = load_plugins(PluginSettings()).resolve_model_family(config).build(None)
    return family, family.config(HfConfig(config, "config.json"))


def case_config(case: Case, nbytes: int) -> dict[str, Any]:
    """Return a ``config.json`` with as many layers as come nearest to ``nbytes``, at least one."""
    config = {**BASE, **case.config, "architectures": [case.architecture]}
    sizes = []
    for L in (1, 2):
        family, cfg = read_model({**config, "num_hidden_layers": L})
        specs = flatten(param_specs(family, cfg)).values()
        sizes.append(
            sum(math.prod(s.shape) for s in specs) * np.dtype(DTYPES[case.stored]).itemsize
        )
    more = (nbytes - sizes[0]) / (sizes[1] - sizes[0])
    return {**config, "num_hidden_layers": max(1, 1 + round(more))}


def write_case(case: Case, nbytes: int, directory: Path) -> int:
    """Write a checkpoint of about ``nbytes`` of weights; return how many were written."""
    directory.mkdir(parents=True, exist_ok=True)
    config = case_config(case, nbytes)
    (directory / "config.json").write_text(json.dumps(config))
    family, cfg = read_model(config)
    rules = family.all_weight_rules(cfg)
    specs = flatten(param_specs(family, cfg))
    total = 0
    shards = list(_by_layer(specs))
    for i, shard in enumerate(shards, 1):
        arrays = {
            path: _values(spec.shape, np.dtype(DTYPES[case.stored])) for path, spec in shard.items()
        }
        tensors = {k: np.ascontiguousarray(v) for k, v in undo_rules(rules, arrays).items()}
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, directory / f"model-{i:05d}-of-{len(shards):05d}.safetensors")
    return total


def _by_layer(specs: dict[str, ParamSpec]) -> Iterator[dict[str, ParamSpec]]:
    """Yield the specs of each layer, and of what stands outside of them."""

    def layer(item: tuple[str, ParamSpec]) -> str:
        path = item[0].split(".")
        return path[2] if path[1] == "layers" else ""

    for _, items in itertools.groupby(sorted(specs.items(), key=layer), key=layer):
        yield dict(items)


def _values(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return ordinary numbers; a block of them again and again, which is quick."""
    block = (0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(dtype)
    return np.resize(block, shape)
