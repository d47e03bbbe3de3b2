"""Static time of the attention kernels on TPUs, from the compiler's own bundles; none is needed.

    python -m benchmarks.tpu_kernels [--chips v5e v6e v5p] [--blocks 16 32 64 128] [--regions]

Decode is 64 sequences of 1,024 tokens, prefill one of 2,048; 8 query and 2 KV heads of 128, as a
chip has them of Llama-3.1-8B over four. ``issue`` is what the instructions take on the busiest
core; ``floor`` what the KV cache takes to read, or the causal products at the peak; a kernel takes
about the larger. ``spills`` are the registers stored in the code, anywhere and in the innermost
loop that multiplies.

Every branch counts as taken, but where two exclude each other: a tile's pieces on the diagonal take
the one that masks. Loops over the blocks of a piece that is not full count one block a run.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from hexllm.ops import attention_pallas_tpu as attention
from hexllm.ops.kv_cache import TiledKV, head_lanes
from hexllm.ops.step import Step
from hexllm.plan.bundles import parse_bundles
from hexllm.plan.chips import CHIPS
from hexllm.plan.dump import dump
from hexllm.plan.topology import devices, parse_topology

if TYPE_CHECKING:
    from hexllm.plan.bundles import Region, Trips
    from hexllm.plan.chips import Chip

#: N, K and H of a chip.
Heads = tuple[int, int, int]
HEADS: Heads = (8, 2, 128)
DECODE_SEQS, DECODE_CONTEXT, PREFILL_TOKENS = 64, 1024, 2048


def shapes(
    kind: str, block_size: int, heads: Heads, sharding: Any = None
) -> tuple[jax.ShapeDtypeStruct, TiledKV, Step]:
    """Return queries, cache and step of the kernel's program."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    N, K, H = heads
    is_decode = kind == "decode"
    S = DECODE_SEQS if is_decode else 1
    T = DECODE_SEQS if is_decode else PREFILL_TOKENS
    B = (DECODE_CONTEXT if is_decode else PREFILL_TOKENS) // block_size
    pool = array(S * B, block_size, K * head_lanes(H), dtype=jnp.bfloat16)
    step = Step(
        positions=array(T),
        slot_mapping=array(T),
        block_tables=array(S, B),
        seq_lens=array(S),
        query_start_loc=array(S + 1),
        num_seqs=array(),
        logits_indices=array(S),
        lora_slots=array(T),
        max_query_len=1 if is_decode else T,
    )
    return array(T, N, H, dtype=jnp.bfloat16), TiledKV(pool=pool, head_dim=H), step


def lower(
    kind: str, topology: str, block_size: int, heads: Heads, softcap: float | None
) -> jax.stages.Lowered:
    """Lower a kernel's program for one chip."""
    scale = heads[2] ** -0.5
    device = devices(parse_topology(topology))[0]
    run = attention.decode if kind == "decode" else attention.ragged

    def program(q: jax.Array, kv: TiledKV, step: Step) -> jax.Array:
        chip = device.device_kind
        return run(q, kv, step, scale=scale, window=None, softcap=softcap, chip=chip)

    return jax.jit(program).lower(*shapes(kind, block_size, heads, SingleDeviceSharding(device)))


def trips(
    kernel: Region, kind: str, tile: attention.Tiling, block_size: int, num_kv_heads: int
) -> Trips:
    """Return how often the kernel's regions run on its busiest core.

    Raises:
        RuntimeError: The kernel's loops are not those that this knows.
    """
    C = tile.pages * block_size
    grid = [region for region in kernel.children if region.is_loop]
    walks = [region for region in kernel if region.is_loop and own_products(region)]
    if len(grid) != 1 or len(walks) != (1 if kind == "decode" else 2):
        raise RuntimeError(f"the {kind} kernel has other loops than expected:\n{kernel.table()}")
    if kind == "decode":
        steps = -(-DECODE_SEQS // tile.cores) * (num_kv_heads // tile.heads)
        return {grid[0].name: steps, walks[0].name: DECODE_CONTEXT / C}
    # The last core has the longest tiles. A piece is masked unless the tile's first query sees all
    # of it. The first walk is that of sequences with a few rows in a tile: there are none.
    tiles = PREFILL_TOKENS // tile.rows
    rows = [at * tile.rows for at in range(tiles - tiles // tile.cores, tiles)]
    pieces = sum(-(-(row + tile.rows) // C) for row in rows)
    unmasked = sum((row + 1) // C for row in rows)
    masked, plain = [each for each in walks[1].children if own_products(each)]
    return {
        grid[0].name: len(rows) * num_kv_heads,
        walks[0].name: 0,
        walks[1].name: pieces / len(rows),
        masked.name: 1 - unmasked / pieces,
        plain.name: unmasked / pieces,
    }


def own_products(region: Region) -> int:
    """Return how many products a region has that are in no loop inside it."""
    inside = (own_products(child) for child in region.children if not child.is_loop)
    return region.counts["matmul"] + sum(inside)


def inner_spills(kernel: Region) -> int:
    """Return how many registers are stored in the innermost loop that multiplies, at most."""
    return max(each.counts["spill store"] for each in kernel if own_products(each))


def floor_us(kind: str, chip: Chip, heads: Heads = HEADS) -> float:
    """Return what the kernel cannot be faster than."""
    N, K, H = heads
    if kind == "decode":
        return DECODE_SEQS * DECODE_CONTEXT * K * 2 * H * 2 / chip.hbm_bytes_per_s * 1e6
    return 2 * PREFILL_TOKENS**2 * N * H / chip.peak_flops * 1e6


def measure(
    kind: str,
    chip: Chip,
    block_size: int,
    heads: Heads = HEADS,
    softcap: float | None = None,
) -> tuple[Region, Trips]:
    """Compile a kernel and return its regions, with how often they run."""
    topology = "2x2" if chip.dimensions == 2 else "2x2x1"
    found = dump(
        "benchmarks.tpu_kernels:lower",
        kind=kind,
        topology=f"{chip.name}:{topology}",
        block_size=block_size,
        heads=heads,
        softcap=softcap,
    )
    name = "hexllm_decode_attention" if kind == "decode" else "hexllm_ragged_attention"
    kernel = parse_bundles(found.kernel(name), chip)
    q, kv, step = shapes(kind, block_size, heads)
    width = step.block_tables.shape[1]
    tile = attention.tiling(kv, q.shape[0], heads[0], width, chip.device_kind)
    return kernel, trips(kernel, kind, tile, block_size, heads[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e", "v5p"], choices=sorted(CHIPS))
    parser.add_argument("--blocks", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--kinds", nargs="+", default=["decode", "prefill"])
    parser.add_argument("--regions", action="store_true", help="print every kernel's regions too")
    options = parser.parse_args()
    print(
        f"{'kernel':8} {'chip':6} {'block':>5} {'issue us':>9} {'floor us':>9} {'ratio':>6}  spills"
    )
    for kind in options.kinds:
        for chip in (CHIPS[name] for name in options.chips):
            for block_size in options.blocks:
                kernel, runs = measure(kind, chip, block_size)
                issue, floor = kernel.issue_us(chip, runs), floor_us(kind, chip)
                inner = inner_spills(kernel)
                print(
                    f"{kind:8} {chip.name:6} {block_size:5} {issue:9.1f} {floor:9.1f} "
                    f"{issue / floor:6.2f}  {kernel.total('spill store')} / {inner}",
                    flush=True,
                )
                if options.regions:
                    print(kernel.table(runs))


if __name__ == "__main__":
    main()
