"""Which plugins a process runs with, so that two processes can tell whether they agree."""

from __future__ import annotations

from collections.abc import Sequence

from hexllm.core.errors import PluginError
from hexllm.core.wording import listing

#: Distribution, version and entry point of each plugin that works, sorted.
Manifest = Sequence[tuple[str, str, str]]


def compare_manifests(server: Manifest, engine: Manifest) -> None:
    """Check that the engine process works with the same plugins as the server process.

    Raises:
        PluginError: They differ; the message names each plugin that does.
    """
    theirs = {(name, entry): version for name, version, entry in engine}
    ours = {(name, entry): version for name, version, entry in server}
    differences = []
    for name, entry in sorted(ours.keys() | theirs.keys()):
        plugin = f"{name} ({entry})"
        expected, found = ours.get((name, entry)), theirs.get((name, entry))
        if found is None:
            differences.append(f"{plugin} {expected} works in the server process only")
        elif expected is None:
            differences.append(f"{plugin} {found} works in the engine process only")
        elif expected != found:
            differences.append(f"{plugin} is {expected} in the server and {found} in the engine")
    if differences:
        raise PluginError(
            f"The engine process has other plugins than the server process: "
            f"{listing(differences)}. Install the same packages for every process and host; "
            f"`hexllm plugins --check` shows what each one loads."
        )
