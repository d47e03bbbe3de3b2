"""Reads what the tests of the documentation look at: code blocks, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class CodeBlock:
    language: str
    text: str


def code_blocks(text: str) -> list[CodeBlock]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [CodeBlock(language, body) for language, body in found]


def commands(text: str) -> list[str]:
    """Every command of the shell blocks, continued lines joined and comments cut off."""
    lines: list[str] = []
    for block in code_blocks(text):
        if block.language != "sh":
            continue
        pending = ""
        for line in block.text.splitlines():
            pending += re.sub(r"\s+# .*$", "", line) if not pending else "\n" + line
            # A quote left open goes on in the next line.
            if pending.count("'") % 2 or pending.endswith("\\"):
                continue
            if pending.strip():
                lines.append(pending)
            pending = ""
    return lines


def local_links(path: Path) -> list[tuple[str, str]]:
    """(text, target) of each link that does not leave the repository."""
    links = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", path.read_text())
    return [(text, target) for text, target in links if "://" not in target]


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}
