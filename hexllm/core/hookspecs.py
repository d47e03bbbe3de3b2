"""Every hook of hexllm. This file imports nothing that costs anything.

Hooks that *collect* yield :class:`~hexllm.core.component.Component` records; nothing they name is
imported until it is chosen. An implementation may take fewer arguments than its spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hexllm.core.component import Component

#: The newest plugin API this hexllm speaks; a plugin module states its own in HEXLLM_PLUGIN_API.
PLUGIN_API = 1

PROJECT = "hexllm"
ENTRY_POINT_GROUP = "hexllm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hexllm_model_families() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer model families.

    Collects. ``provides`` holds the ``architectures`` names of ``config.json`` that the family
    serves. Called once in every process, when plugins are loaded.

    Returns:
        Components whose implementation is a ``hexllm.model.family.DecoderFamily`` class.
    """


@hookspec
def hexllm_quantizers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer quantizers.

    Collects. ``provides`` holds the ``quant_method`` names of ``quantization_config``. Called
    once in every process, when plugins are loaded.

    Returns:
        Components whose implementation is a quantizer class.
    """


@hookspec
def hexllm_weight_loaders() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer places to load checkpoints from.

    Collects. ``provides`` holds URI schemes (``file``, ``hf``, ``gs``). Called once in every
    process, when plugins are loaded.

    Returns:
        Components whose implementation is a ``hexllm.core.checkpoint.WeightLoader`` class.
    """


@hookspec
def hexllm_lora_sources() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer places to find LoRA adapters in.

    Collects. ``provides`` holds the schemes of adapter names. Called once in every process, when
    plugins are loaded.

    Returns:
        Components whose implementation has ``resolve(adapter) -> uri | None``.
    """


@hookspec
def hexllm_scheduling_policies() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer scheduling policies.

    Collects. Chosen by name with ``--scheduling_policy``; ``provides`` is empty. Called
    once in every process, when plugins are loaded.

    Returns:
        Components whose implementation is a ``hexllm.core.policy.SchedulingPolicy`` class.
    """


@hookspec(firstresult=True)
def hexllm_resolve_model_family(
    hf_config: Mapping[str, Any], claims: Mapping[str, tuple[str, ...]]
) -> str | None:
    """Choose the family of a model.

    Stops at the first result that is not None; the core's own answer, by ``architectures``, is
    tried last. Called once when the engine is built, before any weight is opened.

    Args:
        hf_config: The model's ``config.json`` as it was read.
        claims: Each family's name and the architectures it provides.

    Returns:
        A family's name (``name`` or ``name@distribution``), or None to leave it to others.
    """


@hookspec
def hexllm_configure(settings: Any, process: str) -> None:
    """Learn the settings, once.

    Notifies. Called in every process after plugins are loaded and before JAX is imported.

    Args:
        settings: The frozen ``hexllm.core.settings.Settings``.
        process: Which process this is: ``server``, ``engine`` or ``cli``.
    """


@hookspec
def hexllm_request_finished(event: Any) -> None:
    """Learn that a request ended.

    Notifies. Called in the server process, off the response path.

    Args:
        event: A ``hexllm.core.events.RequestFinished``.
    """


@hookspec
def hexllm_engine_stats(stats: Any) -> None:
    """Learn the engine's counters, about once a second while it works.

    Notifies. Called in the server process, off the response path.

    Args:
        stats: A ``hexllm.core.events.EngineStats``.
    """
