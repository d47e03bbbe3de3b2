"""A Hugging Face directory as a checkpoint: what it gives, and every way it can be wrong."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hexllm.core.checkpoint import Checkpoint, WeightLoader
from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.file import FileLoader

TYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def write_shards(directory: Path, shards: dict[str, dict[str, np.ndarray]]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    for shard, tensors in shards.items():
        save_file(tensors, directory / shard)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def raw_safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    a = np.arange(12, dtype=np.float32).reshape(4, 3)
    b = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    shards = {
        "model-00001-of-00002.safetensors": {"a": a},
        "model-00002-of-00002.safetensors": {"b": b, "c": a[0].copy()},
    }
    write_shards(tmp_path / "model", shards)
    return tmp_path / "model"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def load(directory: Path) -> Checkpoint:
    return FileLoader().open(str(directory))


def test_the_loader_and_its_checkpoint_are_what_core_calls_them(sharded: Path) -> None:
    assert isinstance(FileLoader(), WeightLoader)
    assert isinstance(load(sharded), Checkpoint)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_sharded_directory_gives_headers_files_and_tensors(sharded: Path, form: str) -> None:
    checkpoint = FileLoader().open(form.format(sharded))
    assert checkpoint.directory() == sharded
    assert checkpoint.file("config.json") == sharded / "config.json"
    assert checkpoint.file("tokenizer.json") is None
    headers = checkpoint.tensors()
    assert sorted(headers) == ["a", "b", "c"]
    assert headers["b"].shape == (2, 3, 4)
    assert headers["b"].dtype == "float16"
    assert headers["b"].nbytes == 48
    assert headers["b"].file.endswith("model-00002-of-00002.safetensors")
    np.testing.assert_array_equal(checkpoint.read("c"), [0, 1, 2])


@pytest.mark.parametrize("code", TYPES)
def test_every_type_is_read_as_it_was_stored(single: Path, code: str) -> None:
    value = np.arange(6).reshape(2, 3).astype(TYPES[code])
    header = {"x": entry(code, value.shape, (0, value.nbytes))}
    raw_safetensors(single / "model.safetensors", header, value.tobytes())
    checkpoint = load(single)
    read = checkpoint.read("x")
    assert read.dtype == value.dtype
    assert checkpoint.tensors()["x"].dtype == value.dtype.name
    assert read.tobytes() == value.tobytes()
    assert checkpoint.read("x", (slice(0, 2), slice(1, 2))).tobytes() == value[:, 1:2].tobytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slice_is_what_numpy_would_take(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    value = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    directory = tmp_path_factory.mktemp("slice")
    (directory / "config.json").write_text("{}")
    save_file({"pad": np.zeros(3, np.uint8), "x": value}, directory / "model.safetensors")
    index = tuple(
        data.draw(st.slices(size)) for size in shape[: data.draw(st.integers(0, len(shape)))]
    )
    read = load(directory).read("x", index)
    np.testing.assert_array_equal(read, value[index])
    assert read.shape == value[index].shape


def test_a_read_of_some_rows_reads_only_their_bytes(single: Path) -> None:
    rows = np.arange(3 * 1024, dtype=np.float32).reshape(3, 1024)
    save_file({"x": rows}, single / "model.safetensors")
    checkpoint = load(single)
    checkpoint.tensors()
    size = (single / "model.safetensors").stat().st_size
    with (single / "model.safetensors").open("r+b") as file:
        file.seek(size - 4096)
        file.write(b"\xff" * 4096)
    np.testing.assert_array_equal(checkpoint.read("x", (slice(0, 2),)), rows[:2])


def test_whole_rows_are_read_without_a_mapping_however_their_columns_are_written(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping's pages count as this process's memory, and each costs a fault."""
    values = np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    save_file({"x": values}, single / "model.safetensors")
    checkpoint = FileLoader().open(str(single))
    monkeypatch.setattr(np, "memmap", None)
    for rest in ((), (slice(None),), (slice(0, 3), slice(0, 2)), (slice(None), slice(0, 9))):
        np.testing.assert_array_equal(checkpoint.read("x", (slice(1, 3), *rest)), values[1:3])
    monkeypatch.undo()
    for rest in ((slice(1, 3),), (slice(None), slice(1, 2)), (slice(None, None, 2),)):
        taken = (slice(1, 3), *rest)
        np.testing.assert_array_equal(checkpoint.read("x", taken), values[taken])


