"""Dequantizes rows and columns of a GGUF tensor without reading the rest of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from hexllm.plugins.loaders.gguf_file import GgufTensor

#: Stored as they are: they need no dequantization.
_PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}

#: Elements dequantized at a time: bounds what the gguf package holds beside the result.
_CHUNK = 1 << 20


def dtype_of(tensor: GgufTensor) -> np.dtype[Any]:
    """Return the type that the tensor is read as: its own, or float32 when it is quantized."""
    dtype: np.dtype[Any] = _PLAIN.get(tensor.kind, np.dtype(np.float32))
    return dtype


def read_rows(
    path: Path,
    tensor: GgufTensor,
    rows: slice | np.ndarray[Any, Any],
    columns: slice = slice(None),
) -> np.ndarray[Any, Any]:
    """Return rows and columns of a tensor of one or two dimensions, dequantized.

    Args:
        path: The GGUF file.
        tensor: Its header. Of one with a single dimension, ``rows`` choose the elements.
        rows: A slice, or an array with the rows in the order wanted.
        columns: Which columns; only the blocks that hold them are dequantized.

    Raises:
        CheckpointError: The file no longer holds what its header said.
    """
    try:
        if path.stat().st_size < tensor.start + tensor.nbytes:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} ends beyond the end of the file. "
                f"It was changed while it was open."
            )
        stored = np.memmap(path, dtype=np.uint8, mode="r", offset=tensor.start, shape=tensor.nbytes)
    except OSError as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} cannot be read: {error.strerror or error}."
        ) from error
    raw = np.asarray(stored).reshape(-1, tensor.row_nbytes)
    if len(tensor.shape) == 1:
        whole = _dequantize(raw, slice(None), tensor, slice(None))
        return np.array(whole[0][rows])
    return _dequantize(raw, rows, tensor, columns)


def _dequantize(
    raw: np.ndarray[Any, Any],
    rows: slice | np.ndarray[Any, Any],
    tensor: GgufTensor,
    columns: slice,
) -> np.ndarray[Any, Any]:
    dtype = dtype_of(tensor)
    if tensor.kind in _PLAIN:
        return np.array(raw.view(dtype)[rows, columns])
    order = np.arange(raw.shape[0])[rows]
    wanted = range(*columns.indices(tensor.shape[-1]))
    out = np.empty((len(order), len(wanted)), dtype)
    if out.size == 0:
        return out
    block, block_nbytes = GGML_QUANT_SIZES[tensor.kind]
    first, last = min(wanted) // block, max(wanted) // block + 1
    inside = [column - first * block for column in (wanted[0], wanted[-1])]
    step = wanted.step
    end = inside[1] + (1 if step > 0 else -1)
    cut = slice(inside[0], end if end >= 0 else None, step)
    chunk = max(1, _CHUNK // ((last - first) * block))
    for start in range(0, len(order), chunk):
        blocks = raw[order[start : start + chunk], first * block_nbytes : last * block_nbytes]
        # Whatever bits a block holds are its value, as in a file of plain floats.
        with np.errstate(all="ignore"):
            values = dequantize(np.ascontiguousarray(blocks), tensor.kind)
        out[start : start + chunk] = values[:, cut]
    return out
