"""Components by name and by what they provide, and the moment one is imported and built."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hexllm.core.discovery import canonical
from hexllm.core.errors import ConfigError, HexllmError, PluginError
from hexllm.core.wording import described, listing, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic import BaseModel

    from hexllm.core.component import Component


@dataclass(frozen=True, slots=True)
class Kind:
    """What the core knows of one kind of component.

    Attributes:
        key: Its name in ``hexllm plugins --json``; its hook is ``hexllm_`` and this.
        noun: As messages name one.
        claim: What its ``provides`` holds, as messages name one.
        setting: The flag that chooses one by name, or nothing when it is chosen by claim.
        methods: What the core and the engine call on a built one.
    """

    key: str
    noun: str
    claim: str
    setting: str = ""
    methods: tuple[str, ...] = ()

    @property
    def hook(self) -> str:
        """The hook that offers components of this kind."""
        return f"hexllm_{self.key}"


FAMILIES = Kind("model_families", "model family", "architecture")
QUANTIZERS = Kind("quantizers", "quantizer", "quant_method")
LOADERS = Kind("weight_loaders", "weight loader", "URI scheme", methods=("open",))
LORA_SOURCES = Kind("lora_sources", "LoRA source", "adapter scheme", methods=("resolve",))
POLICIES = Kind(
    "scheduling_policies",
    "scheduling policy",
    "claim",
    setting="scheduling_policy",
    methods=("admission_order", "next_phase", "preemption_victim", "on_finished"),
)
KINDS = (FAMILIES, QUANTIZERS, LOADERS, LORA_SOURCES, POLICIES)


@dataclass(frozen=True, slots=True)
class Registered:
    """A component and who offers it.

    Attributes:
        kind: Which hook offered it.
        component: The record as the plugin gave it.
        plugin: The name of the plugin's row in ``hexllm plugins``.
        distribution: Who ships it.
        version: The distribution's version.
    """

    kind: Kind
    component: Component
    plugin: str
    distribution: str
    version: str

    @property
    def qualified_name(self) -> str:
        """``name@distribution``, which always means this one."""
        return f"{self.component.name}@{self.distribution}"

    @property
    def source(self) -> str:
        """``distribution version``, as messages name who offers it."""
        return f"{self.distribution} {self.version}"

    def load(self) -> tuple[Any, type[BaseModel] | None]:
        """Import the implementation and the options model, and return both.

        Raises:
            PluginError: One of them cannot be imported or is not of the kind it must be.
        """
        implementation = self._import(self.component.implementation)
        if not callable(implementation):
            raise self._error(f"{self.component.implementation} is not a class")
        missing = [name for name in self.kind.methods if not hasattr(implementation, name)]
        if isinstance(implementation, type) and missing:
            raise self._error(f"{self.component.implementation} lacks {listing(missing)}()")
        if self.component.options is None:
            return implementation, None
        from pydantic import BaseModel

        options = self._import(self.component.options)
        if not (isinstance(options, type) and issubclass(options, BaseModel)):
            raise self._error(f"its options {self.component.options} are not a pydantic model")
        return implementation, options

    def build(self, options: Mapping[str, Any] | None = None) -> Any:
        """Import the implementation, validate ``options`` and return an instance.

        A component with an options model is called with that model's instance, any other without
        arguments.

        Raises:
            ConfigError: An option is unknown or unusable, or the component takes none.
            PluginError: The plugin cannot be imported or fails while it is built.
        """
        implementation, model = self.load()
        arguments = [] if model is None else [self._validated(model, options or {})]
        if model is None and options:
            raise ConfigError(
                f"The {self._label} takes no options; given: {listing(sorted(options))}. "
                f"Remove [options.{self.component.name}]."
            )
        try:
            return implementation(*arguments)
        except (HexllmError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self._error(f"building it failed: {described(error)}") from error

    @property
    def _label(self) -> str:
        return f"{self.kind.noun} {self.component.name!r} of {self.source}"

    def _error(self, reason: str) -> PluginError:
        return PluginError(
            f"The {self._label} cannot be used: {reason}. Update or remove {self.distribution}, or "
            f"choose another {self.kind.noun}."
        )

    def _import(self, reference: str) -> Any:
        module, _, path = reference.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        # BaseException: a module may call sys.exit(), and a Rust extension's panic is not an
        # Exception either.
        except BaseException as error:
            raise self._error(f"importing {module} failed: {described(error)}") from error
        for name in path.split("."):
            try:
                found = getattr(found, name)
            except AttributeError:
                near = suggestion(name, (each for each in dir(found) if not each.startswith("_")))
                raise self._error(f"{module} has no {path!r}.{near}".rstrip(".")) from None
        return found

    def _validated(self, model: type[BaseModel], options: Mapping[str, Any]) -> BaseModel:
        from pydantic import ValidationError

        known = set(model.model_fields)
        known |= {field.alias for field in model.model_fields.values() if field.alias}
        # Checked here because pydantic ignores unknown keys unless the model's author forbids them.
        if model.model_config.get("extra") != "allow":
            for name in options:
                if name not in known:
                    raise ConfigError(
                        f"The {self._label} has no option {name!r}."
                        f"{suggestion(str(name), known)} It takes: {listing(sorted(known))}."
                    )
        try:
            return model.model_validate(dict(options))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc']) or 'options'}"
                f"={fault['input']!r}: {fault['msg']}"
                if fault["type"] != "missing"
                else f"{'.'.join(str(part) for part in fault['loc'])}: it must be set"
                for fault in error.errors()
            )
            raise ConfigError(
                f"Options of the {self._label} cannot be used: {faults}. "
                f"Change [options.{self.component.name}]."
            ) from error


class Registry:
    """The components of one kind that working plugins offer, sorted by name."""

    def __init__(
        self,
        kind: Kind,
        entries: Sequence[Registered],
        missing: Sequence[str] = (),
        preferred: Sequence[str] = (),
    ) -> None:
        """Sort ``entries``.

        Args:
            kind: Of every entry.
            entries: In any order.
            missing: A sentence for each plugin that is broken or disabled, and so might have
                offered a name that is not here; kept as an attribute.
            preferred: ``name@distribution`` of components that win where two offer the same.
        """
        self.kind = kind
        self._entries = tuple(
            sorted(entries, key=lambda each: (each.component.name, each.qualified_name))
        )
        self.missing = tuple(missing)
        self._preferred = frozenset(_qualified(name) for name in preferred)

    def __iter__(self) -> Iterator[Registered]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> tuple[str, ...]:
        """Return every name, sorted, once; with ``@distribution`` where two offer the same."""
        bare = [each.component.name for each in self._entries]
        return tuple(
            dict.fromkeys(
                name if bare.count(name) == 1 else each.qualified_name
                for name, each in zip(bare, self._entries, strict=True)
            )
        )

    def claims(self) -> dict[str, tuple[str, ...]]:
        """Return what each component provides, by the names that :meth:`names` gives."""
        bare = [each.component.name for each in self._entries]
        return {
            each.component.name
            if bare.count(each.component.name) == 1
            else each.qualified_name: each.component.provides
            for each in self._entries
        }

    def get(self, name: str) -> Registered:
        """Return the component called ``name`` or ``name@distribution``.

        Raises:
            PluginError: Nobody offers it, or more than one distribution does.
        """
        bare, at, distribution = name.partition("@")
        same = [each for each in self._entries if each.component.name == bare]
        found = same
        if at:
            found = [each for each in same if is_same_name(each.qualified_name, name)]
            if same and not found:
                offers = listing([each.qualified_name for each in same], "or")
                raise PluginError(
                    f"{self._noun} {bare!r} is not offered by {distribution!r}. Use {offers}."
                )
        if not found:
            self._raise_unknown(f"{self._noun} {name!r}", name, self.names())
        return self._only(found, f"{self._noun} {bare!r} is offered")

    def claimed(self, claim: str) -> Registered:
        """Return the component that provides ``claim``.

        Raises:
            PluginError: Nobody provides it, or more than one component does.
        """
        found = [each for each in self._entries if claim in each.component.provides]
        if not found:
            known = sorted({one for each in self._entries for one in each.component.provides})
            self._raise_unknown(f"{self._claim} {claim!r}", claim, known)
        return self._only(found, f"{self._claim} {claim!r} is provided")

    @property
    def _noun(self) -> str:
        return self.kind.noun[0].upper() + self.kind.noun[1:]

    @property
    def _claim(self) -> str:
        return self.kind.claim[0].upper() + self.kind.claim[1:]

    def _only(self, found: Sequence[Registered], what: str) -> Registered:
        if len(found) > 1:
            found = [
                each for each in found if _qualified(each.qualified_name) in self._preferred
            ] or found
        if len(found) == 1:
            return found[0]
        setting = self.kind.setting
        same_name = len({each.component.name for each in found}) == 1
        who = listing(
            each.source if same_name else f"{each.component.name!r} of {each.source}"
            for each in found
        )
        if len({_qualified(each.qualified_name) for each in found}) < len(found):
            remedy = f"Disable one: plugins.disable={found[0].plugin}"
        elif setting:
            remedy = f"Choose one: --{setting}={found[0].qualified_name}"
        else:
            remedy = f"Choose one: plugins.prefer={found[0].qualified_name}"
        raise PluginError(f"{what} by {who}. {remedy}")

    def _raise_unknown(self, what: str, name: str, known: Sequence[str]) -> None:
        sentences = [f"{what} is not known.{suggestion(name, known)}"]
        sentences.append(f"Known: {listing(known)}.")
        sentences += self.missing
        raise PluginError(" ".join(sentences))


def is_same_name(one: str, other: str) -> bool:
    """Whether two ``name@distribution`` mean the same, however the distribution is spelt."""
    return _qualified(one) == _qualified(other)


def _qualified(name: str) -> str:
    bare, _, distribution = name.partition("@")
    return f"{bare}@{canonical(distribution)}"
