"""Any configuration of any architecture: served from transformers' files, it equals transformers.

The configurations are drawn by hypothesis, so that a failure shrinks to a plain model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.families.checks import check_equal_to_transformers
from tests.families.configs import ARCHITECTURES

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile() -> Iterator[None]:
    """Compile without optimizing: a program runs four times, and compiling is what takes long."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def drawn(architecture: str, count: int) -> Callable[[], None]:
    """Return a property of ``count`` configurations; the same ones in every run."""

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(rng=st.randoms(use_true_random=False), seed=st.integers(0, 1000))
    def equals_transformers(rng: random.Random, seed: int) -> None:
        config: Any = ARCHITECTURES[architecture](rng)
        note(config.to_json_string())
        check_equal_to_transformers(architecture, config, seed)

    return equals_transformers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_few_configurations(architecture: str) -> None:
    drawn(architecture, 2)()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_many_configurations(architecture: str) -> None:
    drawn(architecture, 10)()
