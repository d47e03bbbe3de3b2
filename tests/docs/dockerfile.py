"""Reads a Dockerfile into its instructions, as far as the tests need it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Instruction:
    stage: int
    name: str
    value: str

    @property
    def words(self) -> list[str]:
        return [word for word in self.value.split() if not word.startswith("--")]

    @property
    def exec_form(self) -> list[str]:
        start = self.value.index("[")
        words = json.loads(self.value[start:])
        assert all(isinstance(word, str) for word in words)
        return words


def read_dockerfile(text: str) -> list[Instruction]:
    instructions = []
    stage = -1
    pending = ""
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pending += line.rstrip("\\").strip() + " "
        if line.endswith("\\"):
            continue
        name, _, value = pending.strip().partition(" ")
        pending = ""
        stage += name.upper() == "FROM"
        instructions.append(Instruction(stage, name.upper(), value.strip()))
    assert not pending, "the file ends in a continued line"
    return instructions
