"""docs/models.md is written from the registry, and real models are what their cards say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from docs.models_page import (
    chips,
    count_parameters,
    family_and_config,
    page,
    weight_bytes,
)
from docs.real_models import MODELS
from hexllm.plan.memory import kv_copies

if TYPE_CHECKING:
    from docs.real_models import RealModel

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_what_the_registry_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "docs/models.md is stale. Run: python -m docs.models_page docs/models.md"
    )


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_real_model_has_the_stated_number_of_parameters(model: RealModel) -> None:
    assert count_parameters(model) / 1e9 == pytest.approx(model.parameters, rel=0.01)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_fewer_bits_never_need_more(model: RealModel) -> None:
    sizes = [weight_bytes(model, kind) for kind in ("bf16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    for hbm in (16, 32, 95):
        counts = [chips(model, kind, hbm) or 1000 for kind in ("bf16", "int8", "int4")]
        assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("N", "K", "count", "copies"),
    [
        (32, 8, 1, 1),
        (32, 8, 4, 1),
        (32, 8, 16, 2),
        (32, 8, 32, 4),
        (32, 8, 64, None),  # more chips than query heads
        (40, 10, 4, 2),  # Phi-3 medium: 20 heads, five a chip
        (40, 10, 8, 4),
        (40, 8, 16, None),
        (28, 4, 8, None),
        (24, 8, 4, 1),
        (8, 1, 8, 8),
        (6, 3, 2, 2),
    ],
)
def test_kv_heads_are_kept_as_often_as_the_chips_need(
    N: int, K: int, count: int, copies: int | None
) -> None:
    assert kv_copies(N, K, count) == copies


def test_windows_of_real_models() -> None:
    windows = {model.name: family_and_config(model)[1].windows for model in MODELS}
    assert windows["google/gemma-2-9b"][:4] == (4096, None, 4096, None)
    assert windows["google/gemma-3-27b-it"][:6] == (1024,) * 5 + (None,)
    assert set(windows["mistralai/Mistral-7B-v0.1"]) == {4096}
    assert set(windows["mistralai/Mistral-7B-Instruct-v0.3"]) == {None}
    assert set(windows["Qwen/Qwen2.5-7B-Instruct"]) == {None}
