"""Times ``grouped_matmul`` beside XLA's own ragged product and a product of every row and weight.

    python benchmarks/grouped_matmul.py [--rows 2 16 64 512] [--shapes 8x1024x3584]

Rows are dealt out to the groups unevenly, as routers do. The last columns say how many groups have
rows, the least time in which their weights can be read at ``--memory_gb_s``, and each size of tile
that the CPU's path could have, so that it shows when ``tile_rows`` has aged: a line ends in
``<- tile`` where another is over 1.3 times faster. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from hexllm.ops import grouped_matmul as grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TILES = (1, 8, 16, 32, 64, 128)
TOLERATED = 1.3
#: A program slower than this is run once more only.
SLOW_S = 0.5


def programs_of(M: int, E: int, *, with_dense: bool) -> dict[str, Callable[..., jax.Array]]:
    """Return what is compared: the front, the others, and the front with other tiles."""
    programs: dict[str, Callable[..., jax.Array]] = {"front": grouped.grouped_matmul}
    if with_dense:
        programs["ragged_dot"] = grouped._ragged
        programs["dense"] = grouped.grouped_matmul_reference
    for rows in TILES:
        if rows == 1 or rows < 2 * M:
            programs[f"tile {rows}"] = partial(grouped._tiled, rows=rows)
    return {name: jax.jit(program) for name, program in programs.items()}


def measure(
    programs: Mapping[str, Callable[..., jax.Array]],
    arguments: tuple[jax.Array, ...],
    repeats: int,
) -> dict[str, float]:
    """Return the best time of each program in milliseconds, the programs interleaved."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(*arguments))  # type: ignore[no-untyped-call]
    for _ in range(repeats):
        for name, program in programs.items():
            if times[name] and times[name][0] > SLOW_S:
                continue
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))  # type: ignore[no-untyped-call]
            times[name].append(time.perf_counter() - start)
    return {name: min(values) * 1e3 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 16, 64, 512, 2048])
    parser.add_argument("--shapes", nargs="+", default=["8x1024x3584"], help="ExINxOUT")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory_gb_s", type=float, default=44.0)
    parser.add_argument("--no-dense", action="store_true", help="leave out what takes E times")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.default_backend()}; milliseconds a product")
    random = np.random.default_rng(0)
    for dtype in options.dtypes:
        for shape in options.shapes:
            E, d_in, d_out = (int(size) for size in shape.split("x"))
            w = jnp.asarray(random.standard_normal((E, d_out, d_in), np.float32) * 0.02, dtype)
            for M in options.rows:
                x = jnp.asarray(random.standard_normal((M, d_in), np.float32), dtype)
                sizes = random.multinomial(M, random.dirichlet(np.full(E, 2.0)))
                groups = jnp.asarray(sizes, jnp.int32)
                programs = programs_of(M, E, with_dense=not options.no_dense)
                times = measure(programs, (x, w, groups), options.repeats)
                used = int((sizes > 0).sum())
                floor = used * d_in * d_out * w.dtype.itemsize / options.memory_gb_s / 1e6
                tiles = [t for name, t in times.items() if name.startswith("tile")]
                note = "  <- tile" if times["front"] > TOLERATED * min(tiles) else ""
                cells = "  ".join(f"{name} {t:.2f}" for name, t in times.items())
                print(f"{dtype} {shape} rows {M}, groups {used}, floor {floor:.2f}: {cells}{note}")


if __name__ == "__main__":
    main()
