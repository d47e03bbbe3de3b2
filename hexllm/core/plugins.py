"""The plugins of a process: loaded one by one, so that a broken one is a row and not a crash.

Every process of hexllm loads its plugins with :func:`load_plugins`, and so has the same ones.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import hexllm
from hexllm.core.checkpoint import Checkpoint
from hexllm.core.discovery import Candidate, find_candidates
from hexllm.core.errors import (
    CheckpointError,
    ConfigError,
    HexllmError,
    PluginError,
)
from hexllm.core.importing import (
    Broken,
    collect_components,
    import_plugin,
    isolated,
    new_manager,
)
from hexllm.core.locations import scheme_of
from hexllm.core.registry import (
    FAMILIES,
    LOADERS,
    LORA_SOURCES,
    POLICIES,
    QUANTIZERS,
    Kind,
    Registered,
    Registry,
    is_same_name,
)
from hexllm.core.resolution import ByArchitecture
from hexllm.core.wording import described, listing, suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    import pluggy

    from hexllm.core.component import Component
    from hexllm.core.settings import PluginSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One line of ``hexllm plugins``.

    Attributes:
        name: What ``plugins.disable`` and ``plugins.required`` call it.
        distribution: Who ships it; these two settings take that name as well.
        version: The distribution's version.
        entry_point: The module, or the file, that was imported.
        status: ``ok``, ``broken`` or ``disabled``.
        reason: Why it is broken, or nothing.
        remarks: What is bad manners without being an error, such as a slow import.
        components: What it offers, by kind (``scheduling_policies``, …).
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    status: Literal["ok", "broken", "disabled"]
    reason: str = ""
    remarks: tuple[str, ...] = ()
    components: Mapping[str, tuple[Component, ...]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The plugin as messages name it."""
        return f"Plugin {self.name!r} of {self.distribution} {self.version}"


def load_plugins(settings: PluginSettings) -> Plugins:
    """Import every plugin, each alone, log one warning for each broken one, and return them.

    Raises:
        ConfigError: ``disable``, ``required`` or ``prefer`` names what does not exist.
        PluginError: A required plugin is broken or disabled, or any is broken under ``strict``.
    """
    plugins = inspect_plugins(settings)
    for row in plugins.rows:
        if row.status == "broken":
            logger.warning("%s is broken and offers nothing: %s.", row.label, row.reason)
        for remark in row.remarks:
            logger.warning("%s: %s.", row.label, remark)
    plugins.raise_if_unfit()
    return plugins


def inspect_plugins(settings: PluginSettings) -> Plugins:
    """Import every plugin as :func:`load_plugins` does, but log nothing and let no plugin be fatal.

    For ``hexllm plugins``, which is there to show what is broken.

    Raises:
        ConfigError: ``disable`` or ``required`` names a plugin that does not exist.
    """
    candidates = find_candidates(hexllm.__version__, settings.load, settings.files)
    for option in ("disable", "required"):
        for name in getattr(settings, option):
            if not any(each.answers_to(name) for each in candidates):
                known = sorted(
                    {each.name for each in candidates} | {each.distribution for each in candidates}
                )
                raise ConfigError(
                    f"plugins.{option} names {name!r}, and no such plugin is installed."
                    f"{suggestion(name, known)} Known: {listing(known)}."
                )
    manager = new_manager()
    # Backwards, because pluggy calls first what was registered last, and names decide the order.
    rows = [_load(each, settings, manager) for each in reversed(candidates)]
    return Plugins(settings, candidates, rows[::-1], manager)


def _load(
    candidate: Candidate, settings: PluginSettings, manager: pluggy.PluginManager
) -> PluginRow:
    row = PluginRow(
        candidate.name,
        candidate.distribution,
        candidate.version,
        candidate.entry_point,
        "disabled",
    )
    if any(candidate.answers_to(name) for name in settings.disable):
        return row
    module: ModuleType | None = None
    try:
        module, remarks = import_plugin(candidate)
        name = f"{candidate.name}@{candidate.distribution}"
        isolated("it cannot be registered", lambda: manager.register(module, name))
        components = collect_components(manager, module)
    except Broken as broken:
        if module is not None and manager.is_registered(module):
            manager.unregister(module)
        return replace(row, status="broken", reason=str(broken))
    return replace(row, status="ok", remarks=remarks, components=components)


