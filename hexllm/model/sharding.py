"""Where each dimension of a parameter lies on the mesh: one table from logical to mesh axes."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hexllm.core.errors import ConfigError
from hexllm.core.wording import listing
from hexllm.model.specs import ParamSpec, is_spec, path_of
from hexllm.ops.platform import TENSOR_AXIS, platform, traced_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
        platform = devices[0].platform
        remedy = "Lower it, or start on a larger slice."
        if platform == "cpu":
            flag = f"--xla_force_host_platform_device_count={tensor_parallel_size}"
            remedy = f"Lower it, or set XLA_FLAGS={flag}: a CPU is then as many devices."
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many devices, and JAX sees "
            f"{len(devices)} ({platform}). {remedy}"
        )
    chosen = np.asarray(devices[:tensor_parallel_size])
    return Mesh(chosen, (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def check_divides(cfg: ModelConfig, specs: Mapping[str, ParamSpec], mesh: Mesh) -> None:
    """Refuse a mesh that the model's query heads or MLPs cannot be dealt out over.

    KV heads and the vocabulary need not divide: see :func:`shard_config`.

    Args:
        cfg: The model.
        specs: Its parameters, by path.
        mesh: The devices.

    Raises:
        ConfigError: The message names the key and the sizes that would do.
    """
    size = mesh.shape[TENSOR_AXIS]
    sizes = {cfg.num_attention_heads: "num_attention_heads"} | _mlp_sizes(cfg, specs)
    for value, key in sizes.items():
        if value % size:
            most = math.gcd(*sizes)
            fits = listing((str(n) for n in range(1, most + 1) if most % n == 0), "or")
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide {key}={value} ({cfg.source}). "
                f"Use {fits}."
            )


def _mlp_sizes(cfg: ModelConfig, specs: Mapping[str, ParamSpec]) -> dict[int, str]:
    """Return each size that an MLP of the model has, with the configuration's name for it."""
    names = {
        getattr(cfg, field.name): field.name
        for field in dataclasses.fields(cfg)
        if "intermediate_size" in field.name
    }
    found: dict[int, str] = {}
    for path, spec in specs.items():
        for dimension, axis in zip(spec.shape, spec.axes, strict=True):
            if axis == "mlp":
                found.setdefault(dimension, names.get(dimension, f"the MLP size of {path}"))
    return found


def shard_config(cfg: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Return the model as it is computed on ``mesh``.

    Each device computes whole KV heads, so each of K is kept as often as it takes for their number
    to be a multiple of the devices'; the vocabulary is padded to a multiple, too. What is loaded
    from the checkpoint stays the model's (``hexllm.model.widening``).
    """
    size = mesh.shape[TENSOR_AXIS]
    return dataclasses.replace(
        cfg,
        num_key_value_heads=math.lcm(cfg.num_key_value_heads, size),
        vocab_size=-(-cfg.vocab_size // size) * size,
    )


def partition_spec(axes: Iterable[str | None]) -> PartitionSpec:
    """Return how dimensions of the logical ``axes`` are dealt out."""
    return PartitionSpec(*(None if axis is None else MESH_AXES[axis] for axis in axes))  # type: ignore[no-untyped-call]


def spec_sharding(path: str, spec: ParamSpec, mesh: Mesh) -> NamedSharding:
    """Return where a parameter lies.

    Raises:
        ConfigError: A sharded dimension is not a multiple of its mesh axis.
    """
    partition = partition_spec(spec.axes)
    for size, axis in zip(spec.shape, partition, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"{path} has {size} rows or columns to deal out over {mesh.shape[axis]} devices, "
                f"which do not divide it. Choose a tensor_parallel_size that does."
            )
    return NamedSharding(mesh, partition)


def spec_format(path: str, spec: ParamSpec, mesh: Mesh) -> NamedSharding | Format:
    """Return where a parameter lies, and how its values are ordered there where that is not usual.

    Raises:
        ConfigError: As :func:`spec_sharding`.
    """
    sharding = spec_sharding(path, spec, mesh)
    with traced_for(mesh):
        if spec.memory_order is None or platform() != "tpu":
            return sharding
    return Format(Layout(spec.memory_order), sharding)


def tree_shardings(specs: Any, mesh: Mesh) -> Any:
    """Return the tree of ``specs`` with each ParamSpec replaced by its sharding on ``mesh``."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, spec: spec_sharding(path_of(keys), spec, mesh), specs, is_leaf=is_spec
    )
