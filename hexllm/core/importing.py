"""One plugin's entry module, imported and judged alone: it works, or there is a reason why not."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from hexllm.core import hookspecs
from hexllm.core.component import Component
from hexllm.core.errors import PluginError
from hexllm.core.hookspecs import PLUGIN_API, PROJECT
from hexllm.core.registry import KINDS
from hexllm.core.wording import described, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from hexllm.core.discovery import Candidate

_T = TypeVar("_T")

#: An entry module is a list of names; one that takes longer delays every process and command.
SLOW_IMPORT_SECONDS = 1.0

#: Libraries whose import in an entry module would reach processes that must not have them.
_HEAVY = ("jax", "flax", "torch", "transformers", "fastapi")


class Broken(Exception):  # noqa: N818  a state of a plugin, not an error of ours
    """Why a plugin cannot be used; becomes its row's reason."""


def new_manager() -> pluggy.PluginManager:
    """Return a plugin manager that knows hexllm's hooks."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def isolated(action: str, call: Callable[[], _T]) -> _T:
    """Return ``call()``, with whatever a plugin's code raises turned into :class:`Broken`.

    ``BaseException``, because a plugin may call ``sys.exit()`` and a Rust extension's panic is not
    an ``Exception``; only the user's Ctrl-C goes through.
    """
    try:
        return call()
    except (KeyboardInterrupt, Broken):
        raise
    except BaseException as error:
        raise Broken(f"{action}: {described(error)}") from error


def import_plugin(candidate: Candidate) -> tuple[ModuleType, tuple[str, ...]]:
    """Import a plugin's entry module and check it against the hooks.

    Returns:
        The module, and remarks on what is bad manners without being an error.

    Raises:
        Broken: It cannot be imported, or is not a plugin for this hexllm.
    """
    if candidate.problem:
        raise Broken(candidate.problem)
    before = {name for name in _HEAVY if name in sys.modules}
    start = time.perf_counter()
    module = isolated(f"importing {candidate.entry_point} failed", lambda: _import(candidate))
    seconds = time.perf_counter() - start
    remarks = []
    if seconds > SLOW_IMPORT_SECONDS:
        remarks.append(
            f"importing it took {seconds:.1f} s, in every process and command; only its "
            f"implementation modules should import what is slow"
        )
    remarks += [
        f"its entry module imports {name}, which belongs in its implementation modules"
        for name in _HEAVY
        if name in sys.modules and name not in before
    ]
    _check_api(module)
    _check_hooks(module, candidate.name)
    return module, tuple(remarks)


def collect_components(
    manager: pluggy.PluginManager, plugin: ModuleType
) -> dict[str, tuple[Component, ...]]:
    """Return what ``plugin`` offers, by kind, sorted by name.

    Raises:
        Broken: One of its hooks raises, or yields something that is not a component.
    """
    offered = {}
    for kind in KINDS:
        found: list[Component] = []
        for hook in getattr(manager.hook, kind.hook).get_hookimpls():
            if hook.plugin is plugin:
                found += isolated(f"{kind.hook} failed", partial(_records, hook))
        for record in found:
            if not isinstance(record, Component):
                raise Broken(f"{kind.hook} yields {record!r}, which is not a hexllm.Component")
        names = [record.name for record in found]
        for name in names:
            if names.count(name) > 1:
                raise Broken(f"{kind.hook} yields the name {name!r} twice")
        if found:
            offered[kind.key] = tuple(sorted(found, key=lambda each: each.name))
    return offered


def _records(hook: pluggy.HookImpl) -> list[Any]:
    result: Any = hook.function()
    if result is None:
        raise PluginError("it returns None; yield Component records, or return a list of them")
    return list(result)


def _import(candidate: Candidate) -> ModuleType:
    if candidate.origin != "file":
        return importlib.import_module(candidate.entry_point)
    path = Path(candidate.entry_point).expanduser().resolve()
    # The hash of place and content: two files of the same stem must not replace each other, and
    # an identifier, so that a component can be named f"{__name__}:Policy".
    digest = hashlib.sha256(f"{path}:{candidate.version}".encode()).hexdigest()[:12]
    stem = re.sub(r"\W", "_", path.stem)
    name = f"hexllm_file_{stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # In sys.modules before it runs, so that `implementation="…"` can name it by __name__, and
    # dataclasses and pydantic find their own module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_api(module: ModuleType) -> None:
    api = getattr(module, "HEXLLM_PLUGIN_API", None)
    if api is None:
        raise Broken(f"it does not say HEXLLM_PLUGIN_API = {PLUGIN_API} at its top")
    if not isinstance(api, int) or isinstance(api, bool) or api < 1:
        raise Broken(f"HEXLLM_PLUGIN_API = {api!r} is not a whole number from 1 up")
    if api > PLUGIN_API:
        raise Broken(
            f"it needs plugin API {api} and this hexllm speaks {PLUGIN_API}; update hexllm"
        )


def _check_hooks(module: ModuleType, name: str) -> None:
    """Find what pluggy lets pass, then let pluggy judge the rest in a manager of its own.

    A failed ``register`` leaves a plugin half registered, so it must not happen in the real one.
    """
    probe = new_manager()
    known = {each for each in dir(hookspecs) if probe.parse_hookspec_opts(hookspecs, each)}
    marked = 0
    for attribute, value in vars(module).items():
        if not inspect.isfunction(value):
            continue
        options = probe.parse_hookimpl_opts(module, attribute)
        if options is None:
            own = value.__module__ == module.__name__
            if own and attribute.startswith("hexllm_"):
                if attribute in known:
                    raise Broken(f"{attribute} is not marked with @hookimpl")
                raise Broken(f"there is no hook {attribute!r}.{suggestion(attribute, known)}")
            continue
        marked += 1
        hook = options.get("specname") or attribute
        if hook not in known and not options.get("optionalhook"):
            raise Broken(f"there is no hook {hook!r}.{suggestion(hook, known)}")
        if options.get("wrapper") or options.get("hookwrapper"):
            raise Broken(f"{attribute} is a hook wrapper; hexllm calls each implementation alone")
        if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
            raise Broken(f"{attribute} is async; hooks are called as plain functions")
        _check_arguments(attribute, value, getattr(hookspecs, hook, None))
    if not marked:
        raise Broken("it implements no hook; mark its functions with @hexllm.hookimpl")
    isolated("pluggy refuses it", lambda: probe.register(module, name))


def _check_arguments(name: str, function: Any, spec: Any) -> None:
    if spec is None:
        return
    allowed = list(inspect.signature(spec).parameters)
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            raise Broken(f"{name} takes {argument}; name the arguments it uses")
        if argument.name not in allowed and argument.default is argument.empty:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no arguments"
            raise Broken(
                f"{name} has no argument {argument.name!r}; the hook {takes}."
                f"{suggestion(argument.name, allowed)}"
            )
