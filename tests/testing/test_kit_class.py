"""The kit's class: what a subclass may change, and what transformers' own configuration proves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hexllm.testing import ModelFamilyTests
from hexllm.testing.family import Case
from tests.test_import_law import PACKAGE, imports
from tests.testing.broken import CONFIG, OwnDefault, Plain, ReadsAnything

pytest_plugins = ["pytester"]

LLAMA = {k: v for k, v in CONFIG.items() if k not in ("sliding_window", "layer_types")}


def own_spelling(family: type[Any], **changes: Any) -> None:
    class Kit(ModelFamilyTests):
        hf_config = LLAMA

    Kit.family = family
    case = Case(family(), "x", {**LLAMA, **changes}, Path(), lambda directory: None)
    Kit().test_transformers_own_spelling_reads_the_same(case)


def test_what_transformers_writes_reads_the_same() -> None:
    pytest.importorskip("transformers")
    own_spelling(Plain, model_type="llama")
    own_spelling(Plain, model_type="llama", rope_theta=500.0, tie_word_embeddings=True)
    with pytest.raises(AssertionError, match="rms_norm_eps"):
        own_spelling(OwnDefault, model_type="llama")
    with pytest.raises(pytest.skip.Exception, match="no model_type"):
        own_spelling(OwnDefault)


def test_a_test_taken_away_needs_a_reason() -> None:
    with pytest.raises(TypeError, match=r"Mine overrides test_one_program_a_shape .*deviations"):

        class Mine(ModelFamilyTests):
            family = Plain
            hf_config = CONFIG
            test_one_program_a_shape = None

    with pytest.raises(TypeError, match="Mine overrides test_bfloat16_in_bfloat16_out"):

        class Mine(ModelFamilyTests):
            family = Plain
            hf_config = CONFIG
            deviations = {"test_bfloat16_in_bfloat16_out": ""}

            def test_bfloat16_in_bfloat16_out(self, case: Any) -> None:
                pass


def test_a_mixin_cannot_take_a_test_away() -> None:
    class Quiet:
        test_logits_equal_the_reference = None

    with pytest.raises(TypeError, match="overrides test_logits_equal_the_reference"):

        class Mine(Quiet, ModelFamilyTests):
            family = Plain
            hf_config = CONFIG


def test_a_reason_lets_it_be_and_holds_for_subclasses() -> None:
    class Mine(ModelFamilyTests):
        family = Plain
        hf_config = CONFIG
        test_one_program_a_shape = None
        deviations = {"test_one_program_a_shape": "it compiles by the length"}

    class Narrower(Mine):
        hf_config = LLAMA

    assert Narrower.test_one_program_a_shape is None
    with pytest.raises(TypeError, match="Narrowest overrides test_logits_equal_the_golden"):

        class Narrowest(Mine):
            test_logits_equal_the_golden = None


def test_a_reason_for_no_test_is_refused() -> None:
    with pytest.raises(TypeError, match="names no test: test_one_programme"):

        class Mine(ModelFamilyTests):
            family = Plain
            hf_config = CONFIG
            deviations = {"test_one_programme": "misspelt"}


def test_it_needs_nothing_that_a_stranger_lacks() -> None:
    needed = {"hexllm", "jax", "ml_dtypes", "numpy", "pytest", "safetensors"}
    known = needed | sys.stdlib_module_names
    for path in (PACKAGE / "testing").glob("*.py"):
        module_level = {name.partition(".")[0] for name in imports(path, functions_too=False)}
        assert module_level <= known, path
        everywhere = {name.partition(".")[0] for name in imports(path)}
        assert everywhere <= known | {"torch", "transformers"}, path


SOURCE = """
from hexllm.testing import ModelFamilyTests
from tests.testing.broken import CONFIG, {family}

class TestIt(ModelFamilyTests):
    family = {family}
    hf_config = CONFIG
    configs = {{"mqa": {{"num_key_value_heads": 1}}}}
"""


def test_pytest_finds_each_test_for_each_configuration(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOURCE.format(family="Plain"))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only", "-q")
    for line in (
        "*::TestIt::test_logits_equal_the_reference?default?",
        "*::TestIt::test_logits_equal_the_reference?mqa?",
        "*::TestIt::test_one_program_a_shape?default?",
    ):
        result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*test_one_program_a_shape?mqa?")


def test_a_failure_says_what_was_compared(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOURCE.format(family=ReadsAnything.__name__))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "nobody_knows")
    result.assert_outcomes(failed=2, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["*DID NOT RAISE*UnsupportedConfigError*"])
