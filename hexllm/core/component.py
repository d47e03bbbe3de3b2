"""The one record that a plugin yields for everything that has a name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hexllm.core.errors import PluginError

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_REFERENCE = re.compile(r"[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Component:
    """A named implementation that is imported only once it is chosen.

    Attributes:
        name: What users write to choose it (``--scheduling_policy=fair``); lower case.
        implementation: ``package.module:attribute`` of the class that is called to build it.
        provides: What it claims, by the hook that yields it: Hugging Face ``architectures`` for
            a model family, ``quant_method`` names for a quantizer, URI schemes for a loader.
        summary: One line for ``hexllm plugins``.
        options: ``package.module:attribute`` of a pydantic model that validates its options, or
            None when it takes none.

    Raises:
        PluginError: A field is not of this form.
    """

    name: str
    implementation: str
    provides: tuple[str, ...] = ()
    summary: str = ""
    options: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise PluginError(
                f"Component name {self.name!r} is not usable: write lower-case letters, digits, "
                f"'_', '-' or '.', starting with a letter or digit."
            )
        for field in ("implementation", "options"):
            value = getattr(self, field)
            if value is None and field == "options":
                continue
            if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
                raise PluginError(
                    f"Component {self.name!r}: {field}={value!r} is not of the form "
                    f"'package.module:attribute'."
                )
        if not isinstance(self.provides, tuple) or not all(
            isinstance(claim, str) and claim for claim in self.provides
        ):
            raise PluginError(
                f"Component {self.name!r}: provides={self.provides!r} is not a tuple of names."
            )
        if not isinstance(self.summary, str):
            raise PluginError(f"Component {self.name!r}: summary={self.summary!r} is not text.")
