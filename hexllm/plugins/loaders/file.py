"""The loader ``file``: a local Hugging Face directory, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.directory import DirectoryCheckpoint

if TYPE_CHECKING:
    from hexllm.core.checkpoint import Checkpoint


def local_path(uri: str) -> Path:
    """Return the path that ``uri`` (a path, or ``file://`` and one) names.

    Raises:
        CheckpointError: The ``file://`` URI names another host.
    """
    if not uri.lower().startswith("file://"):
        return Path(uri).expanduser()
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise CheckpointError(
            f"{uri} names the host {parts.netloc!r}. Write file:///absolute/path (three slashes)."
        )
    return Path(unquote(parts.path)).expanduser()


def open_path(path: Path, uri: str) -> Checkpoint:
    """Open the directory or GGUF file ``path`` as a checkpoint that calls itself ``uri``.

    Raises:
        CheckpointError: It is neither, or a directory with several GGUF files.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path, uri)
        raise CheckpointError(
            f"{path} is a file, not a checkpoint. Give a Hugging Face directory (config.json, "
            f"*.safetensors) or a .gguf file."
        )
    if not path.is_dir():
        raise CheckpointError(
            f"No checkpoint at {path}: there is no such file or directory. Give a Hugging Face "
            f"directory, a .gguf file, or a model of the hub as hf://org/name."
        )
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs and not any(name.endswith(".safetensors") for name in names):
        if len(ggufs) > 1:
            raise CheckpointError(
                f"{path} holds {len(ggufs)} GGUF files ({', '.join(ggufs[:4])}). "
                f"Name the one to serve: {path / ggufs[0]}"
            )
        return _open_gguf(path / ggufs[0], uri)
    if "config.json" not in names and "adapter_config.json" not in names:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has neither config.json nor a .gguf file "
            f"(it has {', '.join(names[:5]) or 'no files'})."
        )
    return DirectoryCheckpoint(path, uri)


def _open_gguf(path: Path, uri: str) -> Checkpoint:
    # The gguf package is only needed, and only paid for, when there is such a file.
    from hexllm.plugins.loaders.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path, uri)


class FileLoader:
    """Opens checkpoints on a local file system."""

    def open(self, uri: str, revision: str | None = None) -> Checkpoint:
        """Open a local directory or GGUF file, given by path or ``file://`` URI.

        Raises:
            CheckpointError: Nothing usable is there, or a revision is asked of it.
        """
        if revision is not None:
            raise CheckpointError(
                f"revision={revision!r} means nothing for the local path {uri}. Leave it out."
            )
        return open_path(local_path(uri), uri)
