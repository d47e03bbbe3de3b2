from __future__ import annotations

import pytest

from hexllm.core.errors import ConfigError
from hexllm.plan.chips import CHIPS, chip_of


@pytest.mark.parametrize("name", CHIPS)
def test_a_device_kind_finds_its_chip(name):
    assert chip_of(CHIPS[name].device_kind) is CHIPS[name]
    assert CHIPS[name].name == name


def test_an_unknown_device_kind_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"'TPU v3'.*TPU v4, TPU v5 lite.*or TPU7x"):
        chip_of("TPU v3")


@pytest.mark.parametrize("name", CHIPS)
def test_the_rates_agree_with_jaxs_own_table(name):
    """JAX's table rounds other sources; it has 2460 GB/s for v5p, where the datasheet says 2765."""
    from jax.experimental.pallas import tpu as pltpu

    chip = CHIPS[name]
    version = pltpu.ChipVersion(name.removeprefix("tpu"))
    info = pltpu.get_tpu_info_for_chip(version, chip.num_cores)
    cores = chip.num_cores
    assert chip.peak_flops == pytest.approx(cores * info.bf16_ops_per_second, rel=0.01)
    assert chip.peak_int8_flops == pytest.approx(cores * info.int8_ops_per_second, rel=0.01)
    assert chip.hbm_bytes_per_s == pytest.approx(cores * info.mem_bw_bytes_per_second, rel=0.13)
    assert chip.vmem_bytes == info.vmem_capacity_bytes
    assert (chip.mxus, chip.mxu_size) == (info.num_mxus, info.mxu_column_size)
    assert chip.has_fp8 == (info.fp8_ops_per_second > 0)
    assert 0.85 < chip.hbm_bytes / (cores * info.hbm_capacity_bytes) < 1


@pytest.mark.parametrize("name", CHIPS)
def test_the_peak_is_what_the_matrix_units_can_do_at_the_clock(name):
    """A multiply and an add a cell and cycle; units of 256 take two rows a cycle."""
    chip = CHIPS[name]
    cells = chip.num_cores * chip.mxus * chip.mxu_size**2
    per_cycle = chip.peak_flops / chip.clock_hz / (2 * cells)
    assert per_cycle == pytest.approx(1 if chip.mxu_size == 128 else 2, rel=0.17)
