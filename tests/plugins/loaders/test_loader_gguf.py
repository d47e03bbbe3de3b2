"""A GGUF file as a checkpoint: tensors, configuration, and every way it can be wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.file import FileLoader
from tests.plugins.loaders.gguf_writer import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    llama_tensors,
    write_gguf,
)

if TYPE_CHECKING:
    from pathlib import Path

    from hexllm.core.checkpoint import Checkpoint

KINDS = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS",
]  # fmt: skip
#: The largest error of normal values, by type.
ERRORS = {"Q8_0": 0.02, "Q4_0": 0.4, "Q4_1": 0.3, "Q5_0": 0.2, "Q5_1": 0.15, "BF16": 0.02}

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEXLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(path: Path) -> Checkpoint:
    return FileLoader().open(str(path))


def config_of(path: Path) -> dict[str, Any]:
    file = load(path).file("config.json")
    assert file is not None
    return json.loads(file.read_text())


def rotary_halves_apart(stored: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's rows: of each head, the first members of all pairs, then the second ones."""
    return np.concatenate(
        [np.concatenate([head[0::2], head[1::2]]) for head in np.split(stored, heads)]
    )


@pytest.mark.parametrize("name", KINDS)
def test_every_quantization_is_the_gguf_packages_own(tmp_path: Path, name: str) -> None:
    kind = Type[name]
    values = llama_tensors(np.random.default_rng(0))
    encoded = write_gguf(tmp_path / "m.gguf", kind=kind)
    checkpoint = load(tmp_path / "m.gguf")
    expected = dequantize(encoded["token_embd.weight"], kind)
    read = checkpoint.read(EMBED)
    header = checkpoint.tensors()[EMBED]
    plain = {"F16": "float16", "BF16": "bfloat16"}
    assert (read.dtype.name, header.dtype) == (plain.get(name, "float32"),) * 2
    assert (
        (read.shape, read.nbytes) == (header.shape, header.nbytes) == ((VOCAB, HIDDEN), read.nbytes)
    )
    np.testing.assert_array_equal(read.astype(np.float32), expected)
    assert np.isfinite(expected).all()
    if name in ERRORS:
        assert np.abs(expected - values["token_embd.weight"]).max() < ERRORS[name]

    q = dequantize(encoded["blk.1.attn_q.weight"], kind)
    np.testing.assert_array_equal(
        checkpoint.read(Q_PROJ).astype(np.float32), rotary_halves_apart(q, HEADS)
    )


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_1", "Q6_K"])
def test_a_slice_is_what_numpy_would_take(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Type[name])
    checkpoint = load(tmp_path / "m.gguf")
    whole = checkpoint.read(Q_PROJ)
    for rows, columns in (
        (slice(3, 70), slice(None)),
        (slice(None), slice(33, 100)),
        (slice(10, 12), slice(64, 128)),
        (slice(None, None, -2), slice(None, None, -3)),
        (slice(200, None, 7), slice(5, 250, 31)),
        (slice(4, 4), slice(None)),
        (slice(0, 1), slice(9, 3)),
    ):
        np.testing.assert_array_equal(
            checkpoint.read(Q_PROJ, (rows, columns)), whole[rows, columns]
        )
    np.testing.assert_array_equal(checkpoint.read(Q_PROJ, (slice(1, 9),)), whole[1:9])
    norm = checkpoint.read("model.norm.weight")
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight", (slice(2, 5),)), norm[2:5])


def test_a_read_of_some_rows_dequantizes_only_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hexllm.plugins.loaders import gguf_tensors

    write_gguf(tmp_path / "m.gguf", kind=Type.Q8_0)
    checkpoint = load(tmp_path / "m.gguf")
    elements = []

    def counting(blocks: np.ndarray, kind: Type) -> np.ndarray:
        values = dequantize(blocks, kind)
        elements.append(values.size)
        return values

    monkeypatch.setattr(gguf_tensors, "dequantize", counting)
    checkpoint.read(Q_PROJ, (slice(0, 5), slice(40, 60)))
    assert sum(elements) == 5 * 32


def test_attention_biases_are_found_and_put_in_order(tmp_path: Path) -> None:
    tensors = llama_tensors(np.random.default_rng(0), biases=True)
    write_gguf(tmp_path / "m.gguf", tensors=tensors)
    assert config_of(tmp_path / "m.gguf")["attention_bias"] is True
    read = load(tmp_path / "m.gguf").read("model.layers.0.self_attn.k_proj.bias")
    np.testing.assert_array_equal(read, rotary_halves_apart(tensors["blk.0.attn_k.bias"], KV_HEADS))


