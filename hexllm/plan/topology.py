"""Which TPUs a program is planned for: names of topologies, and devices that are not there."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import ConfigError
from hexllm.core.wording import described, listing
from hexllm.plan.chips import CHIPS, Chip

if TYPE_CHECKING:
    import jax

#: Slices that Google Cloud sells: chips in one, and their layout.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SOLID = (
    *("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)

#: What else a generation is called. Whatever follows the dash counts chips or TensorCores.
_SPELLINGS = {"v5litepod": "v5e", "v7x": "tpu7x", **{name: name for name in CHIPS}}

#: Generations whose accelerator types (``v5p-8``) count TensorCores, two a chip.
_COUNTED_IN_CORES = ("v4", "v5p", "tpu7x")

#: Google Cloud's machine types: generation and layout of the one host's chips.
MACHINES = {
    "ct4p-hightpu-4t": ("v4", "2x2x1"),
    "ct5lp-hightpu-1t": ("v5e", "1x1"),
    "ct5lp-hightpu-4t": ("v5e", "2x2"),
    "ct5lp-hightpu-8t": ("v5e", "2x4"),
    "ct5p-hightpu-4t": ("v5p", "2x2x1"),
    "ct6e-standard-1t": ("v6e", "1x1"),
    "ct6e-standard-4t": ("v6e", "2x2"),
    "ct6e-standard-8t": ("v6e", "2x4"),
    "tpu7x-standard-4t": ("tpu7x", "2x2x1"),
}

_EXAMPLES = "v5e:2x2, v6e-8 or ct5lp-hightpu-4t"

#: What libtpu is told where there is no TPU. Without it, it asks the metadata server of a machine
#: that is none of Google Cloud's, prints what it could not find there, and lets one process at a
#: time compile. The accelerator's name has no effect on topologies that are asked for by name.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Topology:
    """A slice of chips.

    Attributes:
        chip: Its generation.
        shape: Chips along each dimension of the torus.
    """

    chip: Chip
    shape: tuple[int, ...]

    @property
    def layout(self) -> str:
        """The shape as it is written: ``2x2``."""
        return "x".join(map(str, self.shape))

    @property
    def name(self) -> str:
        """The name that libtpu gives it: ``v5e:2x2``."""
        return f"{self.chip.name}:{self.layout}"

    @property
    def num_chips(self) -> int:
        """Chips in it."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Devices of JAX in it."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def host_shape(self) -> tuple[int, int, int]:
        """The chips of one host: the whole slice up to 2x4, and 2x2 of a larger one."""
        if self.num_chips <= 4 or self.shape == (2, 4):
            x, y, z = (*self.shape, 1)[:3]
            return x, y, z
        return 2, 2, 1

    @property
    def num_hosts(self) -> int:
        """Machines it is made of."""
        return self.num_chips // math.prod(self.host_shape)


def parse_topology(text: str) -> Topology:
    """Return the topology that a name stands for.

    Args:
        text: Generation and layout (``v5e:2x2``), an accelerator type (``v5litepod-4``, ``v5p-8``;
            those of v4, v5p and tpu7x count TensorCores, two a chip), or a Google Cloud machine
            type (``ct5lp-hightpu-4t``).

    Raises:
        ConfigError: It names nothing that exists.
    """
    word = text.strip().lower()
    if word in MACHINES:
        generation, layout = MACHINES[word]
        return _topology(generation, layout)
    if found := re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", word):
        generation = _generation(found[1], text)
        if found[2] not in layouts(generation):
            offered = listing((f"{generation}:{each}" for each in layouts(generation)), "or")
            raise ConfigError(f"Topology {text!r} does not exist. Choose {offered}.")
        return _topology(generation, found[2])
    if found := re.fullmatch(r"(\w+)-(\d+)", word):
        generation = _generation(found[1], text)
        by_count = accelerator_types(generation)
        if int(found[2]) not in by_count:
            offered = listing((f"{generation}-{count}" for count in by_count), "or")
            raise ConfigError(f"Accelerator type {text!r} does not exist. Choose {offered}.")
        return _topology(generation, by_count[int(found[2])])
    kinds = f"like {_EXAMPLES}. Machine types are {listing(sorted(MACHINES))}"
    raise ConfigError(f"{text!r} is no TPU topology. Name one {kinds}.")


def layouts(generation: str) -> tuple[str, ...]:
    """Return the layouts in which a generation is sold, smallest first."""
    return _FLAT if CHIPS[generation].dimensions == 2 else _SOLID


def accelerator_types(generation: str) -> dict[int, str]:
    """Return what may follow the dash of an accelerator type, with the layout it means."""
    unit = 2 if generation in _COUNTED_IN_CORES else 1
    return {unit * math.prod(_numbers(layout)): layout for layout in layouts(generation)}


def devices(topology: Topology) -> list[jax.Device]:
    """Return the devices to compile for, in the order of their ids. None of them need exist.

    Args:
        topology: Of which the devices are wanted.

    Raises:
        ConfigError: libtpu is not installed, or it refuses the topology.
    """
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigError(
            f"Planning for {topology.name} needs the TPU compiler, and libtpu is not installed. "
            "Run: pip install 'hexllm[tpu]' (or pip install libtpu)."
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.name, **_libtpu_options(topology)
        )
    except Exception as error:  # libtpu's are RuntimeErrors of several classes
        raise ConfigError(
            f"libtpu does not make topology {topology.name}: {described(error)}. "
            f"Try another one, like {_EXAMPLES}, or another release of libtpu."
        ) from error
    return sorted(description.devices, key=lambda device: device.id)


def _libtpu_options(topology: Topology) -> dict[str, Any]:
    """Return what libtpu must be told besides the name.

    It divides a slice into hosts of 2x2 chips unless told, and refuses (0.0.42) what that does not
    divide. Its v4 has each TensorCore as a device, where real ones run both as one megacore.
    """
    options: dict[str, Any] = {"chips_per_host_bounds": topology.host_shape}
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"
    return options


def _generation(word: str, text: str) -> str:
    if word not in _SPELLINGS:
        known = listing(sorted(_SPELLINGS), "or")
        raise ConfigError(f"{text!r} names no TPU generation: {word!r} is none of {known}.")
    return _SPELLINGS[word]


def _topology(generation: str, layout: str) -> Topology:
    return Topology(CHIPS[generation], _numbers(layout))


def _numbers(layout: str) -> tuple[int, ...]:
    return tuple(int(part) for part in layout.split("x"))
