"""Opens what ``hexllm plan`` is asked about, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import CheckpointError, ConfigError
from hexllm.engine.build import read_config
from hexllm.engine.overrides import configure
from hexllm.model.loading import param_specs
from hexllm.model.sharding import check_divides, make_mesh
from hexllm.model.specs import flatten
from hexllm.plan.memory import count_parameters
from hexllm.plan.records import Model
from hexllm.plan.topology import devices

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from hexllm.core.plugins import Plugins
    from hexllm.core.settings import Settings
    from hexllm.plan.topology import Topology


def open_model(settings: Settings, plugins: Plugins) -> Model:
    """Return the model that ``settings.model`` names.

    Args:
        settings: ``model`` is what a loader opens, or the path of a ``config.json``.
        plugins: This process's.

    Raises:
        HexllmError: Nothing is there, or no family implements it.
    """
    path = Path(settings.model).expanduser()
    if path.suffix == ".json" and path.is_file():
        data = _read(path)
    else:
        checkpoint = plugins.open_checkpoint(settings.model, settings.revision, settings.options)
        data = read_config(checkpoint)
    entry = plugins.resolve_model_family(data)
    family = entry.build(settings.options.get(entry.component.name))
    cfg = configure(family, data, settings.model, settings)
    return Model(settings.model, family, entry.component.name, cfg, count_parameters(family, cfg))


def choose_mesh(model: Model, topology: Topology, size: int | None) -> Mesh:
    """Return the devices of a topology that the model is spread over.

    Args:
        model: The model.
        topology: The chips.
        size: How many devices; None takes the most that the model divides into.

    Raises:
        ConfigError: There are not so many, or the model does not divide into them.
    """
    if size is not None and size > topology.num_devices:
        raise ConfigError(
            f"tensor_parallel_size={size} needs as many devices, and {topology.name} has "
            f"{topology.num_devices}. Use {topology.num_devices} or fewer, or a larger topology."
        )
    all_devices = devices(topology)
    if size is None:
        size = largest_size(model, topology)
    return make_mesh(size, all_devices)


def largest_size(model: Model, topology: Topology) -> int:
    """Return the most devices of a topology, a divisor of their number, that a model divides into.

    Every model divides into one.
    """
    count = topology.num_devices
    specs = flatten(param_specs(model.family, model.cfg))
    all_devices = devices(topology)
    for size in (n for n in range(count, 1, -1) if count % n == 0):
        try:
            check_divides(model.cfg, specs, make_mesh(size, all_devices))
        except ConfigError:
            continue
        return size
    return 1


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__}, not a JSON object.")
    return data