def test_config_is_hugging_faces(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    config = config_of(tmp_path / "m.gguf")
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 0,
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")],
)
def test_torch_dtype_is_what_the_model_was_published_in(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Type[kind])
    assert config_of(tmp_path / "m.gguf")["torch_dtype"] == dtype


def test_an_output_tensor_means_untied_embeddings(tmp_path: Path) -> None:
    tensors = llama_tensors(np.random.default_rng(0), tied=False)
    write_gguf(tmp_path / "m.gguf", tensors=tensors)
    assert config_of(tmp_path / "m.gguf")["tie_word_embeddings"] is False
    read = load(tmp_path / "m.gguf").read("lm_head.weight")
    np.testing.assert_array_equal(read, tensors["output.weight"])


def test_the_ends_of_a_turn_go_to_generation_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 7})
    file = load(tmp_path / "m.gguf").file("generation_config.json")
    assert file is not None
    assert json.loads(file.read_text()) == {"bos_token_id": 1, "eos_token_id": [0, 7]}


@pytest.mark.parametrize(
    ("factor", "original", "theta"),
    [(8.0, 8192, 500000.0), (32.0, 8192, 500000.0), (4.0, 4096, 1e4)],
)
@pytest.mark.torch
def test_llama3_rope_factors_become_the_settings_they_came_from(
    tmp_path: Path, factor: float, original: int, theta: float
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=original * 8,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / theta ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    tensors = llama_tensors(np.random.default_rng(0))
    tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", tensors=tensors, metadata={"llama.rope.freq_base": theta})
    assert config_of(tmp_path / "m.gguf")["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in load(tmp_path / "m.gguf").tensors()


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_translated(
    tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={f"llama.{k}": v for k, v in metadata.items()})
    assert config_of(tmp_path / "m.gguf")["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        ({"llama.attention.key_length": 32}, ("rope.dimension_count=64", "32")),
        ({"llama.attention.value_length": 32}, ("value_length=32",)),
        ({"llama.expert_count": 8}, ("expert_count=8",)),
        ({"llama.attention.sliding_window": 64}, ("sliding_window", "not understood")),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, ("longrope",)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -1.0}, ("factor",)),
        ({"llama.block_count": 0}, ("llama.block_count", "positive")),
        ({"llama.block_count": "two"}, ("llama.block_count", "'two'", "whole number")),
        ({"llama.attention.head_count_kv": [2, 4]}, ("head_count_kv", "[2, 4]")),
        ({"llama.rope.freq_base": float("nan")}, ("freq_base", "finite")),
        ({"llama.context_length": True}, ("context_length", "whole number")),
    ],
)
def test_metadata_that_cannot_be_said_in_config_json_is_refused(
    tmp_path: Path, metadata: dict[str, Any], parts: tuple[str, ...]
) -> None:
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "m.gguf").directory()
    for part in ("m.gguf", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "key", ["llama.embedding_length", "llama.attention.layer_norm_rms_epsilon"]
)
def test_absent_metadata_is_named(tmp_path: Path, key: str) -> None:
    write_gguf(tmp_path / "m.gguf", without=(key,))
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*'{key}' is absent"):
        load(tmp_path / "m.gguf").file("config.json")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"blk.2.attn_q.weight": (HIDDEN, HIDDEN)},
            r"tensor 'blk\.2\.attn_q\.weight' has no place",
        ),
        ({"blk.0.ffn_gate_exps.weight": (4, 4)}, r"tensor 'blk\.0\.ffn_gate_exps\.weight'"),
        (
            {"blk.0.attn_q.weight": (HEADS, HIDDEN)},
            "tensor 'blk.0.attn_q.weight' has 4 rows, which are not 4 heads",
        ),
    ],
)
def test_a_tensor_without_a_place_is_named(
    tmp_path: Path, extra: dict[str, tuple[int, ...]], message: str
) -> None:
    tensors = llama_tensors(np.random.default_rng(0))
    tensors |= {name: np.zeros(shape, np.float32) for name, shape in extra.items()}
    write_gguf(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(CheckpointError, match=rf"m\.gguf: {message}"):
        load(tmp_path / "m.gguf").tensors()


def test_rope_factors_that_are_not_llama3s_are_refused(tmp_path: Path) -> None:
    for factors, message in (
        (np.linspace(1, 9, HEAD_DIM // 2), "not Llama 3's"),
        (np.ones(3), r"shape \(3,\)"),
    ):
        tensors = llama_tensors(np.random.default_rng(0))
        tensors["rope_freqs.weight"] = factors.astype(np.float32)
        path = tmp_path / f"{len(factors)}.gguf"
        write_gguf(path, tensors=tensors)
        with pytest.raises(CheckpointError, match=rf"'rope_freqs\.weight'.*{message}"):
            load(path).directory()


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(CheckpointError, match=r"m\.gguf: GGUF architecture 'mamba'.*llama"):
        load(tmp_path / "m.gguf")


def test_a_type_that_cannot_be_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Type.TQ2_0)
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' is quantized as TQ2_0"):
        load(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    name = b"blk.0.attn_norm.weight"
    at = content.index(name) + len(name) + 4 + 8
    (tmp_path / "n.gguf").write_bytes(content[:at] + b"\xe7\x03\0\0" + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_norm\.weight' is .* number 999"):
        load(tmp_path / "n.gguf")


def test_a_truncated_file_names_the_tensor_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-2048])
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.ffn_down\.weight'.*trunc"):
        load(path)


def test_a_file_cut_while_open_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    checkpoint = load(path)
    path.write_bytes(path.read_bytes()[:-2048])
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.ffn_down\.weight'"):
        checkpoint.read("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match="no tensor 'nowhere'"):
        checkpoint.read("nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"GGML" + b"\0" * 40, "begins with b'GGML'"),
        (b"GGUF\0\0\0\3" + b"\0" * 40, "big-endian"),
        (b"GGUF\1\0\0\0" + b"\0" * 40, "version 1 is not supported"),
        (b"GGUF\3\0\0\0" + b"\0" * 8 + b"\xff" * 8 + b"\xff" * 20, "metadata key number 1"),
        (b"GGUF\3\0\0\0" + b"\xff" * 8 + b"\0" * 8, "tensor number 1"),
    ],
)
def test_what_is_no_gguf_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{message}"):
        load(tmp_path / "m.gguf")


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"split.count": 3})
    with pytest.raises(CheckpointError, match=r"m\.gguf is one of 3 parts.*--merge"):
        load(tmp_path / "m.gguf")


