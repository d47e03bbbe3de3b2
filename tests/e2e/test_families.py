"""Every architecture, served over HTTP from transformers' files: its greedy tokens and logprobs.

Three random configurations of each, chosen as unlike each other as can be; the first in every run,
all by ``make matrix``.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.e2e.serving import environment, serve
from tests.engine.tiny import CACHE
from tests.families.checkpoints import greedy, make_model, save_model, token_id, vocab_size
from tests.families.configs import ARCHITECTURES
from tests.families.spread import Spread

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

COUNT = 12
ATOL = 1e-4
#: Greedy tokens are compared where the best two are further apart than rounding reaches.
MIN_GAP = 1e-3
FLAGS = (
    "--dtype=float32",
    "--max_model_len=320",
    "--prefill_len_padding=320",
    "--max_running_seqs=8",
    "--num_blocks=96",
    f"--compilation_cache_dir={CACHE}",
)
#: Most of a case's time is compiling, and this halves it; other tests serve optimized programs.
OPTIMIZE_LITTLE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
CASES = [
    pytest.param(architecture, seed, marks=[pytest.mark.slow, pytest.mark.matrix] if seed else [])
    for seed in range(3)
    for architecture in ARCHITECTURES
]


def prompts_of(architecture: str, seed: int, config: Any) -> list[list[int]]:
    """Return eight prompts of 1 to 300 tokens; most are longer than any window drawn."""
    rng = random.Random(f"{architecture} {seed}")
    lengths = [1, 300, rng.randint(2, 16), rng.randint(17, 63), 64, 65]
    lengths += [rng.randint(66, 200), rng.randint(201, 299)]
    original = getattr(config, "original_max_position_embeddings", None)
    if original:
        # Keys of a sequence that grows past the original context are turned anew by transformers'
        # Phi-3, and not here: each stays within it, or is beyond it from the start.
        lengths = [
            n if n > original or n + COUNT <= original else original - COUNT for n in lengths
        ]
    rng.shuffle(lengths)
    V = vocab_size(config)
    return [[rng.randrange(3, V) for _ in range(n)] for n in lengths]


def model_without_near_ties(
    architecture: str, seed: int
) -> tuple[Any, list[tuple[list[int], list[int], np.ndarray]]]:
    """Return a model and its (prompt, greedy tokens, logprobs), where each choice is clear.

    Weights are drawn again until no greedy choice is a near tie, which rounding could turn.
    """
    config = ARCHITECTURES[architecture](Spread(architecture, seed))
    prompts = prompts_of(architecture, seed, config)
    for weights in itertools.count(100 * seed):
        assert weights < 100 * seed + 50, "no weights without near ties"
        model = make_model(architecture, config, weights)
        expected = []
        for prompt in prompts:
            tokens, rows = greedy(model, prompt, COUNT)
            best = np.sort(rows, axis=-1)
            if (best[:, -1] - best[:, -2]).min() < MIN_GAP:
                break
            expected.append((prompt, tokens, rows))
        else:
            return model, expected
    raise AssertionError


@pytest.mark.parametrize(("architecture", "seed"), CASES)
def test_served_equals_transformers(architecture: str, seed: int, tmp_path: Path) -> None:
    model, expected = model_without_near_ties(architecture, seed)
    save_model(model, tmp_path / "model")
    env = environment(**OPTIMIZE_LITTLE)
    with serve(tmp_path, f"--model={tmp_path / 'model'}", *FLAGS, env=env) as served:

        def ask(i: int) -> Any:
            return served.complete(
                prompt=expected[i][0],
                temperature=0,
                max_tokens=COUNT,
                logprobs=5,
                ignore_eos=True,
            )

        with ThreadPoolExecutor(len(expected)) as pool:
            choices = list(pool.map(ask, range(len(expected))))
        assert served.metric("hexllm:late_compiles_total") == 0
    for (prompt, tokens, rows), choice in zip(expected, choices, strict=True):
        got = choice["logprobs"]
        assert [token_id(text) for text in got["tokens"]] == tokens, len(prompt)
        own = rows[np.arange(COUNT), tokens]
        np.testing.assert_allclose(got["token_logprobs"], own, atol=ATOL, rtol=0)
        for row, top in zip(rows, got["top_logprobs"], strict=True):
            best = {token_id(text): logprob for text, logprob in top.items()}
            assert len(best) == 5
            # Each one's value, and that no better one is missing.
            values = list(best.values())
            np.testing.assert_allclose(values, row[list(best)], atol=ATOL, rtol=0)
            np.testing.assert_allclose(sorted(values), np.sort(row)[-5:], atol=ATOL, rtol=0)
