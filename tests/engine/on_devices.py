"""Runs one model on several numbers of devices and prints what each gave, as JSON.

A process's CPU is as many devices as XLA_FLAGS say when JAX starts, so this is a process of its
own: ``run_on_devices`` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

#: Prompts of one block and of several, so that heads, tables and blocks are all in use.
PROMPT_LENGTHS = (1, 7, 21, 40)
FLAGS = (
    "--load_format=auto",
    "--max_prefill_seqs=4",
    "--max_model_len=64",
    "--decode_seqs_padding=4",
    "--decode_blocks_padding=8",
    "--max_running_seqs=4",
    "--num_blocks=64",
    "--no-warmup",
)


def run_on_devices(jobs, devices=8, max_tokens=6):
    """Return, for each (directory, size, flags) in ``jobs``, the requests' (tokens, logprobs).

    Greedy requests give ``max_tokens`` tokens, and the last one draws three times as many. Each
    token's logprobs are its own, and a list of the best five's (token, logprob).
    """
    flag = f"--xla_force_host_platform_device_count={devices}"
    # Most of the time is compiling.
    env = {**os.environ, "XLA_FLAGS": flag, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.on_devices"],
        input=json.dumps([[*job, max_tokens] for job in jobs]),
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def main():
    print(json.dumps([serve(*job) for job in json.load(sys.stdin)]))


def serve(directory, size, flags, max_tokens):
    import numpy as np

    from tests.engine.tiny import make_engine, request, run

    engine = make_engine(directory, *FLAGS, f"--tensor_parallel_size={size}", *flags)
    check_shapes(engine._runner._programs, engine._runner._params)
    V = engine.info.vocab_size
    rng = np.random.default_rng(0)
    requests = [
        request(str(n), rng.integers(0, V, n).tolist(), max_tokens, eos=(), logprobs=5)
        for n in PROMPT_LENGTHS
    ]
    # A seeded draw over the whole vocabulary, too: padding must never be drawn.
    requests.append(
        request("drawn", [3, 5], 3 * max_tokens, eos=(), temperature=50.0, seed=7, logprobs=5)
    )
    results = run(engine, *requests)
    return [
        (tokens, [(each.logprob, each.top) for each in logprobs]) for tokens, logprobs, _ in results
    ]


def check_shapes(programs, params):
    """See that what is compiled from shapes alone is what runs, to the place of each value."""
    import jax

    shapes = programs.param_shapes()
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(params), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    assert programs.param_bytes() == held


if __name__ == "__main__":
    main()