def test_a_directory_with_one_gguf_is_that_model_and_with_two_a_question(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_gguf(model / "a.gguf")
    assert EMBED in load(model).tensors()
    write_gguf(model / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a\.gguf, b\.gguf\).*a\.gguf"):
        load(model)


def test_what_is_made_from_metadata_is_made_once_and_again_when_the_file_changes(
    tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    first = load(path).directory()
    made = (first / "config.json").stat().st_mtime_ns
    assert load(path).directory() == first
    assert (first / "config.json").stat().st_mtime_ns == made
    write_gguf(path, metadata={"llama.context_length": 4096})
    second = load(path).directory()
    assert second != first
    assert json.loads((second / "config.json").read_text())["max_position_embeddings"] == 4096
    assert sorted(child.name for child in (cache / "gguf").iterdir()) == sorted(
        [first.name, second.name]
    )


def test_a_failed_translation_leaves_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": "nobody-knows"})
    with pytest.raises(CheckpointError, match="nobody-knows"):
        load(tmp_path / "m.gguf").directory()
    assert list((cache / "gguf").iterdir()) == []


def test_a_cache_that_cannot_be_made_says_which_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("HEXLLM_CACHE", str(tmp_path / "occupied"))
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"occupied.*Set HEXLLM_CACHE"):
        load(tmp_path / "m.gguf").directory()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF of a few kilobytes, mostly header."""
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    tensors = {
        "token_embd.weight": np.ones((270, 32), np.float32),
        "blk.0.attn_q.weight": np.ones((8, 32), np.float32),
    }
    metadata = {"llama.embedding_length": 32, "llama.rope.dimension_count": 8}
    write_gguf(path, tensors=tensors, kind=Type.Q8_0, metadata=metadata)
    return path.read_bytes()


def test_the_file_that_is_corrupted_below_is_whole(tmp_path: Path, tiny: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(tiny)
    assert config_of(tmp_path / "m.gguf")["head_dim"] == 8


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, 1 << 14),
)
def test_whatever_bytes_change_only_a_checkpoint_error_comes(
    tmp_path: Path, tiny: bytes, edits: list[tuple[int, int]], cut: int | None
) -> None:
    path = tmp_path / "m.gguf"
    content = bytearray(tiny)
    for offset, byte in edits:
        content[offset % len(content)] = byte
    path.write_bytes(content[:cut])
    try:
        checkpoint = load(path)
        checkpoint.directory()
        for name, header in checkpoint.tensors().items():
            value = checkpoint.read(name)
            assert value.shape == header.shape
            assert value.nbytes == header.nbytes
    except CheckpointError as refusal:
        assert str(path) in str(refusal)  # noqa: PT017 -- either outcome is right
