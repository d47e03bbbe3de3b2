"""Where each dimension of a parameter lies on the mesh: one table from logical to mesh axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hexllm.core.errors import ConfigError
from hexllm.model.specs import ParamSpec, is_spec, path_of
from hexllm.ops.platform import TENSOR_AXIS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.model.config import ModelConfig

#: Logical axis -> mesh axis; None is held whole by every device.
MESH_AXES: dict[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "embed": None,
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "expert": None,
}


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of the first ``tensor_parallel_size`` devices.

    Raises:
        ConfigError: There are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many devices, and JAX sees "
            f"{len(devices)} ({devices[0].platform}). Lower it, or start on a larger slice."
        )
    chosen = np.asarray(devices[:tensor_parallel_size])
    return Mesh(chosen, (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def check_divides(cfg: ModelConfig, mesh: Mesh) -> None:
    """Refuse a mesh that the model's heads cannot be dealt out over.

    Raises:
        ConfigError: The message names the key and the sizes that would do.
    """
    size = mesh.shape[TENSOR_AXIS]
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(cfg, key)
        if value % size:
            fits = [
                n
                for n in range(1, cfg.num_key_value_heads + 1)
                if not (cfg.num_key_value_heads % n or cfg.intermediate_size % n)
            ]
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide {key}={value} ({cfg.source}). "
                f"Use {', '.join(map(str, fits[:-1]))}{' or ' if fits[1:] else ''}{fits[-1]}."
            )


def spec_sharding(path: str, spec: ParamSpec, mesh: Mesh) -> NamedSharding:
    """Return where a parameter lies.

    Raises:
        ConfigError: A sharded dimension is not a multiple of its mesh axis.
    """
    axes = tuple(None if axis is None else MESH_AXES[axis] for axis in spec.axes)
    for size, axis in zip(spec.shape, axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"{path} has {size} rows or columns to deal out over {mesh.shape[axis]} devices, "
                f"which do not divide it. Choose a tensor_parallel_size that does."
            )
    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]


def tree_shardings(specs: Any, mesh: Mesh) -> Any:
    """Return the tree of ``specs`` with each ParamSpec replaced by its sharding on ``mesh``."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, spec: spec_sharding(path_of(keys), spec, mesh), specs, is_leaf=is_spec
    )
