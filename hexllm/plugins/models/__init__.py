"""The built-in model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hexllm.core.component import Component
from hexllm.core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator

HEXLLM_PLUGIN_API = 1


@hookimpl
def hexllm_model_families() -> Iterator[Component]:
    """Yield a component for each family."""
    yield Component(
        name="llama",
        implementation="hexllm.plugins.models.llama:Llama",
        provides=("LlamaForCausalLM",),
        summary="Llama 2, 3, 3.1, 3.2, 3.3, Llama Guard 3, SmolLM2 and others of their shape",
    )
