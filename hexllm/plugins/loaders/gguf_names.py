"""Which GGUF architectures are read, and their tensors' names in Hugging Face's terms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hexllm.plugins.loaders.gguf_file import GgufFile

#: Llama 3's scaling factors of the rotary frequencies; goes to the configuration.
ROPE_FREQS = "rope_freqs.weight"

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How one value of ``general.architecture`` maps to a Hugging Face model.

    Attributes:
        architecture: The name in ``config.json``'s ``architectures``.
        model_type: Hugging Face's ``model_type``.
        whole: Tensors of the whole model, GGUF's name to Hugging Face's.
        block: Parts of a layer, GGUF's name to Hugging Face's (within ``model.layers.<i>``).
        interleaved: Parts whose rows are stored for rotary pairs side by side, with the metadata
            key of their number of heads. Hugging Face has the two halves of a head apart.
    """

    architecture: str
    model_type: str
    whole: Mapping[str, str]
    block: Mapping[str, str]
    interleaved: Mapping[str, str]


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        architecture="LlamaForCausalLM",
        model_type="llama",
        whole={
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        },
        block={
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        interleaved={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"},
    ),
}


def find_architecture(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """Return the file's ``general.architecture`` and what is known of it.

    Raises:
        CheckpointError: Nothing is known of it.
    """
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {name!r} cannot be read; {', '.join(ARCHITECTURES)} "
            f"can. Serve the model's safetensors checkpoint instead."
        )
    return name, ARCHITECTURES[name]


def translate_names(file: GgufFile) -> dict[str, tuple[str, int]]:
    """Return, by Hugging Face name, each tensor's name in the file and its interleaved heads.

    The number of heads is 0 for a tensor whose rows are stored in Hugging Face's order.

    Raises:
        CheckpointError: A tensor has no known name, a wrong layer or rows that are no heads.
    """
    prefix, known = find_architecture(file)
    num_layers = file.integer(f"{prefix}.block_count")
    names: dict[str, tuple[str, int]] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FREQS:
            continue
        where = f"{file.path}: tensor {name!r}"
        if name in known.whole:
            names[known.whole[name]] = (name, 0)
            continue
        match = _BLOCK.fullmatch(name)
        if match is None or match[2] not in known.block or int(match[1]) >= num_layers:
            raise CheckpointError(
                f"{where} has no place in a {prefix!r} model of {num_layers} layers. "
                f"Serve the model's safetensors checkpoint instead."
            )
        layer, part, suffix = int(match[1]), match[2], match[3]
        if len(tensor.shape) > 2:
            raise CheckpointError(f"{where} has {len(tensor.shape)} dimensions; 1 or 2 are known.")
        heads = 0
        if part in known.interleaved:
            default = file.integer(f"{prefix}.attention.head_count")
            heads = file.integer(f"{prefix}.{known.interleaved[part]}", default)
            rows = tensor.shape[0]
            if heads < 1 or rows % (2 * heads):
                raise CheckpointError(
                    f"{where} has {rows} rows, which are not {heads} heads of an even size."
                )
        names[f"model.layers.{layer}.{known.block[part]}.{suffix}"] = (name, heads)
    return names
