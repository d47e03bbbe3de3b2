"""Times every form of ``linear``'s product and shows whether the table still picks the fastest.

    python benchmarks/matmul.py [--rows 1 2 8 32 64 128] [--shapes 576x1536 2048x8192]

The weights of one measurement do not fit in the caches together, so that they come from memory as
in a model. A line ends in ``<- table`` notes where the table's choice is over 1.3 times slower
than the best form: run it again on an idle machine before you change ``hexllm/ops/matmul.py``.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from hexllm.ops.matmul import FORMS, cpu_form

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES_OF_WEIGHTS = 96e6
TOLERATED = 1.3


def chain(form: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., list[jax.Array]]:
    """Return a program that multiplies by each weight in turn, each product after the last."""

    def run(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        products = []
        for w in weights:
            y = form(x, w).astype(x.dtype)
            x = x + y[:, :1] * jnp.asarray(1e-3, x.dtype)
            products.append(y)
        return products

    return run


def measure(dtype: str, d_in: int, d_out: int, T: int, repeats: int) -> dict[str, float]:
    """Return the best time of each form in microseconds a product, the forms interleaved."""
    random = np.random.default_rng(0)
    count = int(np.clip(BYTES_OF_WEIGHTS / (d_in * d_out * jnp.dtype(dtype).itemsize), 1, 24))
    weights = [
        jnp.asarray(random.standard_normal((d_out, d_in), np.float32) * 0.02, dtype)
        for _ in range(count)
    ]
    x = jnp.asarray(random.standard_normal((T, d_in), np.float32), dtype)
    programs = {name: jax.jit(chain(form)) for name, form in FORMS.items()}
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for program in programs.values():
        jax.block_until_ready(program(x, weights))  # type: ignore[no-untyped-call]
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(x, weights))  # type: ignore[no-untyped-call]
            times[name].append(time.perf_counter() - start)
    return {name: min(values) / count * 1e6 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 64, 128])
    parser.add_argument("--shapes", nargs="+", default=["576x1536", "2048x8192"], help="INxOUT")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.default_backend()}; microseconds a product, * the table's")
    print(f"{'dtype':9}{'in x out':>12}{'rows':>6}" + "".join(f"{name:>19}" for name in FORMS))
    for dtype in options.dtypes:
        for shape in options.shapes:
            d_in, d_out = (int(size) for size in shape.split("x"))
            for T in options.rows:
                times = measure(dtype, d_in, d_out, T, options.repeats)
                picked = cpu_form(jnp.dtype(dtype), T, (d_out, d_in)).__name__
                cells = [f"{t:.0f}{'*' if name == picked else ' '}" for name, t in times.items()]
                slow = times[picked] / min(times.values())
                note = f"  <- table {slow:.1f}x the best" if slow > TOLERATED else ""
                line = f"{dtype:9}{shape:>12}{T:6}" + "".join(f"{cell:>19}" for cell in cells)
                print(line + note, flush=True)


if __name__ == "__main__":
    main()
