"""Distributions that exist only as a ``dist-info`` folder and a module on ``sys.path``."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from hexllm.core.plugins import Plugins, load_plugins
from hexllm.core.settings import PluginSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_HEADER = "from hexllm import Component, hookimpl\nHEXLLM_PLUGIN_API = 1\n"

_POLICY = _HEADER + textwrap.dedent(
    """
    @hookimpl
    def hexllm_scheduling_policies():
        yield Component(name="even", implementation="{module}_impl:Even", summary="an even one")
    """
)

_EVEN = textwrap.dedent(
    """
    class Even:
        def admission_order(self, waiting, now):
            return list(waiting)
        def next_phase(self, queues):
            return "prefill"
        def preemption_victim(self, running):
            return running[-1]
        def on_finished(self, request):
            pass
    """
)


class Site:
    """A folder on ``sys.path`` that packages are written into.

    In sources ``{header}`` stands for the imports and the API number of a plugin, ``{module}``
    for the module's name.

    Attributes:
        POLICY: An entry module that offers the policy ``even``, implemented in ``{module}_impl``.
        EVEN: The module that implements it.
    """

    POLICY = _POLICY
    EVEN = _EVEN

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, source: str) -> None:
        """Write a module; dots in its name make packages."""
        path = self.folder.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        source = textwrap.dedent(source).replace("{header}", _HEADER).replace("{module}", name)
        path.with_suffix(".py").write_text(source, encoding="utf-8")

    def distribution(
        self,
        name: str,
        source: str | None = None,
        *,
        version: str = "1.0",
        entry_point: str = "",
        module: str = "",
    ) -> None:
        """Write a distribution whose entry module holds ``source`` (none when None).

        Args:
            name: Of the distribution.
            source: Of the entry module.
            version: Of the distribution.
            entry_point: The entry point's name; the distribution's when empty.
            module: The entry module; the distribution's name with underscores when empty.
        """
        module = module or name.replace("-", "_")
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[hexllm]\n{entry_point or name} = {module}\n")
        if source is not None:
            self.module(module, source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty folder at the head of ``sys.path``; what was imported from it is forgotten after."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def load() -> Callable[..., Plugins]:
    """``load(disable=…, …)`` loads the plugins under these settings."""
    return lambda **settings: load_plugins(PluginSettings(**settings))
