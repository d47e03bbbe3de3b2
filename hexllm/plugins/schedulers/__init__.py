"""Entry module of the built-in scheduling policies."""

from collections.abc import Iterator

from hexllm import Component, hookimpl

HEXLLM_PLUGIN_API = 1


@hookimpl
def hexllm_scheduling_policies() -> Iterator[Component]:
    """Offer first come, first served."""
    yield Component(
        name="fcfs",
        implementation="hexllm.plugins.schedulers.fcfs:FirstComeFirstServed",
        summary="first come, first served; a new request's prompt goes before decoding",
    )
