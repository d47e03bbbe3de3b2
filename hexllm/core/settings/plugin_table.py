"""The ``[plugins]`` table of the settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from hexllm.core.settings.declare import flag, switch


def _comma_list(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


class PluginSettings(BaseModel):
    """The ``[plugins]`` table: which plugins are loaded, and how strictly.

    Attributes:
        disable: Entry points or distributions that are not loaded.
        load: Dotted names of plugin modules to load besides the installed ones.
        files: Python files to load as plugins, absolute once they are read from a configuration.
        required: Entry points or distributions without which hexllm does not start.
        prefer: Components, as ``name@distribution``, that win where two plugins offer the same.
        strict: Whether any broken plugin stops the start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    disable: tuple[str, ...] = flag(
        (), "hexllm", "Plugins not to load, by entry point or distribution.", "names, with commas"
    )
    load: tuple[str, ...] = flag(
        (), "hexllm", "Plugin modules to load besides the installed ones.", "dotted names"
    )
    files: tuple[str, ...] = flag(
        (), "hexllm", "Python files to load as plugins.", "paths, with commas between them"
    )
    required: tuple[str, ...] = flag(
        (), "hexllm", "Plugins without which the server does not start.", "names, with commas"
    )
    prefer: tuple[str, ...] = flag(
        (),
        "hexllm",
        "Components that win over another's of the same name or claim.",
        "name@distribution, with commas",
    )
    strict: bool = switch(False, "hexllm", "Do not start when any plugin is broken.")

    @field_validator("disable", "load", "files", "required", "prefer", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return _comma_list(value)
