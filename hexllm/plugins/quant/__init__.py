"""Entry module of the built-in quantizers. It offers none yet."""

from collections.abc import Iterator

from hexllm import Component, hookimpl

HEXLLM_PLUGIN_API = 1


@hookimpl
def hexllm_quantizers() -> Iterator[Component]:
    """Offer nothing: the only weights that are served so far are not quantized."""
    return iter(())
