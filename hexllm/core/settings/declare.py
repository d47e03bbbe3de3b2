"""How one setting is declared: pydantic's field, with what an error and ``--help`` say of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import Field

#: The groups of ``--help`` and ``docs/flags.md``, in order; the first four are Google's.
GROUPS = ("Model", "Inference engine", "Memory", "Dynamic LoRA", "Server", "hexllm")


def flag(
    default: Any,
    group: str,
    meaning: str,
    accepts: str,
    *,
    shown_default: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare one setting.

    Args:
        default: Its default; a callable is called with the values validated so far; ``...`` when
            it must be given.
        group: One of :data:`GROUPS`.
        meaning: One line for ``--help``.
        accepts: What a value has to be, to follow "it takes" in an error.
        shown_default: The default in words, where ``str(default)`` would not say it.
        constraints: Pydantic's, such as ``ge=1``.
    """
    extra: dict[str, Any] = {"group": group, "accepts": accepts, "shown_default": shown_default}
    if callable(default):
        return Field(
            default_factory=default, description=meaning, json_schema_extra=extra, **constraints
        )
    return Field(default, description=meaning, json_schema_extra=extra, **constraints)


def count(default: int, group: str, meaning: str) -> Any:
    """Declare a setting that takes a whole number from 1 up."""
    return flag(default, group, meaning, "a whole number from 1 up", ge=1)


def switch(default: bool, group: str, meaning: str) -> Any:
    """Declare a setting that is true or false."""
    return flag(default, group, meaning, "true or false")


def cache_directory() -> Path:
    """Return where compiled programs are kept by default."""
    if own := os.environ.get("HEXLLM_CACHE"):
        return Path(own, "xla").expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache, "hexllm", "xla").expanduser()


_LOG_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL", "NOTSET": "DEBUG"}
_DTYPES = {"float16": "bfloat16", "half": "bfloat16", "float": "float32"}


def respelt(name: str, value: str) -> Any:
    """Return a setting's value, stripped, as hexllm spells it."""
    if name == "log_level":
        return _LOG_LEVELS.get(value.upper(), value.upper())
    if name == "dtype":
        return _DTYPES.get(value, value)
    return int(value) if name == "block_size" and re.fullmatch(r"\d+", value) else value