def test_a_single_file_wins_over_an_index_of_other_shards(sharded: Path) -> None:
    save_file({"only": np.zeros(1, np.float32)}, sharded / "model.safetensors")
    assert list(load(sharded).tensors()) == ["only"]


def test_shards_without_an_index_are_all_read(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"a": np.zeros(1, np.float32)}, sharded / "consolidated.safetensors")
    assert sorted(load(sharded).tensors()) == ["a", "b", "c"]


def test_an_adapter_directory_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"lora_A": np.zeros(1, np.float32)}, tmp_path / "adapter_model.safetensors")
    assert list(load(tmp_path).tensors()) == ["lora_A"]


def refused(directory: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(directory).tensors()
    for part in parts:
        assert part in str(caught.value)


def test_a_shard_without_an_index_that_is_missing_is_named(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "model-00002-of-00002.safetensors is missing", "one of 2 shards")


def test_a_missing_shard_is_named_with_its_tensor(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "model-00002-of-00002.safetensors is missing", "'b'")


def test_a_tensor_missing_from_its_shard_is_named_with_it(sharded: Path) -> None:
    save_file({"b": np.zeros(1, np.float16)}, sharded / "model-00002-of-00002.safetensors")
    refused(sharded, "model-00002-of-00002.safetensors has no tensor 'c'")


def test_a_tensor_in_two_shards_is_named_with_both(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    save_file({n: np.zeros(1, np.float16) for n in "abc"}, shard)
    refused(sharded, "Tensor 'a' is in two files", "00001-of", "00002-of")


@pytest.mark.parametrize(
    ("index", "part"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "no 'weight_map'"),
        (b'{"weight_map": {"a": 1}}', "no 'weight_map'"),
        (b'{"weight_map": {"a": "../up.safetensors"}}', "tensor 'a'"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_index_is_named(sharded: Path, index: bytes, part: str) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(index)
    refused(sharded, "model.safetensors.index.json", part)


def test_a_truncated_file_names_the_file_and_the_first_tensor_cut(single: Path) -> None:
    path = single / "model.safetensors"
    save_file({"first": np.zeros(8, np.float32), "second": np.zeros(8, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-4])
    refused(single, "model.safetensors", "'second'", "truncated")


def test_a_file_that_is_longer_than_its_header_says_is_refused(single: Path) -> None:
    path = single / "model.safetensors"
    save_file({"x": np.zeros(8, np.float32)}, path)
    path.write_bytes(path.read_bytes() + b"\0")
    refused(single, "model.safetensors", "the header describes")


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "parts"),
    [
        ({"x": entry(dtype="Q9")}, ("'x'", "dtype 'Q9'")),
        ({"x": entry(dtype=3)}, ("'x'", "dtype 3")),
        ({"x": entry(shape=[3])}, ("'x'", "takes 12 bytes", "hold 8")),
        ({"x": entry(shape=[-2])}, ("'x'", "not a list of sizes")),
        ({"x": entry(shape=[True, 2])}, ("'x'", "not a list of sizes")),
        ({"x": entry(shape="no")}, ("'x'", "not a list of sizes")),
        ({"x": entry(offsets=[0])}, ("'x'", "not a pair")),
        ({"x": entry(offsets=[8, 0])}, ("'x'", "takes 8 bytes")),
        ({"x": entry(offsets=[0, "8"])}, ("'x'", "not a pair")),
        ({"x": entry(offsets=[4, 12])}, ("'x'", "starts at byte")),
        ({"x": entry(), "y": entry()}, ("'y'", "starts at byte")),
        ({"x": {"dtype": "F32"}}, ("'x'", "lacks")),
        ({"x": 1}, ("'x'", "lacks")),
        ({"__metadata__": 1, "x": entry()}, ("__metadata__",)),
        ([], ("not a JSON object",)),
        (b"{garbage", ("not JSON",)),
        (b'{"x": 1, "x": 2}', ("'x' twice",)),
        (b"\xff\xff", ("not JSON",)),
        (b"[" * 100_000, ("not JSON",)),
        (b'{"x": ' + b"9" * 10_000 + b"}", ("model.safetensors",)),
    ],
)
def test_a_bad_header_names_the_file_and_the_tensor(
    single: Path, header: object, parts: tuple[str, ...]
) -> None:
    raw_safetensors(single / "model.safetensors", header, b"\0" * 8)
    refused(single, "model.safetensors", *parts)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, struct.pack("<Q", 1 << 40)])
def test_a_file_that_is_no_safetensors_is_named(single: Path, content: bytes) -> None:
    (single / "model.safetensors").write_bytes(content)
    refused(single, "model.safetensors", "no safetensors file")


def test_only_torch_files_say_so_and_what_to_do(single: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"")
    refused(single, "Cannot find any *.safetensors files", "pytorch_model.bin", "save_pretrained")


def test_no_weights_at_all_says_so(single: Path) -> None:
    refused(single, "Cannot find any *.safetensors files", "--load_format=dummy")
    assert load(single).file("config.json") is not None


def test_an_absent_tensor_is_named(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'z'"):
        load(sharded).read("z")


@pytest.mark.parametrize("index", [None, (slice(None), slice(0, 1))])
def test_a_file_cut_while_open_is_named(single: Path, index: tuple[slice, ...] | None) -> None:
    path = single / "model.safetensors"
    save_file({"x": np.zeros((8, 8), np.float32)}, path)
    checkpoint = load(single)
    checkpoint.tensors()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'x'"):
        checkpoint.read("x", index)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'x'"):
        checkpoint.read("x", index)


def test_nothing_there_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No checkpoint at .*absent.*hf://org/name"):
        load(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"neither config\.json nor a \.gguf.*notes\.txt"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"notes\.txt is a file, not a checkpoint"):
        load(tmp_path / "notes.txt")


def test_a_revision_or_host_of_a_local_path_is_refused(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="revision='main' means nothing"):
        FileLoader().open(str(sharded), "main")
    with pytest.raises(CheckpointError, match="host 'server'"):
        FileLoader().open("file://server/model")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, 400),
)
def test_whatever_bytes_change_only_a_checkpoint_error_comes(
    tmp_path: Path, edits: list[tuple[int, int]], cut: int | None
) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int8)}, path)
    content = bytearray(path.read_bytes())
    for offset, byte in edits:
        content[offset % len(content)] = byte
    path.write_bytes(content[:cut])
    checkpoint = load(tmp_path)
    try:
        headers = checkpoint.tensors()
    except CheckpointError as refusal:
        headers = {}
        assert str(path) in str(refusal)  # noqa: PT017 -- either outcome is right
    for name, header in headers.items():
        value = checkpoint.read(name)
        assert value.shape == header.shape
        assert value.nbytes == header.nbytes


