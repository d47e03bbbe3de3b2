"""docs/design/structure.md has exactly one line for every module."""

from __future__ import annotations

import re

import pytest

from tests.docs.dockerfile import ROOT

TEXT = (ROOT / "docs" / "design" / "structure.md").read_text()


def listed_modules():
    folder = None
    for line in TEXT.splitlines():
        if heading := re.fullmatch(r"#+ (\S.*)", line):
            folder = heading[1] if (ROOT / heading[1]).is_dir() else None
        elif item := re.match(r"- `(\w+\.py)`: \S", line):
            assert folder, f"{line!r} stands under no folder's heading"
            yield f"{folder}/{item[1]}"


def modules():
    for package in ("hexllm", "hex_llm", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            # The entry modules of the built-in plugins do something; other __init__ files do not.
            if path.name != "__init__.py" or re.fullmatch(r"hexllm/plugins/\w+/__init__.py", name):
                yield name


def test_every_module_has_its_line():
    missing = set(modules()) - set(listed_modules())
    assert not missing, f"give these a line in docs/design/structure.md: {sorted(missing)}"


def test_every_line_has_its_module():
    stale = set(listed_modules()) - set(modules())
    assert not stale, f"docs/design/structure.md names what is gone: {sorted(stale)}"


def test_no_module_has_two_lines():
    lines = list(listed_modules())
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT))))
def test_files_named_in_the_text_exist(path):
    assert (ROOT / path).is_file() or (ROOT / "hexllm" / path).is_file()
