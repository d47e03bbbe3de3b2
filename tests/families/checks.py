"""Whether hexllm computes what transformers does, in this process: no engine and no server."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hexllm.core.plugins import Plugins, load_plugins
from hexllm.core.settings import PluginSettings
from hexllm.model.hf_config import HfConfig
from hexllm.model.loading import load_params
from hexllm.model.sharding import make_mesh
from hexllm.testing.steps import Driver
from tests.families.checkpoints import (
    full_logprobs,
    make_model,
    read_config,
    save_model,
    vocab_size,
)
from tests.families.spelling import in_the_old_spelling

#: Prompt lengths: beyond every window, chunk and original context that the generators draw, a
#: single token, and some within. With the continuations none passes an original context of 40 or
#: 64, where transformers without a cache turns earlier keys anew.
LENGTHS = (70, 1, 12, 30)
#: Tokens fed to each sequence by number: two prompts, the other two beside a decode, two decodes.
STEPS = (
    {0: 70, 2: 12},
    {1: 1, 3: 30, 0: 1, 2: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
)
ATOL = 1e-4
#: (T, S) that every prefill is padded to, so that one program serves them.
PADDED = (96, 6)


@cache
def plugins() -> Plugins:
    """Return hexllm's plugins, as a server would load them."""
    return load_plugins(PluginSettings())


def open_family(data: dict[str, Any], source: str) -> tuple[Any, Any]:
    """Return the family that the registry finds for a config.json, and its configuration."""
    family = plugins().resolve_model_family(data).build(None)
    return family, family.config(HfConfig(data, source))


def check_equal_to_transformers(architecture: str, config: Any, seed: int) -> None:
    """Save a random model of ``config`` and compare every logprob of mixed batches."""
    model = make_model(architecture, config, seed)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_model(model, directory)
        data = read_config(directory)
        family, cfg = open_family(data, folder)
        assert open_family(in_the_old_spelling(data), folder)[1] == cfg
        checkpoint = plugins().open_checkpoint(folder)
        params = load_params(family, cfg, checkpoint, dtype=jnp.float32, mesh=make_mesh())
    given = run(family, cfg, params, sequences := random_tokens(model, seed))
    jax.clear_caches()  # no other model uses these programs, and there are many models
    for tokens, logits in zip(sequences, given, strict=True):
        expected = full_logprobs(model, tokens)
        assert np.ptp(expected, axis=-1).min() > 1  # or the tolerance would mean nothing
        np.testing.assert_allclose(logprobs(logits), expected, atol=ATOL, rtol=0)


def random_tokens(model: Any, seed: int) -> list[list[int]]:
    """Return as many tokens for each sequence as STEPS take."""
    rng = np.random.default_rng(seed)
    counts = [sum(step.get(i, 0) for step in STEPS) for i in range(len(LENGTHS))]
    return [rng.integers(3, vocab_size(model.config), count).tolist() for count in counts]


def run(family: Any, cfg: Any, params: Any, sequences: list[list[int]]) -> list[np.ndarray]:
    """Feed the sequences step by step; return the logits of all their tokens."""
    longest = max(map(len, sequences))
    driver = Driver(family, cfg, params, num_seqs=len(sequences), max_len=longest)
    # Where the parameters are, as every later cache is: else the first step is a program apart.
    driver.kv = jax.device_put(driver.kv, NamedSharding(make_mesh(), PartitionSpec()))
    given: list[list[np.ndarray]] = [[] for _ in sequences]
    for step in STEPS:
        pieces = {
            i: sequences[i][driver.lengths[i] : driver.lengths[i] + count]
            for i, count in step.items()
        }
        for i, logits in driver.feed(pieces, pad_to=PADDED).items():
            given[i].append(logits)
    return [np.concatenate(logits) for logits in given]


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Return the log-softmax of rows of logits, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
