"""The loader ``hf``: models of the Hugging Face hub, or of a mirror that ``HF_ENDPOINT`` names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.directory import (
    INDEX,
    DirectoryCheckpoint,
    choose_weight_files,
    missing_weights_message,
    read_index,
)
from hexllm.plugins.loaders.hub_errors import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from hexllm.core.checkpoint import Checkpoint, TensorInfo

#: What is fetched when a checkpoint is opened: configuration, tokenizer, templates, weight index.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
#: The same endings in folders are other exports of the model (onnx/, original/), never needed.
_ELSEWHERE = ("*/*.json", "*/*.model", "*/*.txt", "*/*.tiktoken")

_PART = re.compile(r"[A-Za-z0-9][\w.-]*")


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class HubModel:
    """One model of a hub at one revision, and how to fetch from it.

    The environment is read when a checkpoint is opened, not when huggingface_hub was imported.

    Attributes:
        repo: ``org/name``.
        revision: A branch, tag or commit; None for the default branch.
    """

    repo: str
    revision: str | None

    @property
    def endpoint(self) -> str:
        """The hub's address."""
        return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    @property
    def cache(self) -> Path:
        """Where the hub's library keeps its files, by its own environment variables."""
        if chosen := os.environ.get("HF_HUB_CACHE"):
            return Path(chosen).expanduser()
        if home := os.environ.get("HF_HOME"):
            return Path(home).expanduser() / "hub"
        general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(general).expanduser() / "huggingface" / "hub"

    @property
    def is_offline(self) -> bool:
        """Whether the user forbade the network."""
        return _is_true("HF_HUB_OFFLINE") or _is_true("TRANSFORMERS_OFFLINE")

    def fetch(self, patterns: tuple[str, ...], without: tuple[str, ...] = ()) -> Path:
        """Return the snapshot's directory once every file that matches ``patterns`` is in it.

        Raises:
            CheckpointError: They cannot be had; the message says why and what to do.
        """
        from huggingface_hub import snapshot_download

        return Path(
            self._asking(
                lambda: snapshot_download(
                    self.repo,
                    revision=self.revision,
                    endpoint=self.endpoint,
                    cache_dir=self.cache,
                    local_files_only=self.is_offline,
                    allow_patterns=list(patterns),
                    ignore_patterns=list(without),
                )
            )
        )

    def file_names(self) -> list[str]:
        """Return the names of all files of the model, as the hub lists them.

        Raises:
            CheckpointError: The hub cannot be asked.
        """
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint)
        names: list[str] = self._asking(
            lambda: list(api.list_repo_files(self.repo, revision=self.revision))
        )
        return names

    def _asking(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        # The library lets its HTTP client's exceptions through, and that client has changed
        # between its versions; whatever it is, the user needs a sentence, not a traceback.
        except Exception as error:
            raise CheckpointError(explain(error, self)) from error


def parse_uri(uri: str, revision: str | None) -> tuple[HubModel, str | None]:
    """Return the model that ``uri`` names, and the file in it when one is named.

    Args:
        uri: ``org/name``, ``hf://org/name``, ``hf://org/name@revision`` or
            ``hf://org/name/folder/file.gguf``.
        revision: The revision asked for beside the URI, or None.

    Raises:
        CheckpointError: It is not of this form, or names another revision than ``revision``.
    """
    parts = (uri.partition("://")[2] or uri).split("/")
    owner, rest = ([], parts) if len(parts) == 1 else (parts[:1], parts[1:])
    name, _, own_revision = rest[0].partition("@")
    file = "/".join(rest[1:]) or None
    if not all(_PART.fullmatch(part) for part in (*owner, name)) or (
        file is not None and (not file.endswith(".gguf") or ".." in rest)
    ):
        raise CheckpointError(
            f"{uri!r} names no model of the hub. Write org/name, hf://org/name@revision, or "
            f"hf://org/name/file.gguf for one GGUF file; a local directory must exist."
        )
    if own_revision and revision is not None and own_revision != revision:
        raise CheckpointError(
            f"{uri} names the revision {own_revision!r}, but revision={revision!r} is asked for. "
            f"Give one of them."
        )
    return HubModel("/".join((*owner, name)), own_revision or revision), file


class HubCheckpoint:
    """A model of the hub: small files are there once it is opened, weights when first needed.

    Args:
        model: The model, pinned to the snapshot's commit.
        uri: What the user wrote, for messages.
        snapshot: The directory of the fetched files.
    """

    def __init__(self, model: HubModel, uri: str, snapshot: Path) -> None:
        self.uri = uri
        self._model = model
        self._snapshot = snapshot
        self._weights: DirectoryCheckpoint | None = None

    def directory(self) -> Path:
        """Return the snapshot's directory."""
        return self._snapshot

    def file(self, name: str) -> Path | None:
        """Return the path of a small file, None when the model has none of that name."""
        path = self._snapshot / name
        return path if path.is_file() else None

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor's header, once the weights are fetched.

        Raises:
            CheckpointError: The weights cannot be fetched, or are damaged.
        """
        return self._fetched().tensors()

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """Return the slice ``index`` of a tensor, or all of it.

        Raises:
            CheckpointError: There is no such tensor, or its file changed.
        """
        return self._fetched().read(name, index)

    def _fetched(self) -> DirectoryCheckpoint:
        if self._weights is None:
            index = self._snapshot / INDEX
            if index.is_file():
                files = sorted(set(read_index(index).values()))
            else:
                names = _names_of(self._model, self._snapshot)
                files = choose_weight_files(names)
                if not files:
                    raise CheckpointError(missing_weights_message(self.uri, names))
            if not all((self._snapshot / file).is_file() for file in files):
                self._model.fetch(tuple(files))
            self._weights = DirectoryCheckpoint(self._snapshot, self.uri)
        return self._weights


def _names_of(model: HubModel, snapshot: Path) -> list[str]:
    """Return the model's file names: the hub's list, or what is cached when it cannot be asked."""
    here = sorted(
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()
    )
    if model.is_offline:
        return here
    try:
        return model.file_names()
    except CheckpointError:
        if any(name.endswith((".safetensors", ".gguf")) for name in here):
            return here
        raise


class HubLoader:
    """Opens models of the Hugging Face hub."""

    def open(self, uri: str, revision: str | None = None) -> Checkpoint:
        """Fetch a model's small files and return its checkpoint; weights are fetched later.

        A GGUF file (named in the URI, or the only thing the model has) is fetched whole, for its
        configuration and tokenizer are inside.

        Raises:
            CheckpointError: The model is absent, gated or private, the hub is out of reach, or
                the network is forbidden and the files are not in the cache.
        """
        model, file = parse_uri(uri, revision)
        if file is not None:
            return self._open_gguf(model, uri, file)
        snapshot = model.fetch(_SMALL_FILES, _ELSEWHERE)
        # By commit from here on: the branch may move before the weights are fetched.
        pinned = HubModel(model.repo, snapshot.name)
        if any((snapshot / name).is_file() for name in ("config.json", "adapter_config.json")):
            return HubCheckpoint(pinned, uri, snapshot)
        names = _names_of(pinned, snapshot)
        ggufs = [name for name in names if name.endswith(".gguf")]
        if len(ggufs) == 1:
            return self._open_gguf(pinned, uri, ggufs[0])
        if ggufs:
            raise CheckpointError(
                f"{uri} has {len(ggufs)} GGUF files and no config.json. Name the one to serve: "
                + ", ".join(f"hf://{model.repo}/{name}" for name in ggufs[:3])
            )
        raise CheckpointError(
            f"{uri} is not a checkpoint: it has neither config.json nor a .gguf file "
            f"(it has {', '.join(names[:5]) or 'no files'})."
        )

    def _open_gguf(self, model: HubModel, uri: str, file: str) -> Checkpoint:
        # The gguf package is only needed, and only paid for, when there is such a file.
        from hexllm.plugins.loaders.gguf_checkpoint import GgufCheckpoint

        path = model.fetch((file,)) / file
        if not path.is_file():
            raise CheckpointError(f"{model.repo} has no file {file!r}, which {uri} names.")
        return GgufCheckpoint(path, uri)