class Plugins:
    """The plugins of this process and everything they offer.

    Attributes:
        families: Model families, claimed by ``architectures`` names.
        quantizers: Quantizers, claimed by ``quant_method`` names.
        loaders: Weight loaders, claimed by URI schemes.
        lora_sources: LoRA sources, claimed by adapter-name schemes.
        policies: Scheduling policies, chosen by name.
    """

    def __init__(
        self,
        settings: PluginSettings,
        candidates: Sequence[Candidate],
        rows: Sequence[PluginRow],
        manager: pluggy.PluginManager,
    ) -> None:
        self._settings = settings
        self._candidates = tuple(candidates)
        self._rows = list(rows)
        self._manager = manager
        self._manifest = tuple(
            sorted(
                (row.distribution, row.version, row.entry_point)
                for row in rows
                if row.status == "ok"
            )
        )
        self._failed_calls: set[tuple[str, str]] = set()
        self.families = self._registry(FAMILIES)
        self.quantizers = self._registry(QUANTIZERS)
        self.loaders = self._registry(LOADERS)
        self.lora_sources = self._registry(LORA_SOURCES)
        self.policies = self._registry(POLICIES)
        self._by_architecture = ByArchitecture(self.families)
        manager.register(self._by_architecture, "hexllm")

    @property
    def rows(self) -> tuple[PluginRow, ...]:
        """Every plugin that was found, sorted by name."""
        return tuple(sorted(self._rows, key=lambda row: (row.name, row.distribution)))

    @property
    def registries(self) -> tuple[Registry, ...]:
        """The registry of every kind."""
        return (self.families, self.quantizers, self.loaders, self.lora_sources, self.policies)

    def manifest(self) -> tuple[tuple[str, str, str], ...]:
        """Return (distribution, version, entry point) of each plugin that loaded, sorted."""
        return self._manifest

    def raise_if_unfit(self) -> None:
        """Check ``plugins.required``, ``plugins.strict`` and ``plugins.prefer``.

        Raises:
            ConfigError: ``prefer`` names what no working plugin offers.
            PluginError: A required plugin is broken or disabled, or any is broken under
                ``strict``.
        """
        for candidate, row in zip(self._candidates, self._rows, strict=True):
            is_required = self._is_required(candidate)
            if row.status == "disabled" and is_required:
                raise PluginError(f"{row.label} is in both plugins.required and plugins.disable.")
            if row.status != "broken" or not (is_required or self._settings.strict):
                continue
            why = "plugins.required names it" if is_required else "plugins.strict is set"
            raise PluginError(
                f"{row.label} is broken, and {why}: {row.reason}. Update or remove "
                f"{row.distribution}, or change that setting."
            )
        offered = {each.qualified_name for registry in self.registries for each in registry}
        for name in self._settings.prefer:
            if not any(is_same_name(name, each) for each in offered):
                raise ConfigError(
                    f"plugins.prefer names {name!r}, which no working plugin offers."
                    f"{suggestion(name, offered)} Write name@distribution as `hexllm plugins` "
                    f"lists them."
                )

    def verify_options(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that each ``[options.name]`` table is for a component that exists.

        Raises:
            ConfigError: A table's name is no component's.
        """
        known = {each.component.name for registry in self.registries for each in registry}
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"options.{name} is for no component of any plugin."
                    f"{suggestion(name, known)} `hexllm plugins` lists them."
                )

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call every plugin's implementation of ``hook``, each alone; log what fails and go on.

        Args:
            hook: ``hexllm_configure``, ``hexllm_request_finished`` or ``hexllm_engine_stats``.
            arguments: All the hook's arguments; an implementation gets those it takes.

        Raises:
            PluginError: ``hexllm_configure`` fails in a plugin that may not fail (it is required,
                or ``strict`` is set).
        """
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            try:
                _call(implementation, arguments)
            except Broken as broken:
                index = self._index(implementation)
                row = self._rows[index]
                may_fail = not (self._settings.strict or self._is_required(self._candidates[index]))
                if hook == "hexllm_configure" and not may_fail:
                    raise PluginError(f"{row.label}: {broken}.") from broken
                # A hook that is called once a second would fill the log with one message.
                key = (implementation.plugin_name, hook)
                level = logging.DEBUG if key in self._failed_calls else logging.ERROR
                self._failed_calls.add(key)
                logger.log(level, "%s: %s.", row.label, broken, exc_info=broken.__cause__)

    def resolve_model_family(self, hf_config: Mapping[str, Any]) -> Registered:
        """Return the family that serves a model: a plugin's choice, else by ``architectures``.

        Args:
            hf_config: The model's ``config.json``.

        Raises:
            UnsupportedConfigError: No family serves its architecture.
            PluginError: Two families claim it, or a plugin chose one that does not exist.
        """
        arguments = {"hf_config": hf_config, "claims": self.families.claims()}
        for implementation in reversed(
            self._manager.hook.hexllm_resolve_model_family.get_hookimpls()
        ):
            if isinstance(implementation.plugin, ByArchitecture):
                # Registered last and always answers; its errors are the user's to see.
                break
            index = self._index(implementation)
            row = self._rows[index]
            try:
                answer = _call(implementation, arguments)
            except Broken as broken:
                self._rows[index] = replace(row, status="broken", reason=str(broken))
                logger.warning("%s is passed over: %s.", row.label, broken)
                continue
            if answer is not None:
                return self._chosen_family(row, answer)
        return self.families.get(self._by_architecture.hexllm_resolve_model_family(hf_config))

    def open_checkpoint(
        self,
        uri: str,
        revision: str | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Checkpoint:
        """Open a checkpoint with the loader of its scheme, fetching no weights.

        Args:
            uri: ``scheme://…``, a local path, or ``org/name``.
            revision: Branch, tag or commit, where the scheme has such.
            options: Options of components by their names (``settings.options``).

        Raises:
            CheckpointError: Nothing usable is there, or the loader fails.
            PluginError: No loader provides the scheme, or more than one does.
        """
        loader = self.loaders.claimed(scheme_of(uri))
        opener = loader.build((options or {}).get(loader.component.name))
        try:
            checkpoint = opener.open(uri, revision)
        except (HexllmError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise CheckpointError(
                f"Weight loader {loader.component.name!r} of {loader.source} failed on {uri}: "
                f"{described(error)}."
            ) from error
        if not isinstance(checkpoint, Checkpoint):
            raise PluginError(
                f"Weight loader {loader.component.name!r} of {loader.source} returned "
                f"{type(checkpoint).__name__} for {uri}, which is not a Checkpoint."
            )
        return checkpoint

    def _registry(self, kind: Kind) -> Registry:
        missing = []
        for row in self.rows:
            if row.status == "broken":
                missing.append(f"{row.label} might offer it, but is broken: {row.reason}.")
            elif row.status == "disabled":
                missing.append(f"{row.label} might offer it, but is disabled.")
        entries = [
            Registered(kind, component, row.name, row.distribution, row.version)
            for row in self._rows
            for component in row.components.get(kind.key, ())
        ]
        return Registry(kind, entries, missing, self._settings.prefer)

    def _is_required(self, candidate: Candidate) -> bool:
        return any(candidate.answers_to(name) for name in self._settings.required)

    def _index(self, implementation: pluggy.HookImpl) -> int:
        names = [f"{row.name}@{row.distribution}" for row in self._rows]
        return names.index(implementation.plugin_name)

    def _chosen_family(self, row: PluginRow, answer: Any) -> Registered:
        try:
            return self.families.get(str(answer))
        except PluginError as error:
            raise PluginError(f"{row.label} chose the model family {answer!r}. {error}") from error


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    taken = {name: arguments[name] for name in implementation.argnames}
    return isolated(
        f"{implementation.function.__name__} failed",
        lambda: implementation.function(**taken),
    )
