"""Small models, compiled often and run once: their programs are not optimized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hexllm.testing.steps import quick_compiles

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_compiles():
        yield
