"""Static time of a sampling step on TPUs, for each kind of batch; no TPU is needed.

    python -m benchmarks.sampling_tpu [--topologies v5e:2x2 v6e:2x2] [--rows 64] [--vocab 128256]

``floor`` is reading the logits that a device holds, ``roof`` the compiled program's schedule at the
datasheet's rates, ``xla`` the same with XLA's own cycles, which are about right for arithmetic and
too high for memory and for small operations. The kernel's time is counted in its instructions.
``sent`` is what a device receives of the others, the largest exchange, in bytes a row.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hexllm.ops.platform import TENSOR_AXIS, traced_for
from hexllm.ops.sampling import rows_from_params, sample
from hexllm.ops.sampling_candidates import SEGMENT, list_length
from hexllm.ops.sampling_pallas_tpu import LANES, lane_lists
from hexllm.ops.sampling_shards import Vocabulary
from hexllm.plan.bundles import parse_bundles
from hexllm.plan.dump import dump
from hexllm.plan.hlo import parse_module
from hexllm.plan.schedule import Estimate, simulate
from hexllm.plan.topology import devices, parse_topology
from hexllm.plan.walk import KernelPrice

if TYPE_CHECKING:
    from hexllm.plan.chips import Chip
    from hexllm.plan.hlo import Module

#: Turns of a bisection of 32 bits, 3 a turn among candidates and 2 in the whole vocabulary.
LOOPS = {"search/.*by_(count|mass)/.*while": 16, "by_(count|mass)/.*while": 11}


@dataclass(frozen=True)
class Mix:
    """A kind of batch, as the branches that it takes.

    Attributes:
        name: For the table.
        branches: Name of a conditional to the branch that is taken; those left out take that of
            False.
    """

    name: str
    branches: dict[str, int] = field(default_factory=dict)


_MASKED = {"draw": 1, "masks": 1, "few": 1}
MIXES = (
    Mix("greedy"),
    Mix("greedy and temperature", {"draw": 1}),
    Mix("top-k", {**_MASKED, "by_count": 1}),
    Mix("top-p", {**_MASKED, "by_mass": 1}),
    Mix("top-k and top-p", {**_MASKED, "by_count": 1, "by_mass": 1}),
    Mix("top-p and temperature", {**_MASKED, "by_mass": 1, "few": 0}),
    Mix(
        "top-p of a flat row",
        {**_MASKED, "by_mass": 1, "few": 0, "search": 1, "search/.*by_mass": 1},
    ),
    Mix("logprobs, greedy", {"report": 1, "from_lanes": 1}),
)
CONDITIONALS = (
    *("search/.*by_count", "search/.*by_mass", "by_count", "by_mass"),
    *("search", "few", "masks", "draw", "from_lanes", "report"),
)


def mesh_of(topology: str, size: int | None = None) -> Mesh:
    """Return the mesh of a topology's devices, or of the first of them."""
    found = devices(parse_topology(topology))
    return Mesh(np.array(found[:size]), (TENSOR_AXIS,))


def lower_sampler(mesh: Mesh, rows: int, vocab: int) -> jax.stages.Lowered:
    """Lower the sampler of a mesh, the logits dealt out over the vocabulary."""

    def shape(x: jax.Array, *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    logits = jax.eval_shape(lambda: jnp.zeros((rows, vocab), jnp.float32))
    settings = jax.tree.map(shape, rows_from_params([], [], rows))
    replicated = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    with traced_for(mesh):
        program = jax.jit(lambda logits, rows: sample(logits, rows), out_shardings=replicated)
        return program.lower(shape(logits, None, TENSOR_AXIS), settings)


def lower_kernel(topology: str, rows: int, width: int, levels: int) -> jax.stages.Lowered:
    """Lower the kernel alone, for one device."""
    sharding = SingleDeviceSharding(devices(parse_topology(topology))[0])
    logits = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=sharding)
    program = functools.partial(lane_lists, levels=levels, segment=SEGMENT)
    return jax.jit(program).lower(logits)


def kernel_price(topology: str, rows: int, vocabulary: Vocabulary) -> KernelPrice:
    """Return what the kernel takes on one device, its instructions counted.

    Raises:
        RuntimeError: The kernel's loops are not those that this knows.
    """
    chip, levels, W = parse_topology(topology).chip, list_length(vocabulary), vocabulary.width
    found = dump(
        "benchmarks.sampling_tpu:lower_kernel",
        topology=topology,
        rows=rows,
        width=W,
        levels=levels,
    )
    kernel = parse_bundles(found.kernel("lane_lists"), chip)
    loops = [region for region in kernel if region.is_loop]
    if len(loops) != 2 or loops[1] not in list(loops[0]):
        raise RuntimeError(f"the kernel has other loops than expected:\n{kernel.table()}")
    grid, turns = loops
    segments = -(-W // SEGMENT)
    vectors = -(-W // LANES) / segments
    trips = {grid.name: -(-rows // 8) * segments, turns.name: vectors // 8}
    return KernelPrice(kernel.issue_us(chip, trips), rows * W * 4)


def estimate(module: Module, chip: Chip, mix: Mix, price: KernelPrice) -> Estimate:
    """Return the times of a batch of one kind."""
    branches = {f"{name}/cond$": mix.branches.get(name, 0) for name in CONDITIONALS}
    return simulate(module, chip, kernels={"lane_lists": price}, branches=branches, loops=LOOPS)


def bytes_received(module: Module, rows: int) -> int:
    """Return the bytes a row of the largest exchange in the program, whatever the batch."""
    sizes = [
        instruction.num_bytes
        for computation in module.computations.values()
        for instruction in computation
        if instruction.opcode.startswith(("all-", "collective", "reduce-scatter", "ragged-all"))
        and not instruction.opcode.endswith("-done")
    ]
    return max(sizes, default=0) // rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2", "v6e:2x2", "v5e:1x1"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128256)
    options = parser.parse_args()
    S, V = options.rows, options.vocab
    for topology in options.topologies:
        mesh, chip = mesh_of(topology), parse_topology(topology).chip
        vocabulary = Vocabulary(V, -(-V // mesh.size), mesh.size)
        price = kernel_price(topology, S, vocabulary)
        module = parse_module(lower_sampler(mesh, S, V).compile().as_text() or "")
        floor = S * vocabulary.width * 4 / chip.hbm_bytes_per_s * 1e6
        print(f"{topology}, {S} rows of {V} logits: floor {floor:.1f} us,", end=" ")
        print(f"kernel {price.issue_us:.1f} us, sent {bytes_received(module, S)} bytes a row")
        print(f"  {'batch':26}{'roof us':>9}{'xla us':>9}{'exchanges':>11}")
        for mix in MIXES:
            found = estimate(module, chip, mix, price)
            exchanges = sum(found.ledger.collectives.values())
            print(f"  {mix.name:26}{found.roof_us:9.1f}{found.xla_us:9.1f}{exchanges:11}")
            if found.ledger.unpriced:
                print("    without a price:", dict(found.ledger.unpriced))


if __name__ == "__main__":
    main()
