"""A GGUF file as a checkpoint in Hugging Face's names, layout and small files."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

import hexllm
from hexllm.core.checkpoint import TensorInfo
from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.cache import cache_directory, publishing
from hexllm.plugins.loaders.gguf_config import build_config, build_generation_config
from hexllm.plugins.loaders.gguf_file import GgufFile
from hexllm.plugins.loaders.gguf_names import find_architecture, translate_names
from hexllm.plugins.loaders.gguf_tensors import dtype_of, read_rows
from hexllm.plugins.loaders.gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: Changes with what is written for a file, so that an older hexllm's result is not reused.
_LAYOUT = 1


def heads_apart(rows: int, num_heads: int) -> np.ndarray[Any, Any]:
    """Return where each row of Hugging Face's order is stored, for rotary pairs side by side.

    GGUF keeps the two rows that rotate together as neighbours; Hugging Face has all first
    members of a head, then all second ones.
    """
    return np.arange(rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


class GgufCheckpoint:
    """A GGUF file, opened by its header; tensors are dequantized as they are read.

    Args:
        path: The file.
        uri: What the user wrote, for messages.

    Raises:
        CheckpointError: The file is not a GGUF file, or one of an unknown architecture.
    """

    def __init__(self, path: Path, uri: str) -> None:
        self.uri = uri
        self._file = GgufFile(path)
        find_architecture(self._file)
        self._names: dict[str, tuple[str, int]] | None = None
        self._directory: Path | None = None

    def directory(self) -> Path:
        """Return a cache directory with config and tokenizer files made from the metadata.

        Raises:
            CheckpointError: The metadata cannot be translated; the message names the key.
        """
        if self._directory is None:
            self._directory = self._synthesize()
        return self._directory

    def file(self, name: str) -> Path | None:
        """Return the path of one of the files made from the metadata, None when there is none."""
        path = self.directory() / name
        return path if path.is_file() else None

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor's header by its Hugging Face name.

        Raises:
            CheckpointError: A tensor has no Hugging Face name.
        """
        headers = {}
        for name, (stored, _) in self._tensors().items():
            tensor = self._file.tensors[stored]
            dtype = dtype_of(tensor)
            size = math.prod(tensor.shape) * dtype.itemsize
            headers[name] = TensorInfo(tensor.shape, dtype.name, str(self._file.path), size)
        return headers

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """Return the slice ``index`` of a tensor, or all of it: float32 when it is quantized.

        Only the rows and blocks that the slice needs are dequantized.

        Raises:
            CheckpointError: There is no such tensor, or its file changed.
        """
        if name not in self._tensors():
            raise CheckpointError(f"Checkpoint {self.uri} has no tensor {name!r}.")
        stored, heads = self._tensors()[name]
        tensor = self._file.tensors[stored]
        index = index or ()
        if len(index) > len(tensor.shape):
            raise IndexError(f"{name} has {len(tensor.shape)} dimensions, the index {len(index)}")
        rows, columns = (*index, slice(None), slice(None))[:2]
        if heads:
            order = heads_apart(tensor.shape[0], heads)[rows]
            return read_rows(self._file.path, tensor, order, columns)
        return read_rows(self._file.path, tensor, rows, columns)

    def _tensors(self) -> dict[str, tuple[str, int]]:
        if self._names is None:
            self._names = translate_names(self._file)
        return self._names

    def _synthesize(self) -> Path:
        path = self._file.path.resolve()
        status = path.stat()
        key = (hexllm.__version__, _LAYOUT, str(path), status.st_size, status.st_mtime_ns)
        digest = hashlib.sha256(repr(key).encode("utf-8", "surrogateescape")).hexdigest()[:24]
        target = cache_directory("gguf") / digest
        if target.is_dir():
            return target
        config, generation = build_config(self._file), build_generation_config(self._file)
        with publishing(target) as draft:
            for name, content in (
                ("config.json", config),
                ("generation_config.json", generation),
            ):
                (draft / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            write_tokenizer(self._file, draft, config)
        return target
