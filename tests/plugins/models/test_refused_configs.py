"""What no architecture may serve: each refusal names the key or the tensor at fault."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from hexllm.core.errors import CheckpointError, UnsupportedConfigError
from hexllm.model.loading import load_params
from hexllm.model.sharding import make_mesh
from tests.families.checkpoints import make_model, read_config, save_model
from tests.families.checks import open_family, plugins
from tests.families.configs import ARCHITECTURES
from tests.families.spread import Spread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[dict[str, Any]], str]


def config_of(architecture: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a config.json and the part of it that is about the language model."""
    config = ARCHITECTURES[architecture](Spread(architecture, 0))
    data = {**config.to_dict(), "architectures": [architecture]}
    return data, data.get("text_config", data)


def rope_type(text: dict[str, Any]) -> str:
    rope = text["rope_parameters"]
    rope = rope.get("full_attention", rope)
    rope["rope_type"] = "spiral"
    return "rope_type='spiral'"


def old_rope_type(text: dict[str, Any]) -> str:
    del text["rope_parameters"]
    text["rope_scaling"] = {"type": "spiral", "factor": 2.0}
    return "type='spiral'"


def activation(text: dict[str, Any]) -> str:
    key = "hidden_activation" if "hidden_activation" in text else "hidden_act"
    text[key] = "mish"
    return f"{key}='mish'"


def attention_key(text: dict[str, Any]) -> str:
    text["attention_sink_size"] = 4
    return "attention_sink_size=4"


def attention_switch(text: dict[str, Any]) -> str:
    text["use_attention_gate"] = True
    return "use_attention_gate=True"


def rope_key(text: dict[str, Any]) -> str:
    rope = text["rope_parameters"]
    rope.get("full_attention", rope)["twist"] = 2.0
    return "twist=2.0"


def kv_heads(text: dict[str, Any]) -> str:
    text["num_attention_heads"], text["num_key_value_heads"] = 6, 4
    text["hidden_size"] = 48
    return "num_key_value_heads=4"


CHANGES: list[Change] = [
    rope_type,
    old_rope_type,
    activation,
    attention_key,
    attention_switch,
    rope_key,
    kv_heads,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_configuration_is_refused(architecture: str, change: Change) -> None:
    data, text = config_of(architecture)
    open_family(data, "models/x")  # fine before the change
    words = change(text)
    with pytest.raises(UnsupportedConfigError) as caught:
        open_family(data, "models/x")
    assert words in str(caught.value)
    assert "models/x" in str(caught.value)


@pytest.mark.torch
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tensor_too_few_or_too_many_is_refused(architecture: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[architecture](Spread(architecture, 0))
    save_model(make_model(architecture, config), tmp_path)
    family, cfg = open_family(read_config(tmp_path), str(tmp_path))
    checkpoint = plugins().open_checkpoint(str(tmp_path))
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors()}
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()

    def load(held: dict[str, np.ndarray]) -> None:
        save_file(held, tmp_path / "model.safetensors")
        opened = plugins().open_checkpoint(str(tmp_path))
        load_params(family, cfg, opened, dtype=jnp.float32, mesh=make_mesh())

    load(tensors)  # fine as it is
    ours = [name for name in tensors if not name.startswith(("vision_", "multi_modal_"))]
    # One of each kind of tensor that a layer has, and those outside of the layers.
    kinds = {name.replace(".1.", ".0."): name for name in ours}
    for name in kinds.values():
        with pytest.raises(CheckpointError) as caught:
            load({other: tensors[other] for other in tensors if other != name})
        assert parameter_of(name) in str(caught.value), name
    layer = next(name for name in ours if ".layers.0." in name).split(".layers.0.")[0]
    extra = f"{layer}.layers.0.self_attn.gate_proj.weight"
    with pytest.raises(CheckpointError) as caught:
        load({**tensors, extra: np.zeros((2, 2), np.float32)})
    assert extra in str(caught.value)


def parameter_of(tensor: str) -> str:
    """Return the parameter that a tensor becomes, or the first of those that it is cut into."""
    name = tensor.removeprefix("language_model.")
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)  # all experts' are one parameter
    return name.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj")
