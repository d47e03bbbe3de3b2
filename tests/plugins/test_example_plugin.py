"""The example plugin, installed by pip as a user would install it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = Path(__file__).parents[2] / "examples" / "hexllm-example-plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the example into."""
    folder = tmp_path_factory.mktemp("example")
    # A copy, so that no build leaves anything in the checkout.
    source = shutil.copytree(EXAMPLE, folder / "source")
    # Its dependencies are here already, and hatchling is one of hexllm's test dependencies: without
    # a build environment of its own pip needs no network.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile"]
    target = folder / "site"
    done = subprocess.run(
        [*pip, *options, "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def run(installed: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run(*command)`` with the example on the path."""
    # Without this pytest would load the plugins that happen to be installed, and their warnings.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **alone, "PYTHONPATH": str(installed)}
    return lambda *command: subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=400,  # the conformance kit compiles some dozens of small programs
    )


def test_it_is_listed_with_its_distribution(run: Callable[..., Any]) -> None:
    result = run("-m", "hexllm", "plugins", "--json", "--check")
    assert result.returncode in (0, 1), result.stderr
    (row,) = [row for row in json.loads(result.stdout)["plugins"] if row["name"] == "example"]
    assert row["distribution"] == "hexllm-example-plugin"
    assert row["version"] == "0.1.0"
    assert (row["status"], row["reason"], row["remarks"]) == ("ok", "", [])
    (policy,) = row["components"]["scheduling_policies"]
    (family,) = row["components"]["model_families"]
    assert (policy["name"], family["name"]) == ("shortest", "parallel_llama")
    assert (policy["failure"], family["failure"]) == ("", "")


def test_it_is_built_by_name_with_its_options(run: Callable[..., Any]) -> None:
    code = (
        "from hexllm.core.plugins import load_plugins\n"
        "from hexllm.core.settings import load_settings\n"
        "settings = load_settings(['--model=x', '--scheduling_policy=shortest',\n"
        "                          '--options.shortest.patience=2.5'])\n"
        "chosen = load_plugins(settings.plugins).policies.get(settings.scheduling_policy)\n"
        "policy = chosen.build(settings.options.get(chosen.component.name))\n"
        "print(type(policy).__name__, policy._options.patience, policy._options.by)\n"
    )
    result = run("-c", code)
    assert result.stdout == "ShortestFirst 2.5 total\n", result.stderr


def test_its_family_is_found_by_architecture(run: Callable[..., Any]) -> None:
    code = (
        "from hexllm.core.plugins import load_plugins\n"
        "from hexllm.core.settings import PluginSettings\n"
        "config = {'architectures': ['ParallelLlamaForCausalLM']}\n"
        "found = load_plugins(PluginSettings()).resolve_model_family(config)\n"
        "print(found.qualified_name, type(found.build(None)).__name__)\n"
    )
    result = run("-c", code)
    expected = "parallel_llama@hexllm-example-plugin ParallelLlama\n"
    assert result.stdout == expected, result.stderr


def test_its_own_tests_pass(run: Callable[..., Any]) -> None:
    result = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(EXAMPLE / "pyproject.toml"),
        str(EXAMPLE / "tests"),
    )
    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout
