"""Goldens: written from the reference, compared with, refused when they are of something else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hexllm.testing import ModelFamilyTests, golden
from hexllm.testing.family import Case
from tests.testing.broken import CONFIG, Plain, WrongNorm
from tests.testing.test_kit import plain_reference

if TYPE_CHECKING:
    from pathlib import Path

HOW = "HEXLLM_WRITE_GOLDEN=1 pytest"


class Kit(ModelFamilyTests):
    family = Plain
    hf_config = CONFIG


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    monkeypatch.setattr(Kit, "golden", tmp_path / "golden")
    monkeypatch.delenv(golden.WRITE_VARIABLE, raising=False)
    return Kit()


def case(directory: Path, family: Any = Plain, **changes: Any) -> Case:
    return Case(family(), "default", {**CONFIG, **changes}, directory, plain_reference)


def test_a_golden_is_written_and_then_compared_with(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = case(tmp_path / "right")
    with pytest.raises(AssertionError, match=HOW):
        kit.test_logits_equal_the_golden(right)
    with monkeypatch.context() as patch:
        patch.setenv(golden.WRITE_VARIABLE, "1")
        kit.test_logits_equal_the_golden(right)
    file = tmp_path / "golden" / "Kit.json"
    assert file.stat().st_size < 4000
    kit.test_logits_equal_the_golden(right)

    # None of what follows may change the file.
    before = file.read_bytes()
    with pytest.raises(AssertionError, match="Not equal"):
        kit.test_logits_equal_the_golden(case(tmp_path / "wrong", WrongNorm))
    with pytest.raises(AssertionError, match=f"of another configuration. .*{HOW}"):
        kit.test_logits_equal_the_golden(case(tmp_path / "other", rope_theta=5.0))
    other = case(tmp_path / "right")
    other.name = "mqa"
    with pytest.raises(AssertionError, match="has no golden of 'mqa'"):
        kit.test_logits_equal_the_golden(other)
    assert file.read_bytes() == before


def test_logits_that_hardly_differ_prove_nothing(kit: Kit, tmp_path: Path) -> None:
    right = case(tmp_path / "right")
    flat = [[0.5] * golden.KEPT] * len(golden.LENGTHS)
    golden.write(tmp_path / "golden" / "Kit.json", right.name, right.config, flat)
    with pytest.raises(AssertionError, match="ptp"):
        kit.test_logits_equal_the_golden(right)


def test_nothing_is_written_without_the_reference(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(golden.WRITE_VARIABLE, "1")
    alone = Case(Plain(), "default", CONFIG, tmp_path / "alone", lambda directory: None)
    with pytest.raises(AssertionError, match="written from the reference"):
        kit.test_logits_equal_the_golden(alone)
    assert not (tmp_path / "golden").exists()


def test_a_file_keeps_its_other_goldens(tmp_path: Path) -> None:
    file = tmp_path / "new" / "T.json"
    for name in ("b", "a"):
        golden.write(file, name, {"name": name}, [[1.0]])
    golden.write(file, "b", {"name": "b"}, [[2.0]])
    assert list(json.loads(file.read_text())) == ["a", "b"]
    assert golden.read(file, "a", {"name": "a"}).tolist() == [[1.0]]
    assert golden.read(file, "b", {"name": "b"}).tolist() == [[2.0]]
