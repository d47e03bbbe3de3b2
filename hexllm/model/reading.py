"""Reads slices of parameters from a checkpoint into memory that a device can take as it is."""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

import numpy as np

from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hexllm.core.checkpoint import Checkpoint, TensorInfo
    from hexllm.model.rules import Piece
    from hexllm.model.widening import Widening

#: Bytes read at a time: few enough to be in the processor's cache still when they are copied or
#: cast, and for the allocator to use the same memory again.
READ_BYTES = 2 << 20

#: Bytes. XLA takes host memory so aligned as a buffer without another copy. A cache line, too.
ALIGNMENT = 64

#: Arrays of at least so many bytes have a mapping of their own.
MAPPED_BYTES = 1 << 20

#: The first and the last but one of a slice of each dimension.
Bounds = tuple[tuple[int, int], ...]


class PieceReader:
    """Reads what the weight rules ask of a checkpoint.

    Attributes:
        tensors: The checkpoint's headers, asked for once: a checkpoint may make them up each time.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensors: Mapping[str, TensorInfo] = checkpoint.tensors()
        self._checkpoint = checkpoint

    def read_block(
        self,
        pieces: Sequence[Piece],
        bounds: Bounds,
        dtype: np.dtype,
        widening: Widening | None = None,
    ) -> np.ndarray:
        """Return the slice ``bounds`` of a parameter, in memory that nobody else has.

        What ``read`` gives may be a view of a file or of a buffer that the loader uses again, and
        a device in host memory aliases whatever is aligned (``may_alias=False`` does not stop it,
        JAX 0.10 and 0.12). So the values go into an aligned array of our own: one copy, which also
        casts, and which on a CPU becomes the parameter itself.

        Args:
            pieces: Where the parameter is: one piece, or one for each place of a stacked one.
            bounds: Of each of the parameter's dimensions.
            dtype: What to cast to.
            widening: How a parameter of one piece is larger than it; None where it is not.

        Raises:
            CheckpointError: The checkpoint cannot be read.
        """
        block = _aligned_empty(tuple(stop - start for start, stop in bounds), dtype)
        if widening is not None:
            (first, last), *inner = bounds
            block.fill(0)
            for row, source, count in widening.parts(first, last):
                part = block[row - first : row - first + count]
                self._fill(part, pieces[0], ((source, source + count), *inner))
            return block
        if pieces[0].position is None:
            self._fill(block, pieces[0], bounds)
            return block
        (first, last), *inner = bounds
        for i, piece in enumerate(pieces[first:last]):
            self._fill(block[i, ...], piece, tuple(inner))
        return block

    def read_piece(self, piece: Piece, bounds: Bounds) -> np.ndarray:
        """Return the slice ``bounds`` of a piece, as the checkpoint stores it.

        Raises:
            CheckpointError: The checkpoint cannot be read, or not as its header says.
        """
        info = self.tensors[piece.tensor]
        index = piece.read_index(bounds)
        is_whole = all(
            (s.start, s.stop) == (0, size) for s, size in zip(index, info.shape, strict=True)
        )
        values = np.asarray(self._checkpoint.read(piece.tensor, None if is_whole else index))
        if piece.is_transposed and values.ndim > 1:
            values = values.swapaxes(-1, -2)
        expected = tuple(stop - start for start, stop in bounds)
        if values.shape != expected:
            raise CheckpointError(
                f"Checkpoint {self._checkpoint.uri}: reading {piece.tensor} from {info.file} gave "
                f"shape {list(values.shape)} where its header says {list(expected)}. The file is "
                f"damaged, or its loader is at fault."
            )
        return values

    def _fill(self, block: np.ndarray, piece: Piece, bounds: Bounds) -> None:
        """Read into ``block``, as many rows at a time as are READ_BYTES."""
        copy = _copy_transposed if piece.is_transposed and block.ndim > 1 else _copy
        nbytes = block.size * np.dtype(self.tensors[piece.tensor].dtype).itemsize
        # A transposed matrix's rows are columns of the file, which would be read in tatters.
        if nbytes <= READ_BYTES or (piece.is_transposed and block.ndim == 2):
            copy(block, self.read_piece(piece, bounds))
            return
        (first, last), *inner = bounds
        rows = max(1, READ_BYTES * (last - first) // nbytes)
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            part = self.read_piece(piece, ((start, stop), *inner))
            copy(block[start - first : stop - first], part)


def _copy(block: np.ndarray, values: np.ndarray) -> None:
    np.copyto(block, values, casting="unsafe")


def _copy_transposed(block: np.ndarray, values: np.ndarray) -> None:
    """Copy a transposed view a cache line of each row at a time: three times as fast as at once."""
    if block.dtype == values.dtype and block.itemsize in (1, 2, 4, 8):
        # numpy moves integers faster than bfloat16.
        block, values = (array.view(f"u{array.itemsize}") for array in (block, values))
    columns = max(1, ALIGNMENT // block.itemsize)
    for start in range(0, block.shape[-1], columns):
        part = (..., slice(start, start + columns))
        _copy(block[part], values[part])


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array whose memory XLA takes as it is.

    Large ones are mapped here, all pages at once: numpy asks for huge pages, which a system whose
    memory is full of the files being read must make room for, and a virtual machine may have to get
    from its host. That took 5 s a GB where this took 1 s.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= MAPPED_BYTES and hasattr(mmap, "MAP_POPULATE"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype).reshape(shape)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
