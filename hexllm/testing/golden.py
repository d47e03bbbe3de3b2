"""Logits kept beside a family's tests, for machines without the reference implementation."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from hexllm.testing.references import Logits

#: Set it to have goldens written from the reference instead of compared.
WRITE_VARIABLE = "HEXLLM_WRITE_GOLDEN"
#: Lengths of the prompts whose last logits are kept.
LENGTHS = (1, 6, 21)
#: Of each, so many logits.
KEPT = 32


def prompt(length: int, vocab_size: int) -> list[int]:
    """Return a made-up prompt, the same on every machine."""
    rng = np.random.RandomState(length)
    return [int(token) for token in rng.randint(0, vocab_size, length)]


def kept_logits(logits: Logits, vocab_size: int) -> list[list[float]]:
    """Return what a golden keeps of a model."""
    return [
        [round(float(x), 5) for x in logits(prompt(length, vocab_size))[-1, :KEPT]]
        for length in LENGTHS
    ]


def digest(config: dict[str, Any]) -> str:
    """Return a short name of a configuration's contents."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def is_writing() -> bool:
    """Tell whether goldens are to be written."""
    return bool(os.environ.get(WRITE_VARIABLE))


def write(path: Path, name: str, config: dict[str, Any], logits: list[list[float]]) -> None:
    """Keep the logits of the configuration called ``name`` in the file ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[name] = {"config": digest(config), "logits": logits}
    lines = [f"{json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(path: Path, name: str, config: dict[str, Any]) -> np.ndarray:
    """Return the kept logits [prompts, KEPT].

    Raises:
        AssertionError: There are none, or of another configuration; it says how to write them.
    """
    how = f"Write it where torch is installed: {WRITE_VARIABLE}=1 pytest … -k golden"
    kept = json.loads(path.read_text()) if path.exists() else {}
    assert name in kept, f"{path} has no golden of {name!r}. {how}"
    assert kept[name]["config"] == digest(config), (
        f"{path}'s golden of {name!r} is of another configuration. {how}"
    )
    return np.asarray(kept[name]["logits"], np.float32)
