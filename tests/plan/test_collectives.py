from __future__ import annotations

import pytest

from hexllm.plan.chips import CHIPS
from hexllm.plan.collectives import Collective, collective_of
from hexllm.plan.hlo import parse_module
from tests.plan.programs import stored

V5E = CHIPS["v5e"]
ARRAY = 4096 * 1024 * 4  # bytes of one chip's part of the program's argument


def found(name):
    module = parse_module(stored(name))
    return [each for one in module.entry if (each := collective_of(module, one))]


def test_the_collectives_of_a_program():
    assert sorted(found("collectives"), key=lambda each: each.kind) == [
        Collective("all-gather", 4, 4 * ARRAY),
        Collective("all-reduce", 4, ARRAY),
        Collective("all-to-all", 4, ARRAY),
        # XLA shifts the parts of its reduce-scatter (padded to whole tiles) by one permutation.
        Collective("collective-permute", 4, 96 * 1024 * 4),
        Collective("reduce-scatter", 4, 4224 * 1024 * 4),
    ]
    assert found("permute") == [Collective("collective-permute", 4, ARRAY)]
    assert found("tensor_parallel") == [Collective("all-reduce", 4, 64 * 4096 * 2)]
    assert found("matmul") == []


@pytest.mark.parametrize(
    ("kind", "bytes_a_link", "hops"),
    [
        # In a ring of 4 with two directions each link carries half of what a member sends.
        ("all-gather", 3 / 4 / 2, 1.5),
        ("reduce-scatter", 3 / 4 / 2, 1.5),
        ("all-reduce", 2 * 3 / 4 / 2, 3),
        # A quarter goes to each other chip: 1 + 1 + 2 hops over 2 links a chip.
        ("all-to-all", 4 / 4 / 2, 2),
        ("collective-permute", 1, 1),
    ],
)
def test_the_time_of_a_ring_of_four(kind, bytes_a_link, hops):
    size = 90e6
    seconds = bytes_a_link * size / 45e9 + hops * 1e-6
    assert Collective(kind, 4, int(size)).seconds(V5E) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all"])
def test_more_chips_and_bytes_take_longer_and_one_chip_nothing(kind):
    times = [Collective(kind, n, 10**7).seconds(V5E) for n in (1, 2, 4, 8, 16)]
    assert times[0] == 0
    assert times == sorted(times)
    assert Collective(kind, 4, 10**8).seconds(V5E) > times[2] * 5


def test_asynchronous_ones_count_their_results_only():
    text = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[1024]) -> f32[4096] {
  %p = f32[1024]{0:T(1024)} parameter(0)
  %s = (f32[1024]{0:T(1024)}, f32[4096]{0:T(1024)}) all-gather-start(%p), replica_groups=[1,4]<=[4]
  %r = f32[1024]{0:T(1024)} all-reduce-start(%p), replica_groups=[1,4]<=[4], to_apply=%add
  %t = f32[1024]{0:T(1024)} all-reduce-done(%r)
  ROOT %d = f32[4096]{0:T(1024)} all-gather-done(%s)
}
"""
    module = parse_module(text)
    kinds = [each for one in module.entry if (each := collective_of(module, one))]
    assert kinds == [Collective("all-gather", 4, 4096 * 4), Collective("all-reduce", 4, 1024 * 4)]
