"""docs/plugins.md describes each hook with its present signature, and its first plugin works."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from hexllm.core import hookspecs
from hexllm.core.plugins import load_plugins
from hexllm.core.policy import RequestView, SchedulingPolicy
from hexllm.core.settings import PluginSettings

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

HOOKS = {
    node.name: node
    for node in ast.parse(inspect.getsource(hookspecs)).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("hexllm_")
}


def documented() -> dict[str, str]:
    """The signatures that the page shows, by the hook's name, as Python writes them."""
    shown = {}
    for block in BLOCKS:
        if block.startswith("def hexllm_"):
            (function,) = ast.parse(block.rstrip() + ": ...").body
            assert isinstance(function, ast.FunctionDef)
            shown[function.name] = signature(function)
    return shown


def signature(function: ast.FunctionDef) -> str:
    returns = "" if function.returns is None else ast.unparse(function.returns)
    return f"({ast.unparse(function.args)}) -> {returns}"


def test_the_specs_are_found() -> None:
    assert len(HOOKS) == 9
    for name in HOOKS:
        assert hasattr(getattr(hookspecs, name), "hexllm_spec")


def test_every_hook_is_documented_and_no_other() -> None:
    assert set(documented()) == set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_documented_signature_is_the_real_one(hook: str) -> None:
    assert documented()[hook] == signature(HOOKS[hook])


@pytest.mark.parametrize("hook", HOOKS)
def test_every_argument_is_explained(hook: str) -> None:
    text = PAGE.partition(f"def {hook}(")[2].partition("```")[2].partition("```python")[0]
    for argument in HOOKS[hook].args.args:
        assert f"`{argument.arg}`" in text, argument.arg


@pytest.mark.parametrize("hook", HOOKS)
def test_every_spec_says_what_it_is_and_when_it_is_called(hook: str) -> None:
    text = ast.get_docstring(HOOKS[hook])
    assert text is not None
    assert re.search(r"^(Collects\.|Notifies\.|Stops at the first result)", text, re.MULTILINE)
    assert "Called" in text


def test_every_plugin_setting_is_explained() -> None:
    assert set(re.findall(r"^\| `plugins\.(\w+)`", PAGE, re.MULTILINE)) == set(
        PluginSettings.model_fields
    )


def test_the_first_plugin_has_eleven_lines_and_works(tmp_path: Path) -> None:
    source = BLOCKS[0]
    assert len(source.splitlines()) == 11
    file = tmp_path / "newest.py"
    file.write_text(source)
    plugins = load_plugins(PluginSettings(files=(str(file),), strict=True))
    policy = plugins.policies.get("newest").build()
    assert isinstance(policy, SchedulingPolicy)
    first, second = (RequestView(name, at, 1, 0, 1) for name, at in (("a", 0.0), ("b", 1.0)))
    assert policy.admission_order((first, second), 2.0) == [second, first]
    assert policy.preemption_victim((second, first)) == second
