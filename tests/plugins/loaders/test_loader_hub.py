"""Models of a hub, served by a fake one on loopback."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save

from hexllm.core.checkpoint import Checkpoint, WeightLoader
from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.hub import HubLoader, parse_uri
from tests.plugins.loaders.fake_hub import COMMIT, FakeHub
from tests.plugins.loaders.gguf_writer import write_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHARDS = {
    "model-00001-of-00002.safetensors": {"a": np.arange(4, dtype=np.float32)},
    "model-00002-of-00002.safetensors": {"b": np.ones((2, 2), np.float16)},
}
SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "generation_config.json": b'{"eos_token_id": 2}',
}


def sharded_repo() -> dict[str, bytes]:
    weight_map = {name: shard for shard, tensors in SHARDS.items() for name in tensors}
    return {
        **SMALL,
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        **{shard: save(tensors) for shard, tensors in SHARDS.items()},
        "onnx/config.json": b"[]",
        "pytorch_model.bin": b"never fetched",
        "README.md": b"never fetched",
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub(
        {
            "org/sharded": sharded_repo(),
            "org/single": {**SMALL, "model.safetensors": save(SHARDS[next(iter(SHARDS))])},
            "org/torch": {**SMALL, "pytorch_model.bin": b""},
            "org/empty": {"README.md": b""},
        }
    )
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield hub
    hub.close()


def test_the_loader_and_its_checkpoint_are_what_core_calls_them(hub: FakeHub) -> None:
    assert isinstance(HubLoader(), WeightLoader)
    assert isinstance(HubLoader().open("org/single"), Checkpoint)


@pytest.mark.parametrize("uri", ["org/sharded", "hf://org/sharded", "hf://org/sharded@v1"])
def test_opening_fetches_small_files_and_the_first_tensor_the_weights(
    hub: FakeHub, uri: str, tmp_path: Path
) -> None:
    checkpoint = HubLoader().open(uri)
    assert hub.downloads() == {*SMALL, "model.safetensors.index.json"}
    config = checkpoint.file("config.json")
    assert config is not None
    assert config.read_bytes() == SMALL["config.json"]
    assert config.parent == checkpoint.directory()
    assert config.is_relative_to(tmp_path / "home" / "hub")
    assert checkpoint.file("model.safetensors") is None

    assert sorted(checkpoint.tensors()) == ["a", "b"]
    assert hub.downloads() == {*SMALL, "model.safetensors.index.json", *SHARDS}
    np.testing.assert_array_equal(checkpoint.read("a", (slice(1, 3),)), [1, 2])


def test_a_model_of_one_file_is_fetched(hub: FakeHub) -> None:
    checkpoint = HubLoader().open("org/single", "main")
    assert "model.safetensors" not in hub.downloads()
    np.testing.assert_array_equal(checkpoint.read("a"), [0, 1, 2, 3])


def test_the_token_is_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    HubLoader().open("org/single").tensors()
    assert {token for _, _, token in hub.requests} == {"Bearer hf_secret"}


def test_offline_serves_from_the_cache_and_asks_nothing(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    HubLoader().open("org/sharded").tensors()
    HubLoader().open("org/single")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert sorted(HubLoader().open("org/sharded").tensors()) == ["a", "b"]
    with pytest.raises(CheckpointError, match=r"Cannot find any \*\.safetensors files"):
        HubLoader().open("org/single").tensors()
    with pytest.raises(CheckpointError, match=r"org/torch .* HF_HUB_OFFLINE forbids.*hf download"):
        HubLoader().open("org/torch")
    assert hub.requests == []


def test_a_hub_out_of_reach_serves_what_the_cache_has(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    HubLoader().open("org/sharded").tensors()
    monkeypatch.setenv("HF_ENDPOINT", closed_port())
    assert sorted(HubLoader().open("org/sharded").tensors()) == ["a", "b"]


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_hub_out_of_reach_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = closed_port()
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(CheckpointError, match=f"org/single cannot be fetched from {endpoint}.*HF_"):
        HubLoader().open("org/single")


def refused(uri: str, *parts: str, revision: str | None = None) -> None:
    with pytest.raises(CheckpointError) as caught:
        HubLoader().open(uri, revision).tensors()
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_says_where_to_ask(hub: FakeHub, status: int) -> None:
    hub.refusals["org/single"] = (status, "GatedRepo")
    refused("org/single", "org/single is gated", f"{hub.endpoint}/org/single", "HF_TOKEN")


@pytest.mark.parametrize("status", [401, 403])
def test_gated_weights_of_an_open_listing_say_where_to_ask(hub: FakeHub, status: int) -> None:
    hub.refusals["org/single/model.safetensors"] = (status, "GatedRepo")
    assert HubLoader().open("org/single").file("config.json") is not None
    refused("org/single", "org/single is gated", "none is set now")


def test_a_token_without_access_is_told_apart(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    hub.refusals["org/single"] = (403, "GatedRepo")
    refused("org/single", "the one that is set may not")


@pytest.mark.parametrize("repo", ["org/absent", "org/private"])
def test_an_absent_or_private_model_says_both(hub: FakeHub, repo: str) -> None:
    refused(repo, f"{repo} is not on {hub.endpoint}, or is private", "HF_TOKEN")


def test_an_absent_revision_is_named(hub: FakeHub) -> None:
    refused("org/single", "org/single has no revision 'v9'", revision="v9")
    refused("hf://org/single@v9", "org/single has no revision 'v9'")


def test_a_bad_token_or_a_hub_in_trouble_shows_the_status(hub: FakeHub) -> None:
    hub.refusals["org/single"] = (403, "Other")
    refused("org/single", "answered 403", "HF_TOKEN")
    hub.refusals["org/single"] = (501, "Broken")
    refused("org/single", "answered 501", "Try again later")


def test_shards_without_an_index_are_fetched_even_after_a_broken_fetch(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    del hub.repos["org/sharded"]["model.safetensors.index.json"]
    hub.refusals["org/sharded/model-00002-of-00002.safetensors"] = (403, "Other")
    refused("org/sharded", "answered 403")
    hub.refusals.clear()
    assert sorted(HubLoader().open("org/sharded").tensors()) == ["a", "b"]
    monkeypatch.setenv("HF_ENDPOINT", closed_port())
    assert sorted(HubLoader().open("org/sharded").tensors()) == ["a", "b"]


def test_only_torch_files_say_so_and_fetch_none(hub: FakeHub) -> None:
    refused("org/torch", "Cannot find any *.safetensors files", "pytorch_model.bin")
    assert "pytorch_model.bin" not in hub.downloads()


def test_a_model_without_config_is_refused(hub: FakeHub) -> None:
    refused("org/empty", "org/empty is not a checkpoint", "README.md")


def test_a_shard_that_the_index_names_but_the_hub_lacks_is_named(hub: FakeHub) -> None:
    del hub.repos["org/sharded"]["model-00002-of-00002.safetensors"]
    refused("org/sharded", "model-00002-of-00002.safetensors is missing", "'b'")


def test_a_broken_download_leaves_nothing_half_written_and_the_next_one_succeeds(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library waits between its own attempts; here they would only take time.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    data = save({"a": np.arange(1 << 16, dtype=np.float32)})
    hub.repos["org/single"]["model.safetensors"] = data
    hub.cut.add("model.safetensors")
    checkpoint = HubLoader().open("org/single")
    with pytest.raises(CheckpointError, match="org/single cannot be fetched"):
        checkpoint.tensors()
    assert list((tmp_path / "home").rglob("model.safetensors")) == []
    hub.cut.clear()
    np.testing.assert_array_equal(HubLoader().open("org/single").read("a"), np.arange(1 << 16))


def test_a_gguf_is_opened_by_name_or_when_it_is_the_only_one(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    hub.repos["org/gguf"] = {"README.md": b"", "q4/m.gguf": data}
    for uri in ("org/gguf", "hf://org/gguf", "hf://org/gguf/q4/m.gguf"):
        checkpoint = HubLoader().open(uri)
        assert checkpoint.uri == uri
        assert checkpoint.file("config.json") is not None
        assert "model.embed_tokens.weight" in checkpoint.tensors()
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        assert "model.embed_tokens.weight" in HubLoader().open("org/gguf").tensors()
    with monkeypatch.context() as out_of_reach:
        out_of_reach.setenv("HF_ENDPOINT", closed_port())
        assert "model.embed_tokens.weight" in HubLoader().open("org/gguf").tensors()
    hub.repos["org/ggufs"] = {"a.gguf": data, "b.gguf": data}
    refused("org/ggufs", "2 GGUF files", "hf://org/ggufs/a.gguf, hf://org/ggufs/b.gguf")
    refused("hf://org/ggufs/c.gguf", "org/ggufs has no file 'c.gguf'")


def test_a_uri_is_taken_apart() -> None:
    model, file = parse_uri("hf://org/name@v1/folder/x.gguf", None)
    assert (model.repo, model.revision, file) == ("org/name", "v1", "folder/x.gguf")
    model, file = parse_uri("gpt2", "abc")
    assert (model.repo, model.revision, file) == ("gpt2", "abc", None)


@pytest.mark.parametrize(
    "uri", ["", "hf://", "org/", "/org", "org/na me", "org/name/config.json", "hf://o/n/../x.gguf"]
)
def test_a_uri_that_names_no_model_is_refused(uri: str) -> None:
    with pytest.raises(CheckpointError, match="names no model of the hub"):
        parse_uri(uri, None)


def test_two_revisions_are_refused() -> None:
    with pytest.raises(CheckpointError, match="'v1', but revision='v2'"):
        parse_uri("hf://org/name@v1", "v2")
    assert parse_uri("hf://org/name@v1", "v1")[0].revision == "v1"


def test_the_commit_is_kept_for_the_weights(hub: FakeHub) -> None:
    checkpoint = HubLoader().open("org/single")
    assert checkpoint.directory().name == COMMIT
    hub.requests.clear()
    checkpoint.tensors()
    assert all("main" not in path for _, path, _ in hub.requests)
