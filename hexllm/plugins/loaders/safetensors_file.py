"""Reads one safetensors file: its header checked against the file, then only the slices asked for.

The format's own library stops at its first complaint without naming a tensor, and maps the whole
file; here every complaint names the file and the tensor, and a read touches only its bytes.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from hexllm.core.checkpoint import TensorInfo
from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}

#: The format's own bound on the header, which keeps a garbage length from being believed.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes lie.

    Attributes:
        path: The file.
        dtype: numpy's type of its elements.
        shape: Its dimensions.
        start: Offset of its first byte in the file.
    """

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def info(self) -> TensorInfo:
        """The header as a checkpoint gives it."""
        return TensorInfo(self.shape, self.dtype.name, str(self.path), self.nbytes)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(
                f"{path}: the safetensors header names {twice!r} twice. Fetch the file again."
            )
        return keys

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the safetensors header is not JSON ({error}). "
            f"Fetch the file again: it is damaged or is no safetensors file."
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object.")
    return header


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> tuple[StoredTensor, int]:
    """Return one checked entry of the header and the offset where its bytes end."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: its header lacks dtype, shape or data_offsets.")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: dtype {code!r} is not one of {', '.join(_DTYPES)}.")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes.")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_size(offset) for offset in offsets)
    ):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} is not a pair of offsets.")
    begin, end = offsets
    tensor = StoredTensor(path, dtype, tuple(shape), data_start + begin)
    if end - begin != tensor.nbytes:
        raise CheckpointError(
            f"{where}: shape {shape} of {code} takes {tensor.nbytes} bytes, "
            f"but data_offsets {offsets} hold {end - begin}."
        )
    return tensor, data_start + end


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the safetensors file ``path`` by name, reading only its header.

    Raises:
        CheckpointError: The file is absent, is not safetensors, or its size is not what the
            header says; the message names the file, and the tensor where one is at fault.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: its first 8 bytes promise a header of {length} bytes, but the file "
                    f"has {size}. It is truncated or is no safetensors file; fetch it again."
                )
            header = _parse_header(path, file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: __metadata__ of the safetensors header is not an object.")
    parsed = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    position = 8 + length
    # In the file's order, which is the order that readers should take them in.
    in_order = sorted(parsed.items(), key=lambda item: (item[1][0].start, item[1][1]))
    for name, (tensor, end) in in_order:
        if tensor.start != position:
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {tensor.start}, not at {position} where "
                f"the tensor before it ends. The header is damaged; fetch the file again."
            )
        if end > size:
            raise CheckpointError(
                f"{path}: tensor {name!r} ends at byte {end}, but the file has only {size} bytes. "
                f"It is truncated; fetch it again."
            )
        position = end
    if position != size:
        raise CheckpointError(
            f"{path}: the header describes {position} bytes, but the file has {size}. "
            f"Fetch the file again."
        )
    return {name: tensor for name, (tensor, _) in in_order}


def read_slice(
    name: str, tensor: StoredTensor, index: tuple[slice, ...] | None = None
) -> np.ndarray[Any, Any]:
    """Return the slice ``index`` of ``tensor`` (all of it when None) as an array of its own.

    Raises:
        CheckpointError: The file no longer holds what its header said.
    """
    try:
        size = tensor.path.stat().st_size
        if size < tensor.start + tensor.nbytes:
            raise CheckpointError(
                f"{tensor.path}: tensor {name!r} ends at byte {tensor.start + tensor.nbytes}, but "
                f"the file now has {size} bytes. It was changed while it was open."
            )
        return _read(tensor, index)
    except OSError as error:
        raise CheckpointError(
            f"{tensor.path}: tensor {name!r} cannot be read: {error.strerror or error}."
        ) from error


def _are_whole(index: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    sizes = zip(index, shape, strict=False)
    return all(part.indices(size) == (0, size, 1) for part, size in sizes)


def _read(tensor: StoredTensor, index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
    start, shape = tensor.start, tensor.shape
    if index and shape:
        rows, rest = index[0], index[1:]
        first, stop, step = rows.indices(shape[0])
        if step == 1 and len(index) <= len(shape) and _are_whole(rest, shape[1:]):
            # Whole rows lie together, so that this is a smaller tensor further on.
            start += first * math.prod(shape[1:]) * tensor.dtype.itemsize
            shape, index = (max(stop - first, 0), *shape[1:]), None
    if index is not None:
        if math.prod(shape) == 0:
            return np.empty(shape, tensor.dtype)[index]
        mapped = np.memmap(tensor.path, dtype=np.uint8, mode="r", offset=start, shape=tensor.nbytes)
        return np.array(mapped.view(tensor.dtype).reshape(shape)[index])
    count = math.prod(shape)
    data = np.fromfile(
        tensor.path, dtype=np.uint8, count=count * tensor.dtype.itemsize, offset=start
    )
    if data.size != count * tensor.dtype.itemsize:
        raise OSError("the file ends early")
    return data.view(tensor.dtype).reshape(shape)
