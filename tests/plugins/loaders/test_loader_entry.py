"""The loaders as plugins: found by scheme, imported late, and free of JAX."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from hexllm.core.errors import CheckpointError
from hexllm.plugins import loaders
from hexllm.plugins.loaders.cache import cache_directory, publishing
from tests.plugins.loaders.gguf_writer import write_gguf

if TYPE_CHECKING:
    from pathlib import Path


def test_each_scheme_has_one_loader() -> None:
    components = list(loaders.hexllm_weight_loaders())
    assert [(c.name, c.provides) for c in components] == [
        ("file", ("file",)),
        ("hf", ("hf",)),
        ("pypi", ("pypi",)),
    ]


def test_the_core_opens_a_path_with_the_file_loader(tmp_path: Path) -> None:
    from hexllm.core.plugins import load_plugins
    from hexllm.core.settings import PluginSettings

    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.arange(3, dtype=np.int8)}, tmp_path / "model.safetensors")
    plugins = load_plugins(PluginSettings())
    for uri in (str(tmp_path), f"file://{tmp_path}"):
        np.testing.assert_array_equal(plugins.open_checkpoint(uri).read("a"), [0, 1, 2])
    with pytest.raises(CheckpointError, match="Pin one"):
        plugins.open_checkpoint("pypi://tiny-model")


_ENTRY = """
import sys
import hexllm.plugins.loaders as entry
names = [component.name for component in entry.hexllm_weight_loaders()]
print(*sorted({m.split(".")[0] for m in sys.modules} & set(sys.argv[1].split(","))))
"""

_OPEN = """
import sys
from hexllm.plugins.loaders import hub, pypi
from hexllm.plugins.loaders.file import FileLoader
checkpoint = FileLoader().open(sys.argv[2])
checkpoint.directory()
for name in checkpoint.tensors():
    checkpoint.read(name)
import huggingface_hub
hub.HubModel("org/name", None)
print(*sorted({m.split(".")[0] for m in sys.modules} & set(sys.argv[1].split(","))))
"""


@pytest.mark.parametrize(
    ("script", "forbidden"),
    [
        (_ENTRY, "jax,flax,torch,transformers,numpy,safetensors,gguf,tokenizers,huggingface_hub"),
        (_OPEN, "jax,jaxlib,flax,torch,transformers,fastapi"),
    ],
    ids=["entry", "open"],
)
def test_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, forbidden: str
) -> None:
    monkeypatch.setenv("HEXLLM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf")
    done = subprocess.run(
        [sys.executable, "-c", script, forbidden, str(tmp_path / "m.gguf")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == []


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXLLM_CACHE", str(tmp_path / "own"))
    assert cache_directory("gguf") == tmp_path / "own" / "gguf"
    monkeypatch.delenv("HEXLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory("pypi") == tmp_path / "xdg" / "hexllm" / "pypi"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory("pypi") == tmp_path / "home" / ".cache" / "hexllm" / "pypi"


def test_of_two_that_publish_at_once_one_result_stands_whole(tmp_path: Path) -> None:
    target, gate = tmp_path / "target", threading.Barrier(4)

    def publish(number: int) -> None:
        with publishing(target) as draft:
            for name in ("a", "b"):
                (draft / name).write_text(str(number))
            gate.wait()

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (target / "a").read_text() == (target / "b").read_text()
    assert list(tmp_path.iterdir()) == [target]
