"""Small models, compiled often and run once: their programs are not optimized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def quick_compiles() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