_MEASURE = """
import sys
from pathlib import Path

import numpy as np
import psutil

from hexllm.plugins.loaders.file import FileLoader


def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


checkpoint = FileLoader().open(sys.argv[1])
before, total, count = psutil.Process().memory_info().rss, 0.0, 0
for name, header in checkpoint.tensors().items():
    halves = checkpoint.read(name, (slice(None), slice(0, header.shape[1] // 2)))
    total += float(halves[-1, -1]) + float(checkpoint.read(name)[-1, -1])
    count += 1
print(count, total, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is Linux's")
def test_reading_every_tensor_holds_little_more_than_the_largest(tmp_path: Path) -> None:
    tensor, shards, per_shard = (4096, 2048), 3, 3  # 32 MiB each, 288 MiB in all
    directory = tmp_path / "model"
    for shard in range(shards):
        part = {
            f"t{shard}.{n}": np.full(tensor, shard * per_shard + n, np.float32)
            for n in range(per_shard)
        }
        directory.mkdir(exist_ok=True)
        save_file(part, directory / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors")
    (directory / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    count, total, growth = done.stdout.split()
    assert (int(count), float(total)) == (9, 2.0 * sum(range(9)))
    largest = 4 * tensor[0] * tensor[1]
    # Far under the checkpoint plus its largest tensor: one tensor, its half, and its mapped pages.
    assert int(growth) < 3 * largest
