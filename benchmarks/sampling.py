"""Times one sampling step for each kind of batch, against an argmax and against a sort.

    python benchmarks/sampling.py [--rows 1 8 32] [--vocab 49152]

``peaked`` logits follow Zipf's law as a trained model's do (the nucleus is some dozens of
tokens); ``flat`` ones leave more than the candidates, so that the threshold is bisected.
``x floor`` is the step over a maximum with its position, ``sort / it`` the time of the same masks
found by sorting the vocabulary over the step's.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hexllm.engine.messages import SamplingParams
from hexllm.ops.gumbel import gumbel_noise, row_keys
from hexllm.ops.sampling import SamplingRows, rows_from_params, sample
from hexllm.ops.sampling_shards import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9},
    "top-k and top-p": {"top_k": 40, "top_p": 0.9},
    "logprobs, greedy": {"temperature": 0.0, "logprobs": 20},
}


def sample_by_sorting(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Draw from the same distribution the plain way: sort everything, then cut."""
    V = logits.shape[1]
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    ordered = -jnp.sort(-scaled, axis=1)
    last = jnp.where(rows.top_k > 0, rows.top_k, V)[:, None] - 1
    kept = jnp.where(jnp.arange(V)[None] <= last, ordered, -jnp.inf)
    mass = jnp.cumsum(jax.nn.softmax(kept, axis=1), axis=1)
    at = jnp.minimum(jnp.sum(mass < rows.top_p[:, None], axis=1, keepdims=True), last)
    threshold = jnp.take_along_axis(ordered, at, axis=1)
    keys = row_keys(jnp.asarray(rows.seed), jnp.asarray(rows.position))
    scores = scaled + gumbel_noise(keys, jnp.arange(V, dtype=jnp.int32)[None])
    drawn = first_argmax(jnp.where(scaled >= threshold, scores, -jnp.inf))[0]
    return jnp.where(rows.temperature > 0, drawn, first_argmax(logits)[0])


def first_argmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return where each row is largest, and how large: the least that a greedy step does."""
    vocabulary = Vocabulary(scores.shape[1], scores.shape[1])
    return vocabulary.best(scores, vocabulary.ids())


def best_time(program: Callable[..., Any], *arguments: Any, seconds: float) -> float:
    """Return the shortest run in microseconds."""
    jax.block_until_ready(program(*arguments))  # type: ignore[no-untyped-call]
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on each measurement")
    options = parser.parse_args()
    step, floor, sort = jax.jit(sample), jax.jit(first_argmax), jax.jit(sample_by_sorting)
    print(f"jax {jax.__version__}, {jax.default_backend()}, {options.vocab} tokens")
    print(f"{'rows':>4}  {'batch':24}{'us a step':>10}{'x floor':>9}{'sort / it':>11}")
    for S in options.rows:
        random = np.random.default_rng(0)
        ranks = random.permuted(np.tile(np.arange(1, options.vocab + 1), (S, 1)), axis=1)
        by_shape = {
            "peaked": -1.5 * np.log(ranks),
            "flat": random.standard_normal((S, options.vocab)),
        }
        for shape, values in by_shape.items():
            logits = jnp.asarray(values, jnp.float32)
            least = best_time(floor, logits, seconds=options.seconds)
            for name, settings in CASES.items():
                if shape == "flat" and name != "top-p":
                    continue
                params = [SamplingParams(max_tokens=1, seed=i, **settings) for i in range(S)]
                rows = rows_from_params(params, range(S), S)
                took = best_time(step, logits, rows, seconds=options.seconds)
                by_sort = ""
                if name.startswith("top"):
                    slow = best_time(sort, logits, rows, seconds=options.seconds)
                    by_sort = f"{slow / took:.1f}"
                label = f"{name} ({shape})"
                print(f"{S:4}  {label:24}{took:10.0f}{took / least:9.1f}{by_sort:>11}", flush=True)


if __name__ == "__main__":
    main()
