"""README and CONTRIBUTING say nothing that does not hold: commands, flags, links and code."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib

import pytest

from hexllm.core.plugins import load_plugins
from hexllm.core.settings import PluginSettings, Settings, load_settings
from hexllm.server import requests
from tests.docs.dockerfile import ROOT
from tests.docs.markdown import anchors, code_blocks, commands, local_links

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = [(path.name, command) for path in PAGES[:2] for command in commands(path.read_text())]
KNOWN_FLAGS = (
    set(Settings.model_fields)
    | {"max_running_seqs", "config"}
    | {f"plugins.{name}" for name in PluginSettings.model_fields}
)
PYTHON = [block.text for block in code_blocks(README) if block.language == "python"]
PATHS = r"`((?:hexllm|tests|docs|examples|benchmarks)/[\w./-]+)`"
#: Flags of the benchmark, of docker and of the demo, which are no settings.
OTHER_FLAGS = {"url", "workload", "launch", "build-arg"}
BODIES = {
    "/v1/chat/completions": requests.ChatRequest,
    "/v1/completions": requests.CompletionRequest,
    "/generate": requests.PredictInstance,
}


def make_targets():
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_shell_blocks_were_found():
    assert len(SHELL) > 8


@pytest.mark.parametrize(("page", "command"), SHELL, ids=lambda value: value[:40])
def test_commands_are_real(page, command):
    words = shlex.split(command)
    if words[0] == "make":
        targets = {word for word in words[1:] if "=" not in word}
        assert targets
        assert targets <= make_targets()
    elif words[:2] == ["hexllm", "serve"] or "hex_llm.server.api_server" in words:
        flags = [word for word in words if word.startswith("--")]
        assert load_settings(flags).model
    elif words[0] == "curl":
        (url,) = [word for word in words if word.startswith("http://")]
        route = url.removeprefix("http://127.0.0.1:7080")
        body = json.loads(words[words.index("-d") + 1])
        for part in body.get("instances", [body]):
            assert requests.parse(BODIES[route], part)
    else:
        assert words[0] == "bash"
        assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize(
    "text", [block.text for block in code_blocks(README) if block.language == "python"]
)
def test_python_blocks_parse(text):
    ast.parse(text)


def test_the_configuration_file_holds_settings_only():
    (block,) = [block for block in code_blocks(README) if block.language == "toml"]
    table = tomllib.loads(block.text)
    assert set(table.pop("plugins")) <= set(PluginSettings.model_fields)
    assert set(table) <= KNOWN_FLAGS


def test_the_configuration_file_is_accepted(tmp_path):
    (block,) = [block for block in code_blocks(README) if block.language == "toml"]
    path = tmp_path / "server.toml"
    path.write_text(block.text)
    settings = load_settings([f"--config={path}"])
    assert settings.scheduling_policy == "newest"
    assert settings.max_decode_seqs == 64


def test_the_plugin_is_one(tmp_path):
    (block,) = [block for block in code_blocks(README) if "hookimpl" in block.text]
    path = tmp_path / "newest.py"
    path.write_text(block.text)
    plugins = load_plugins(PluginSettings(files=(str(path),)))
    policy = plugins.policies.get("newest").build(None)
    assert policy.admission_order((1, 2, 3), 0.0) == [3, 2, 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_resolve(page):
    for text, target in local_links(page):
        file, _, anchor = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists(), f"[{text}]({target})"
        if anchor:
            assert anchor in anchors(path.read_text()), f"[{text}]({target})"


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda path: path.name)
def test_flags_named_in_the_text_exist(page):
    for flag in re.findall(r"`[^`\n]*?--([\w.-]+)", page.read_text()):
        name = flag.removeprefix("no-").replace("-", "_")
        assert name in KNOWN_FLAGS or flag in OTHER_FLAGS, f"--{flag} is no setting"


def test_paths_named_in_the_text_exist():
    for page in PAGES[:2]:
        for path in re.findall(
            r"`((?:hexllm|tests|docs|examples|benchmarks)/[\w./-]+)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 100


def test_make_lists_every_command():
    shown = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True).stdout
    listed = set(re.findall(r"^\s+make (\w+)", shown, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert listed == set(phony.split())
