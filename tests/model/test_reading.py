"""Slices of parameters, read whole or some rows at a time: always what the checkpoint holds."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hexllm.core.errors import CheckpointError
from hexllm.model import reading
from hexllm.model.reading import PieceReader
from hexllm.model.rules import Piece
from hexllm.testing.checkpoints import write_checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


@pytest.fixture(params=[1, 100, 1 << 20], ids=["a row", "some rows", "whole"])
def read_bytes(request, monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", request.param)


def piece(name, array, **more):
    return Piece(name, name, tuple(slice(0, size) for size in array.shape), **more)


def whole(shape):
    return tuple((0, size) for size in shape)


def numbers(*shape, dtype=F32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.usefixtures("read_bytes")
@pytest.mark.parametrize(("stored", "wanted"), [(F32, F32), (BF16, BF16), (F32, BF16), (BF16, F32)])
@pytest.mark.parametrize("shape", [(7,), (5, 6), (70, 3), (3, 4, 5), (0, 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_block_is_what_the_file_holds(tmp_path, stored, wanted, shape, transposed):
    array = numbers(*shape, dtype=stored)
    reader = PieceReader(write_checkpoint(tmp_path, {"a": array}))
    expected = array.swapaxes(-1, -2) if transposed and array.ndim > 1 else array
    each = piece("a", array, is_transposed=transposed and array.ndim > 1)
    block = reader.read_block([each], whole(expected.shape), wanted)
    assert block.dtype == wanted
    np.testing.assert_array_equal(block, expected.astype(wanted))
    if array.ndim and array.size:
        bounds = tuple((size // 3, size) for size in expected.shape)
        cut = expected[tuple(slice(*b) for b in bounds)]
        np.testing.assert_array_equal(reader.read_block([each], bounds, wanted), cut.astype(wanted))


@pytest.mark.usefixtures("read_bytes")
@pytest.mark.parametrize("transposed", [False, True])
def test_a_cut_piece_is_its_part(tmp_path, transposed):
    array = numbers(3, 8, 10)
    reader = PieceReader(write_checkpoint(tmp_path, {"a": array}))
    each = piece("a", array, is_transposed=transposed).cut(1, 2, 7)
    expected = (array.swapaxes(-1, -2) if transposed else array)[:, 2:7]
    np.testing.assert_array_equal(reader.read_block([each], whole(expected.shape), F32), expected)


@pytest.mark.usefixtures("read_bytes")
@pytest.mark.parametrize("shape", [(9, 4), (5,)])
def test_a_stack_is_its_tensors_in_order(tmp_path, shape):
    arrays = {f"a.{i}": numbers(*shape) + i for i in range(4)}
    reader = PieceReader(write_checkpoint(tmp_path, arrays))
    pieces = [piece(name, a, position=i) for i, (name, a) in enumerate(arrays.items())]
    bounds = ((1, 3), *whole(shape))
    block = reader.read_block(pieces, bounds, F32)
    np.testing.assert_array_equal(block, np.stack([arrays["a.1"], arrays["a.2"]]))


def test_a_large_tensor_is_read_some_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", 2 * 6 * 4)
    checkpoint = write_checkpoint(tmp_path, {"a": numbers(5, 6), "small": numbers(2, 6)})
    reader = PieceReader(checkpoint)
    for name, rows in (("a", 5), ("small", 2)):
        reader.read_block([piece(name, np.empty((rows, 6)))], ((0, rows), (0, 6)), F32)
    rows = [index and (index[0].start, index[0].stop) for _, index in checkpoint.reads]
    assert rows == [(0, 2), (2, 4), (4, 5), None]


def test_the_headers_are_asked_for_once(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path, {"a": numbers(50, 6)})
    calls = []
    monkeypatch.setattr(
        type(checkpoint), "tensors", lambda self: calls.append(1) or self._infos, raising=True
    )
    monkeypatch.setattr(reading, "READ_BYTES", 10)
    PieceReader(checkpoint).read_block([piece("a", np.empty((50, 6)))], whole((50, 6)), F32)
    assert calls == [1]


def test_a_loader_that_gives_another_shape_is_an_error(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path, {"a": numbers(5, 6)})
    monkeypatch.setattr(type(checkpoint), "read", lambda self, name, index=None: np.zeros((6,)))
    with pytest.raises(CheckpointError, match=r"reading a .*shape \[6\].*\[5, 6\]"):
        PieceReader(checkpoint).read_block([piece("a", np.empty((5, 6)))], whole((5, 6)), F32)


@pytest.mark.parametrize("nbytes", [4, 60, reading.MAPPED_BYTES - 4, reading.MAPPED_BYTES, 5 << 20])
def test_a_block_is_memory_of_its_own_that_a_device_takes_as_it_is(nbytes):
    for _ in range(3):
        block = reading._aligned_empty((nbytes // 4,), F32)
        assert block.ctypes.data % reading.ALIGNMENT == 0
        assert block.flags.writeable
        assert block.nbytes == nbytes
        block[...] = 1
