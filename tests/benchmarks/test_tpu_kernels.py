from __future__ import annotations

import importlib.util

import pytest

from benchmarks import tpu_kernels
from hexllm.plan.bundles import Region
from hexllm.plan.chips import CHIPS

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]


def products(kernel, trips):
    """How many products the kernel issues in all, by its regions and how often they run."""

    def inside(region):
        runs = 1 if region.parent is None else trips.get(region.name, 1)
        return runs * (region.counts["matmul"] + sum(inside(child) for child in region.children))

    return inside(kernel)


def test_decode_runs_as_often_as_there_are_pieces_and_is_issued_within_its_floor():
    chip = CHIPS["v5e"]
    kernel, trips = tpu_kernels.measure("decode", chip, 32)
    # A piece of 512 tokens times a head of 128 is four units' tiles, twice, for keys and values.
    assert products(kernel, trips) == 64 * 2 * 2 * (4 + 4)
    assert kernel.issue_us(chip, trips) < tpu_kernels.floor_us("decode", chip)
    assert tpu_kernels.floor_us("decode", chip) == pytest.approx(81.9, abs=0.1)


def test_prefill_multiplies_what_lies_below_the_diagonal():
    chip = CHIPS["v6e"]
    kernel, trips = tpu_kernels.measure("prefill", chip, 64)
    # Ten of the sixteen pairs of 512 queries and 512 keys, for 8 heads; a product takes 16 rows by
    # 128 (padded to the unit's 256) by 256 of both keys and values.
    pairs = 10 * 8 * (512 // 16)
    assert products(kernel, trips) == pytest.approx(pairs * (2 + 2), rel=0.01)
    assert 9 < tpu_kernels.floor_us("prefill", chip) < kernel.issue_us(chip, trips)


def test_a_kernel_of_other_loops_is_refused():
    kernel = Region("kernel", 0, 0)
    kernel.children = [Region("L1", 0, 0, parent=kernel)]
    tile = tpu_kernels.attention.Tiling(pages=16, rows=512, heads=2, cores=1)
    with pytest.raises(RuntimeError, match="other loops than expected"):
        tpu_kernels.trips(kernel, "decode", tile, 32, 2)
