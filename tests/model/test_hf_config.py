from __future__ import annotations

from typing import Any

import pytest

from hexllm.core.errors import UnsupportedConfigError
from hexllm.model.hf_config import HfConfig, is_harmless


def test_check_passes_what_was_read_ignored_or_harmless() -> None:
    hf = HfConfig(
        {
            "a": 1,
            "b": 2,
            "note": "x",
            "off": None,
            "also_off": False,
            "empty": {},
            "transformers_version": "5.0",
            "pretraining_tp": 1,
            "nested": {"c": 3, "d": None},
        },
        "config.json",
    )
    assert hf["a"] == 1
    assert hf.get("b") == 2
    assert hf.get("absent", 7) == 7
    assert hf["nested"]["c"] == 3
    hf.check({"note"}, family="x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"softcap": 30.0}, ["softcap=30.0"]),
        ({"multiplier": 0}, ["multiplier=0"]),
        ({"flag": True}, ["flag=True"]),
        ({"pretraining_tp": 2}, ["pretraining_tp=2"]),
        ({"nested": {"c": 1, "deep": {"e": 5}}}, ["nested.deep=", "5"]),
        ({"nested": {"c": 1, "dtype": "x", "f": 2}}, ["nested.f=2"]),
        ({"unread": {"g": 1}, "second": "v"}, ["unread={'g': 1}", "second='v'"]),
    ],
)
def test_check_names_key_value_family_and_file(data: dict[str, Any], words: list[str]) -> None:
    hf = HfConfig(data, "models/m/config.json")
    if "nested" in data:
        hf["nested"].get("c")
    with pytest.raises(UnsupportedConfigError) as caught:
        hf.check(family="fam")
    for word in ["models/m/config.json", "'fam'", *words]:
        assert word in str(caught.value)


def test_testing_for_a_key_does_not_read_it() -> None:
    hf = HfConfig({"x": 1}, "c")
    assert "x" in hf
    with pytest.raises(UnsupportedConfigError, match="x=1"):
        hf.check()


def test_the_rule_of_harmless_values() -> None:
    for value in (None, False, "", [], {}):
        assert is_harmless("anything", value)
    for value in (0, 0.0, 1, True, "x", [0], {"a": None}):
        assert not is_harmless("anything", value)
    assert is_harmless("use_cache", True)


@pytest.mark.parametrize(
    ("method", "good", "bad"),
    [
        ("integer", [1, 7], [0, -1, 1.0, "1", True, None, [1]]),
        ("number", [1, 0.5], [0, -1, "1", True, None, float("inf"), float("nan")]),
        ("boolean", [True, False], [0, 1, "true", None]),
        ("text", ["a"], [1, True, ["a"]]),
        ("section", [{"a": 1}], [1, "a", ["a"]]),
        ("numbers", [[1, 2.5]], [[0], ["a"], 1, None, [True], [float("inf")]]),
    ],
)
def test_typed_readers_refuse_other_types(method: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        getattr(HfConfig({"key": value}, "c"), method)("key")
    for value in bad:
        with pytest.raises(UnsupportedConfigError, match="key="):
            getattr(HfConfig({"key": value}, "c"), method)("key")
    if method != "section":
        with pytest.raises(UnsupportedConfigError, match="key is missing"):
            getattr(HfConfig({}, "c"), method)("key")


def test_null_takes_the_default() -> None:
    hf = HfConfig({"key": None}, "c")
    assert hf.integer("key", 3) == 3
    assert hf.integer("key", None) is None
    assert hf.boolean("key", True) is True
    assert hf.section("key") is None


def test_a_file_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="not a mapping"):
        HfConfig([1], "c")  # type: ignore[arg-type]
