"""What is known of each TPU generation, as a device of JAX has it.

Where the figures come from:

- Peak FLOP/s, HBM bandwidth: Google Cloud's pages on each TPU version, divided by the devices of a
  chip (JAX sees a TPU7x chip as two devices, one for each of its TensorCores).
- Clock, MXUs: the cost model's log in libtpu 0.0.42, and JAX's ``tpu_info`` table, which also has
  the VMEM and says which chips have a product of fp8 operands.
- ``hbm_bytes``: what the compiler itself says it may use, from its error when a program needs more
  (libtpu 0.0.42 and 0.0.50).
- ``ici_bytes_per_s`` and ``hop_s`` are assumptions: XLA does not show its own. The rate of a link
  is the chip's published interconnect bandwidth over its links, each way; a hop is the usual 1 µs.
"""

from __future__ import annotations

from dataclasses import dataclass

from hexllm.core.errors import ConfigError
from hexllm.core.wording import listing

_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True)
class Chip:
    """One device of a TPU generation. All rates and sizes are of one device.

    Attributes:
        name: As topologies are named: ``v5e``.
        device_kind: JAX's name of the device: ``TPU v5 lite``.
        num_cores: TensorCores that one device joins (2 where a chip runs as one "megacore").
        devices_per_chip: Devices that JAX sees for one chip.
        clock_hz: Of a TensorCore.
        peak_flops: bf16 FLOP/s of the whole device.
        peak_int8_flops: Operations/s of products of int8 operands; 0 where the chip has none.
        peak_fp8_flops: FLOP/s of products of fp8 operands; 0 where the chip has none.
        hbm_bytes_per_s: Bandwidth by the datasheet.
        hbm_bytes: What a program may take.
        vmem_bytes: Of one TensorCore.
        mxus: Of one TensorCore.
        mxu_size: Rows and columns of one.
        ici_bytes_per_s: Of one link, one way.
        ring_links: Links by which a ring sends at the same time (both directions).
        hop_s: Seconds before a neighbour has the first byte.
        dimensions: Of the torus that the chips form.
    """

    name: str
    device_kind: str
    num_cores: int
    devices_per_chip: int
    clock_hz: float
    peak_flops: float
    peak_int8_flops: float
    peak_fp8_flops: float
    hbm_bytes_per_s: float
    hbm_bytes: int
    vmem_bytes: int
    mxus: int
    mxu_size: int
    ici_bytes_per_s: float
    ring_links: int = 2
    hop_s: float = 1e-6
    dimensions: int = 2

    @property
    def has_fp8(self) -> bool:
        """Whether its matrix units multiply fp8 operands."""
        return self.peak_fp8_flops > 0

    @property
    def ring_bytes_per_s(self) -> float:
        """What each member of a ring sends, all its links together."""
        return self.ring_links * self.ici_bytes_per_s


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            device_kind="TPU v4",
            num_cores=2,
            devices_per_chip=1,
            clock_hz=1.05e9,
            peak_flops=275e12,
            peak_int8_flops=0,
            peak_fp8_flops=0,
            hbm_bytes_per_s=1228e9,
            hbm_bytes=int(30.75 * _GIB),
            vmem_bytes=16 * _MIB,
            mxus=4,
            mxu_size=128,
            ici_bytes_per_s=45e9,
            dimensions=3,
        ),
        Chip(
            name="v5e",
            device_kind="TPU v5 lite",
            num_cores=1,
            devices_per_chip=1,
            clock_hz=1.5e9,
            peak_flops=197e12,
            peak_int8_flops=394e12,
            peak_fp8_flops=0,
            hbm_bytes_per_s=819e9,
            hbm_bytes=int(15.75 * _GIB),
            vmem_bytes=128 * _MIB,
            mxus=4,
            mxu_size=128,
            ici_bytes_per_s=45e9,
        ),
        Chip(
            name="v5p",
            device_kind="TPU v5",
            num_cores=2,
            devices_per_chip=1,
            clock_hz=1.75e9,
            peak_flops=459e12,
            peak_int8_flops=918e12,
            peak_fp8_flops=0,
            hbm_bytes_per_s=2765e9,
            hbm_bytes=int(95.74 * _GIB),
            vmem_bytes=64 * _MIB,
            mxus=4,
            mxu_size=128,
            ici_bytes_per_s=90e9,
            dimensions=3,
        ),
        Chip(
            name="v6e",
            device_kind="TPU v6 lite",
            num_cores=1,
            devices_per_chip=1,
            clock_hz=1.75e9,
            peak_flops=918e12,
            peak_int8_flops=1836e12,
            peak_fp8_flops=918e12,
            hbm_bytes_per_s=1640e9,
            hbm_bytes=int(31.25 * _GIB),
            vmem_bytes=128 * _MIB,
            mxus=2,
            mxu_size=256,
            ici_bytes_per_s=90e9,
        ),
        Chip(
            name="tpu7x",
            device_kind="TPU7x",
            num_cores=1,
            devices_per_chip=2,
            clock_hz=1.9e9,
            peak_flops=1153.5e12,
            peak_int8_flops=0,
            peak_fp8_flops=2307e12,
            hbm_bytes_per_s=3686e9,
            hbm_bytes=int(94.75 * _GIB),
            vmem_bytes=64 * _MIB,
            mxus=2,
            mxu_size=256,
            ici_bytes_per_s=90e9,
            dimensions=3,
        ),
    )
}


def chip_of(device_kind: str) -> Chip:
    """Return the record of a device.

    Args:
        device_kind: JAX's name of it (``device.device_kind``).

    Raises:
        ConfigError: It is none of ``CHIPS``.
    """
    for chip in CHIPS.values():
        if chip.device_kind == device_kind:
            return chip
    known = listing((chip.device_kind for chip in CHIPS.values()), "or")
    raise ConfigError(f"Nothing is known of device kind {device_kind!r}. Plan for a {known}.")
