"""Entry module of the built-in scheduling policies."""

from collections.abc import Iterator

from hexllm import Component, hookimpl

HEXLLM_PLUGIN_API = 1


@hookimpl
def hexllm_scheduling_policies() -> Iterator[Component]:
    """Offer the policies by the names that ``--scheduling_policy`` takes."""
    yield Component(
        name="fcfs",
        implementation="hexllm.plugins.schedulers.fcfs:FirstComeFirstServed",
        summary="first come, first served; a new request's prompt goes before decoding",
    )
    yield Component(
        name="priority",
        implementation="hexllm.plugins.schedulers.priority:UrgentFirst",
        summary="by the request field 'priority', lower first; equal ones by arrival",
    )
    yield Component(
        name="fair",
        implementation="hexllm.plugins.schedulers.fair:FairShare",
        summary="tenants share the machine by tokens, whoever sends more requests",
        options="hexllm.plugins.schedulers.fair:Options",
    )
    yield Component(
        name="sjf",
        implementation="hexllm.plugins.schedulers.sjf:ShortestFirst",
        summary="the shortest prompt first; long ones age, so that their turn comes",
        options="hexllm.plugins.schedulers.sjf:Options",
    )
