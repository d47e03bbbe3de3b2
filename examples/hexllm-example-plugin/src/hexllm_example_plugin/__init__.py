"""Entry module: names what this plugin offers and imports nothing else."""

from collections.abc import Iterator

from hexllm import Component, hookimpl

HEXLLM_PLUGIN_API = 1


@hookimpl
def hexllm_scheduling_policies() -> Iterator[Component]:
    """Offer shortest first."""
    yield Component(
        name="shortest",
        implementation="hexllm_example_plugin.policy:ShortestFirst",
        summary="the shortest request first; one that has waited long goes before all",
        options="hexllm_example_plugin.policy:Options",
    )


@hookimpl
def hexllm_model_families() -> Iterator[Component]:
    """Offer a model family; ``provides`` is what ``architectures`` of config.json says."""
    yield Component(
        name="parallel_llama",
        implementation="hexllm_example_plugin.parallel_llama:ParallelLlama",
        provides=("ParallelLlamaForCausalLM",),
        summary="a Llama whose attention and MLP stand side by side",
    )
