"""The sampler goes through the TPU compiler, within its bars. Nothing runs."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.sampling_tpu import (
    CONDITIONALS,
    MIXES,
    bytes_received,
    estimate,
    kernel_price,
    lower_sampler,
    mesh_of,
)
from hexllm.ops.platform import TENSOR_AXIS
from hexllm.ops.sampling_shards import Vocabulary
from hexllm.plan.hlo import parse_module
from hexllm.plan.topology import parse_topology

pytestmark = pytest.mark.tpu_compile

S, V = 64, 128256
TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
#: Microseconds on v5e: by the schedule's simulation, and with XLA's own cycles. A greedy batch is
#: 12.6 by libtpu 0.0.42 and 21.1 by 0.0.50, which copies the logits into VMEM for a draw meanwhile.
BARS = {
    "greedy": (23, 45),
    "greedy and temperature": (30, 120),
    "top-k": (70, 240),
    "top-p": (85, 410),
    "top-k and top-p": (100, 520),
    "top-p and temperature": (95, 470),
    "top-p of a flat row": (370, 1500),
    "logprobs, greedy": (60, 310),
}


@functools.cache
def compiled(topology):
    return parse_module(lower_sampler(mesh_of(topology), S, V).compile().as_text())


@functools.cache
def price(topology):
    shards = mesh_of(topology).size
    return kernel_price(topology, S, Vocabulary(V, V // shards, shards))


def instructions(module):
    return [each for computation in module.computations.values() for each in computation]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_each_batch_stays_below_its_bar(topology, mix):
    found = estimate(compiled(topology), parse_topology(topology).chip, mix, price(topology))
    roof, xla = BARS[mix.name]
    assert found.roof_us <= roof
    assert found.xla_us <= xla
    assert not [name for name in found.ledger.unpriced if "kernel" in name or "while" in name]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_devices_exchange_a_few_kilobytes_a_row(topology):
    assert bytes_received(compiled(topology), S) == 4 * 1024 * 4, "4 KB of each device"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nothing_sorts_or_copies_the_vocabulary(topology):
    module = compiled(topology)
    width = V // mesh_of(topology).size
    for each in instructions(module):
        if each.opcode in ("sort", "copy", "transpose") or each.target == "TopK":
            assert each.num_bytes < S * width * 4, each.name


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_estimate_knows_every_conditional(topology):
    found = [each for each in instructions(compiled(topology)) if each.opcode == "conditional"]
    assert len(found) == len(CONDITIONALS)
    for each in found:
        assert any(re.search(f"{name}/cond$", each.op_name) for name in CONDITIONALS), each.op_name


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_kernel_takes_little_more_than_its_bytes(topology):
    assert price(topology).issue_us < {"v5e:2x2": 17, "v6e:2x2": 15}[topology]


def test_gathered_logits_would_be_seen():
    mesh = mesh_of("v5e:2x2")
    logits = jax.ShapeDtypeStruct(
        (S, V), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, TENSOR_AXIS))
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(lambda x: x + 1, out_shardings=replicated).lower(logits).compile()
    assert bytes_received(parse_module(program.as_text()), S) >= V * 4


@pytest.mark.parametrize(
    ("topology", "size", "rows", "vocab"),
    [
        ("v5e:1x1", 1, 1, 32000),
        ("v6e:2x2", 4, 12, 151936),
        pytest.param("v5p:2x2x1", 4, 64, 128256, marks=pytest.mark.slow),
        pytest.param("v5e:4x4", 16, 64, 128256, marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 8, 256, 201088, marks=pytest.mark.slow),
        pytest.param("v6e:1x1", 1, 64, 262208, marks=pytest.mark.slow),
    ],
)
def test_it_compiles_for_other_sizes(topology, size, rows, vocab):
    vocab = -(-vocab // size) * size
    module = parse_module(lower_sampler(mesh_of(topology, size), rows, vocab).compile().as_text())
    padded = -(-rows // 8) * 8
    assert bytes_received(module, padded) <= 4 * 1024 * size
    assert any(each.target == "tpu_custom_call" for each in instructions(module))
