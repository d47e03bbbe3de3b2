"""Every test of the conformance kit fails for a family that is wrong in its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hexllm.testing import ModelFamilyTests
from hexllm.testing.checkpoints import FilesCheckpoint
from hexllm.testing.family import Case
from tests.testing import broken
from tests.testing.broken import CONFIG, Plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[[str, type[Any]], None]

TESTS = [name for name in vars(ModelFamilyTests) if name.startswith("test_")]
#: Seen to fail in test_kit_golden.py and test_kit_class.py.
ELSEWHERE = {"test_transformers_own_spelling_reads_the_same", "test_logits_equal_the_golden"}


class Kit(ModelFamilyTests):
    """Not collected; its tests are called one by one."""

    family = Plain
    hf_config = CONFIG


def plain_reference(directory: Path) -> Any:
    """Plain's logits of the files in ``directory``: right, whatever the family under test does."""
    case = Case(Plain(), "plain", CONFIG, directory, lambda directory: None)
    vars(case)["params"] = case.load(FilesCheckpoint(directory))
    return lambda tokens: case.drive().feed({0: list(tokens)})[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(test, family)``; a family's tests share its model, as in the kit."""
    cases: dict[type[Any], Case] = {}

    def run(test: str, family: type[Any]) -> None:
        if family not in cases:
            directory = tmp_path_factory.mktemp(family.__name__)
            cases[family] = Case(family(), "default", CONFIG, directory, plain_reference)
        getattr(Kit(), test)(cases[family])

    return run


@pytest.mark.parametrize("test", [test for test in TESTS if test not in ELSEWHERE])
def test_a_right_family_passes(run: Run, test: str) -> None:
    run(test, Plain)


def test_chunks_pass(run: Run) -> None:
    run("test_what_layers_see_ends_where_the_kv_spec_says", broken.Chunked)
    run("test_decode_and_chunks_equal_prefill", broken.Chunked)


WRONG = [
    ("test_a_key_nobody_knows_is_refused", broken.ReadsAnything, "DID NOT RAISE"),
    ("test_unknown_values_are_refused", broken.TakesAnyActivation, "DID NOT RAISE"),
    ("test_unknown_values_are_refused", broken.TakesAnyRope, "DID NOT RAISE"),
    ("test_unknown_values_are_refused", broken.TakesAnyHeads, "DID NOT RAISE"),
    ("test_the_configuration_is_hashable", broken.NewConfigEachTime, "assert"),
    ("test_a_checkpoint_loads_and_a_wrong_one_is_refused", broken.LosesATensor, "missing"),
    ("test_a_checkpoint_loads_and_a_wrong_one_is_refused", broken.TakesAnyTensor, "DID NOT RAISE"),
    ("test_logits_equal_the_reference", broken.Turned, "Not equal"),
    ("test_logits_equal_the_reference", broken.SwapsGateAndUp, "Not equal"),
    ("test_logits_equal_the_reference", broken.WrongNorm, "Not equal"),
    ("test_logits_equal_the_reference", broken.HalfPrecisionLogits, "Not equal"),
    ("test_decode_and_chunks_equal_prefill", broken.CountsPositionsFromTheChunk, "Not equal"),
    ("test_a_mixed_step_equals_its_parts", broken.CountsPositionsFromTheChunk, "Not equal"),
    ("test_neighbours_and_padding_change_nothing", broken.CountsPositionsOverTheBatch, "Not equal"),
    ("test_neighbours_and_padding_change_nothing", broken.LooksAtTheBatch, "Not equal"),
    ("test_neighbours_and_padding_change_nothing", broken.LooksAtPadding, "Not equal"),
    ("test_what_layers_see_ends_where_the_kv_spec_says", broken.WindowTooLarge, "sees beyond"),
    ("test_what_layers_see_ends_where_the_kv_spec_says", broken.WindowTooSmall, "not see all"),
    ("test_what_layers_see_ends_where_the_kv_spec_says", broken.ForgetsItsChunks, "sees beyond"),
    ("test_bfloat16_in_bfloat16_out", broken.WidensActivations, "bfloat16"),
    ("test_bfloat16_in_bfloat16_out", broken.WidensNorms, "bfloat16"),
    ("test_bfloat16_in_bfloat16_out", broken.LosesPrecision, "further from float32"),
    ("test_one_program_a_shape", broken.NewConfigEachTime, "compiled again"),
]


@pytest.mark.parametrize(("test", "family", "words"), WRONG)
def test_a_wrong_family_is_caught(run: Run, test: str, family: type[Any], words: str) -> None:
    # What pytest raises for "DID NOT RAISE" is no Exception.
    with pytest.raises((Exception, pytest.fail.Exception), match=words):
        run(test, family)


def test_every_test_of_the_kit_is_seen_to_fail() -> None:
    assert {test for test, _, _ in WRONG} | ELSEWHERE == set(TESTS)
