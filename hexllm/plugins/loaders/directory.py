"""A Hugging Face directory as a checkpoint."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.safetensors_file import StoredTensor, read_header, read_slice

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

    from hexllm.core.checkpoint import TensorInfo

INDEX = "model.safetensors.index.json"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors")


def read_index(path: Path) -> dict[str, str]:
    """Return which shard holds each tensor, by ``model.safetensors.index.json``.

    Raises:
        CheckpointError: The file is not such an index, or a shard's name leaves its directory.
    """
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}). Fetch it again.") from error
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError(f"{path}: no 'weight_map' from tensor names to shard files.")
    for name, shard in shards.items():
        if "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: tensor {name!r} is said to be in {shard!r}, which is not the name of a "
                f"safetensors file beside the index."
            )
    return shards


def missing_weights_message(place: str, names: list[str]) -> str:
    """Return what to say of a checkpoint without safetensors that holds the files ``names``."""
    others = sorted(
        name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"))
    )
    message = f"Cannot find any *.safetensors files in {place}"
    if others:
        return (
            f"{message}, only {', '.join(others[:3])}{', …' if len(others) > 3 else ''}. Convert "
            f"it with transformers: AutoModelForCausalLM.from_pretrained(directory)"
            f".save_pretrained(new_directory)."
        )
    return f"{message}. Put the model's weights there, or start with --load_format=dummy."


def choose_weight_files(names: list[str]) -> list[str]:
    """Return which of ``names`` hold the weights when no index says it."""
    if "model.safetensors" in names:
        return ["model.safetensors"]
    found = [
        name
        for name in sorted(names)
        # Mistral's own format of the same weights, under other names.
        if name.endswith(".safetensors") and "/" not in name and not name.startswith("consolidated")
    ]
    if "config.json" in names:
        found = [name for name in found if not name.startswith("adapter_model")]
    return found


class DirectoryCheckpoint:
    """A local directory in Hugging Face's layout.

    Args:
        directory: Where its files lie.
        uri: What the user wrote, for messages.
    """

    def __init__(self, directory: Path, uri: str) -> None:
        self.uri = uri
        self._directory = directory
        self._stored: dict[str, StoredTensor] | None = None
        self._infos: dict[str, TensorInfo] | None = None

    def directory(self) -> Path:
        """Return the directory."""
        return self._directory

    def file(self, name: str) -> Path | None:
        """Return the path of ``name`` in the directory, None when it is not there."""
        path = self._directory / name
        return path if path.is_file() else None

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor's header, read once.

        Raises:
            CheckpointError: A weight file is missing, damaged, or not what the index says.
        """
        if self._infos is None:  # loading asks for each tensor's
            self._infos = {name: tensor.info for name, tensor in self._tensors().items()}
        return self._infos

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """Return the slice ``index`` of a tensor, or all of it.

        Raises:
            CheckpointError: There is no such tensor, or its file changed.
        """
        tensor = self._tensors().get(name)
        if tensor is None:
            raise CheckpointError(f"Checkpoint {self.uri} has no tensor {name!r}.")
        return read_slice(name, tensor, index)

    def _tensors(self) -> dict[str, StoredTensor]:
        if self._stored is None:
            self._stored = self._read_headers()
        return self._stored

    def _read_headers(self) -> dict[str, StoredTensor]:
        index_path = self._directory / INDEX
        names = sorted(path.name for path in self._directory.iterdir())
        promised: dict[str, str] = {}
        if "model.safetensors" not in names and index_path.is_file():
            promised = read_index(index_path)
            files = sorted(set(promised.values()))
            for name, shard in promised.items():
                if shard not in names:
                    raise CheckpointError(
                        f"{self._directory / shard} is missing: {INDEX} says that it holds tensor "
                        f"{name!r}. Fetch the checkpoint again."
                    )
        else:
            files = choose_weight_files(names)
            if not files:
                raise CheckpointError(missing_weights_message(str(self._directory), names))
            self._check_all_shards(files)
        stored: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in read_header(self._directory / file).items():
                if name in stored:
                    raise CheckpointError(
                        f"Tensor {name!r} is in two files, {stored[name].path} and {tensor.path}. "
                        f"Remove the one that does not belong to the checkpoint."
                    )
                stored[name] = tensor
        for name, shard in promised.items():
            if name not in stored or stored[name].path.name != shard:
                raise CheckpointError(
                    f"{self._directory / shard} has no tensor {name!r}, though {INDEX} says so. "
                    f"Fetch the checkpoint again."
                )
        return stored

    def _check_all_shards(self, files: list[str]) -> None:
        """Refuse a set of shards whose own names say that some are missing."""
        for match in filter(None, map(_SHARD.fullmatch, files)):
            parts = int(match["parts"])
            for part in range(1, parts + 1):
                shard = f"{match['stem']}-{part:05d}-of-{match['parts']}.safetensors"
                if shard not in files:
                    raise CheckpointError(
                        f"{self._directory / shard} is missing: {match[0]} is one of {parts} "
                        f"shards. Fetch the checkpoint again."
                    )
