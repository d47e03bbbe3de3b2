"""Which plugins there are, before any of them is imported.

``importlib.metadata`` is walked here because pluggy's own loader stops at the first plugin that
fails, and one broken package must not hide the others.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hexllm.core.hookspecs import ENTRY_POINT_GROUP
from hexllm.core.wording import described

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: The built-ins' entry modules: all that the core knows of them.
BUILT_INS = (
    "hexllm.plugins.loaders",
    "hexllm.plugins.models",
    "hexllm.plugins.quant",
    "hexllm.plugins.schedulers",
)

Origin = Literal["built-in", "entry point", "load", "file"]


def canonical(distribution: str) -> str:
    """Return a distribution's name as indexes compare it (``Hex_LLM.x`` → ``hex-llm-x``)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plugin that was found and not yet imported.

    Attributes:
        name: The entry point's name; the dotted name of a built-in or a loaded module; a file's
            path as the user wrote it.
        distribution: Who ships it: a distribution's name, or a file's name.
        version: The distribution's version, or the start of a file's SHA-256, so that two
            processes can tell whether they run the same code.
        entry_point: The module to import, or the file's path.
        origin: Where it was found.
        problem: Why it cannot be imported at all, or nothing.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    origin: Origin
    problem: str = ""

    def answers_to(self, name: str) -> bool:
        """Whether ``name`` means this plugin: its name, its distribution, or both joined by @."""
        plugin, _, distribution = name.rpartition("@")
        if plugin:
            return plugin == self.name and canonical(distribution) == canonical(self.distribution)
        return name == self.name or canonical(name) == canonical(self.distribution)


def find_candidates(
    version: str, load: Iterable[str] = (), files: Iterable[str] = ()
) -> list[Candidate]:
    """Return every plugin of this process, built-ins first, then sorted by name.

    Args:
        version: hexllm's own, which is the built-ins'.
        load: Modules to load as plugins beside the installed ones.
        files: Paths of single-file plugins, relative to the working directory.
    """
    found = [Candidate(name, "hexllm", version, name, "built-in") for name in BUILT_INS]
    found += sorted(_installed(), key=lambda each: (each.name, canonical(each.distribution)))
    found += [_loaded(module) for module in sorted(set(load))]
    found += [_file(path) for path in sorted(set(files))]
    return list(_without_repeats(found))


def _installed() -> Iterator[Candidate]:
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            name = distribution.metadata["Name"]
            text = distribution.read_text("entry_points.txt") or ""
        except Exception:  # someone else's damaged package is no business of ours
            continue
        # The first on sys.path is the one Python imports; stale copies behind it do not count.
        if not name or canonical(name) in seen:
            continue
        seen.add(canonical(name))
        if f"[{ENTRY_POINT_GROUP}]" in text:
            yield from _entry_points(name, distribution)


def _entry_points(name: str, distribution: importlib.metadata.Distribution) -> Iterator[Candidate]:
    try:
        version = distribution.version
        points = [each for each in distribution.entry_points if each.group == ENTRY_POINT_GROUP]
    except Exception as error:  # shown as this plugin's row
        problem = f"its entry_points.txt or metadata cannot be read: {described(error)}"
        yield Candidate(name, name, "unknown", "", "entry point", problem)
        return
    for point in points:
        problem = ""
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", point.value):
            problem = (
                f"its entry point {point.name} = {point.value!r} must be a module's dotted name"
            )
        yield Candidate(point.name, name, version, point.value, "entry point", problem)


def _loaded(module: str) -> Candidate:
    top_level = module.partition(".")[0]
    try:
        distribution = importlib.metadata.distribution(top_level)
        name, version = distribution.metadata["Name"] or top_level, distribution.version
    except Exception:  # a module need not belong to a distribution
        name, version = top_level or module, "unknown"
    return Candidate(module, name, version, module, "load")


def _file(path: str) -> Candidate:
    file = Path(path).expanduser()
    try:
        version = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        problem = f"{file.absolute()} cannot be read: {error.strerror or described(error)}"
        return Candidate(path, file.name, "unknown", path, "file", problem)
    return Candidate(path, file.name, version, path, "file")


def _without_repeats(found: list[Candidate]) -> Iterator[Candidate]:
    """Yield each module once; an installed plugin named in ``load`` too is still one plugin."""
    first: dict[str, Candidate] = {}
    for each in found:
        key = str(Path(each.entry_point).resolve()) if each.origin == "file" else each.entry_point
        other = first.setdefault(key, each) if key else each
        if other is each:
            yield each
        elif each.origin == "entry point":
            problem = (
                f"module {each.entry_point!r} is already the plugin {other.name!r} of "
                f"{other.distribution}; remove one of the two entry points"
            )
            yield Candidate(
                each.name, each.distribution, each.version, each.entry_point, each.origin, problem
            )
