"""Parses a GGUF file's header: metadata and where each tensor lies, every length checked.

The gguf package's reader believes the lengths it finds and builds one numpy array per token (two
seconds for a vocabulary of 49,152); this one is bounds-checked and takes a tenth of that. The
package is used for what is hard: the quantization formats.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

#: The types that are read; the rest are named and refused.
READABLE_TYPES = frozenset(
    {
        GGMLQuantizationType.F64,
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q2_K,
        GGMLQuantizationType.Q3_K,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
        GGMLQuantizationType.IQ4_NL,
        GGMLQuantizationType.IQ4_XS,
    }
)

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file, not yet dequantized.

    Attributes:
        name: Its name in the file.
        kind: How its elements are stored.
        shape: Its dimensions, rows first (the file has them the other way round).
        start: Offset of its first byte in the file.
        row_nbytes: Size of one row (the last dimension) in bytes.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    row_nbytes: int

    @property
    def nbytes(self) -> int:
        """Its size in the file, in bytes."""
        return math.prod(self.shape[:-1]) * self.row_nbytes


class GgufFile:
    """A GGUF file's metadata and tensor headers.

    Args:
        path: The file.

    Attributes:
        path: The file.
        metadata: Every key with its value as plain Python data. A float32 is the shortest decimal
            that rounds to it, so that 1e-05 is not 9.999999747378752e-06.
        tensors: Every tensor by its name in the file.

    Raises:
        CheckpointError: The file is absent, truncated, or not a GGUF file that can be read; the
            message names the file, and the tensor or key at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    raise CheckpointError(
                        f"{path}: {size} bytes are too few for a GGUF file. Fetch it again."
                    )
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    self._parse(_Cursor(mapped, path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the whole number under ``key``.

        Raises:
            CheckpointError: The key is absent and has no default, or holds something else.
        """
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the finite number under ``key``.

        Raises:
            CheckpointError: The key is absent and has no default, or holds something else.
        """
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._refuse(key, value, "a number")
        if not math.isfinite(value):
            self._refuse(key, value, "a finite number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return the text under ``key``.

        Raises:
            CheckpointError: The key is absent and has no default, or holds something else.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the truth value under ``key``.

        Raises:
            CheckpointError: The key holds something else.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """Return the list of ``kind`` under ``key``.

        Raises:
            CheckpointError: The key is absent, or holds something else.
        """
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            self._refuse(key, value, f"a list of {kind.__name__}")
        return value

    def _refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        shown = "is absent" if value is None else f"is {str(value)[:60]!r}"
        raise CheckpointError(f"{self.path}: metadata key {key!r} {shown}; {wanted} is needed.")

    def _parse(self, cursor: _Cursor) -> None:
        self._check_version(cursor)
        num_tensors, num_keys = cursor.scalar("<Q", "counts"), cursor.scalar("<Q", "counts")
        for number in range(num_keys):
            key = cursor.text(f"metadata key number {number + 1} of {num_keys}")
            kind = cursor.scalar("<I", f"metadata key {key!r}")
            if key in self.metadata:
                raise CheckpointError(f"{self.path}: metadata key {key!r} comes twice.")
            self.metadata[key] = cursor.value(kind, f"metadata key {key!r}")
        if self.integer("split.count", 1) > 1:
            raise CheckpointError(
                f"{self.path} is one of {self.metadata['split.count']} parts of a split GGUF. "
                f"Merge them first: llama-gguf-split --merge {self.path.name} merged.gguf"
            )
        headers = [
            self._parse_tensor(cursor, f"tensor number {number + 1} of {num_tensors}")
            for number in range(num_tensors)
        ]
        alignment = self.integer("general.alignment", 32)
        if alignment <= 0 or alignment & (alignment - 1):
            self._refuse("general.alignment", alignment, "a power of two")
        data_start = -(-cursor.offset // alignment) * alignment
        for name, code, shape, offset in headers:
            tensor = self._located(name, code, shape, data_start + offset)
            if name in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} comes twice.")
            if offset % alignment or tensor.start + tensor.nbytes > cursor.size:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} lies at bytes {tensor.start} to "
                    f"{tensor.start + tensor.nbytes} by its header, but the file has "
                    f"{cursor.size} bytes (alignment {alignment}). "
                    f"It is truncated or damaged; fetch it again."
                )
            self.tensors[name] = tensor

    def _check_version(self, cursor: _Cursor) -> None:
        magic = cursor.take(4, "magic")
        if magic != b"GGUF":
            raise CheckpointError(
                f"{self.path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'."
            )
        version = cursor.scalar("<I", "version")
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self.path} is a big-endian GGUF file. Convert it to little-endian first."
            )
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path}: GGUF version {version} is not supported (2 and 3 are). "
                f"Convert the model again with a current llama.cpp."
            )

    def _parse_tensor(self, cursor: _Cursor, where: str) -> tuple[str, int, tuple[int, ...], int]:
        name = cursor.text(where)
        where = f"tensor {name!r}"
        dimensions = cursor.scalar("<I", where)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{self.path}: {where} has {dimensions} dimensions, not 1 to 4.")
        shape = tuple(cursor.scalar("<Q", where) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise CheckpointError(f"{self.path}: {where} has the shape {shape}, which is empty.")
        return name, cursor.scalar("<I", where), shape, cursor.scalar("<Q", where)

    def _located(self, name: str, code: int, shape: tuple[int, ...], start: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            kind = None
        if kind not in READABLE_TYPES:
            readable = ", ".join(sorted(known.name for known in READABLE_TYPES))
            shown = f"number {code}" if kind is None else kind.name
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is quantized as {shown}, which cannot be read. "
                f"Choose a file that uses only {readable}."
            )
        assert kind is not None
        block, block_nbytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1]} elements, which is no "
                f"multiple of {kind.name}'s block of {block}."
            )
        return GgufTensor(name, kind, shape, start, shape[-1] // block * block_nbytes)


class _Cursor:
    """Reads forward through the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.offset = 0
        self.path = path

    def take(self, length: int, where: str) -> bytes:
        end = self.offset + length
        if end > self.size:
            raise CheckpointError(
                f"{self.path}: the header ends in the middle of its {where} (it needs byte {end}, "
                f"the file has {self.size}). It is truncated or damaged; fetch it again."
            )
        taken = self.data[self.offset : end]
        self.offset = end
        return taken

    def scalar(self, form: str, where: str) -> int:
        value = struct.unpack(form, self.take(struct.calcsize(form), where))[0]
        assert isinstance(value, int)
        return value

    def text(self, where: str) -> str:
        raw = self.take(self.scalar("<Q", where), where)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {where} is not UTF-8 ({error}).") from error

    def value(self, code: int, where: str, nesting: int = 0) -> Any:
        try:
            kind = GGUFValueType(code)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {where} has the unknown type {code}.") from error
        if kind == GGUFValueType.STRING:
            return self.text(where)
        if kind != GGUFValueType.ARRAY:
            dtype = np.dtype(_SCALARS[kind])
            return _plain(np.frombuffer(self.take(dtype.itemsize, where), dtype))[0]
        if nesting == _MAX_NESTING:
            raise CheckpointError(f"{self.path}: {where} nests more than {nesting} arrays.")
        item, length = self.scalar("<I", where), self.scalar("<Q", where)
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[GGUFValueType(item)])
            return _plain(np.frombuffer(self.take(length * dtype.itemsize, where), dtype))
        return [self.value(item, where, nesting + 1) for _ in range(length)]


def _plain(values: np.ndarray[Any, Any]) -> list[Any]:
    if values.dtype == np.float32 and values.size == 1:
        return [float(str(values[0]))]
    if values.dtype == np.bool_:
        # Any byte but 0 is true; numpy would keep the byte.
        return [bool(value) for value in values.view(np.uint8)]
    plain: list[Any] = values.tolist()
    return plain
