"""A checkpoint over plain safetensors files, so that tests need no loader plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from hexllm.core.checkpoint import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I8": np.dtype(np.int8),
}


class FilesCheckpoint:
    """Reads tensors with plain file reads (no mmap, so that memory can be measured).

    Attributes:
        uri: The directory.
        reads: Every (name, index) that was read.
    """

    def __init__(self, directory: Path) -> None:
        self.uri = str(directory)
        self._directory = Path(directory)
        self._where: dict[str, tuple[Path, int]] = {}
        self._infos: dict[str, TensorInfo] = {}
        for path in sorted(self._directory.glob("*.safetensors")):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, stop = entry["data_offsets"]
                dtype = DTYPES[entry["dtype"]]
                self._where[name] = (path, 8 + size + start)
                self._infos[name] = TensorInfo(
                    tuple(entry["shape"]), dtype.name, path.name, stop - start
                )
        self.reads: list[tuple[str, tuple[slice, ...] | None]] = []

    def directory(self) -> Path:
        """Return where the files are."""
        return self._directory

    def file(self, name: str) -> Path | None:
        """Return a file's path, None when it is not there."""
        path = self._directory / name
        return path if path.exists() else None

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the headers of all files."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return a tensor, or a slice of it."""
        self.reads.append((name, index))
        path, offset = self._where[name]
        info = self._infos[name]
        dtype = np.dtype(info.dtype)
        count = info.nbytes // dtype.itemsize
        array = np.fromfile(path, dtype, count=count, offset=offset).reshape(info.shape)
        return array if index is None else array[index]


def write_checkpoint(directory: Path, tensors: Mapping[str, np.ndarray]) -> FilesCheckpoint:
    """Write one safetensors file and open it."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "model.safetensors"
    )
    return FilesCheckpoint(directory)
