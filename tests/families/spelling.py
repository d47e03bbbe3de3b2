"""The spelling of transformers 4: the one of nearly every config.json on the hub."""

from __future__ import annotations

import copy
from typing import Any

import transformers


def in_the_old_spelling(data: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as transformers 4 wrote it.

    Rotary parameters stand beside ``rope_theta`` in ``rope_scaling``, the dtype is called
    ``torch_dtype``, and layers' kinds are left out where the family's default gives them.
    transformers 5 itself must read both spellings as the same model.
    """
    old = copy.deepcopy(data)
    text = old.get("text_config", old)
    _move_rope(text)
    for each in (old, text):
        if "dtype" in each:
            each["torch_dtype"] = each.pop("dtype")
    _leave_out_default(old, text, "layer_types")
    assert _read(old) == _read(data), "transformers reads the old spelling otherwise"
    return old


def _move_rope(text: dict[str, Any]) -> None:
    rope = text.pop("rope_parameters")
    if "full_attention" in rope:  # Gemma-3: one for each kind of layer
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    text["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope["rope_type"] != "default":
        text["rope_scaling"] = rope


def _leave_out_default(data: dict[str, Any], text: dict[str, Any], key: str) -> None:
    if key not in text:
        return
    expected = _read(data)
    value = text.pop(key)
    if _read(data) != expected:
        text[key] = value


def _read(data: dict[str, Any]) -> dict[str, Any]:
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    config = kinds[data["model_type"]].from_dict(copy.deepcopy(data))
    read = config.to_dict()
    for each in (read, read.get("text_config", {})):
        # Where no key has it, the old spelling cannot hold it; neither changes the model.
        each.pop("rope_local_base_freq", None)
    return dict(read)
