"""Tokenizers rebuilt from GGUF metadata, against those they were made from."""

from __future__ import annotations

import io
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.file import FileLoader
from tests.plugins.loaders.gguf_writer import (
    HIDDEN,
    byte_alphabet,
    byte_level_vocabulary,
    llama_tensors,
    write_gguf,
)

if TYPE_CHECKING:
    from pathlib import Path

STRINGS = [
    "",
    "Hello world",
    "  two  spaces   three\n\n\n\ttabs\r\n",
    "1234567890 3.14 ½ ²³ Ⅷ ٣٤",
    "漢字かなカナ 中文测试 한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00e9",
    "don't I'LL we've y'all'd",
    "def f(x):\n    return x**2  # done\n",
    "مرحبا بالعالم हिन्दी",
    "\x00\x01\x7f\u200b\ufeff",
    "trailing   ",
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXLLM_CACHE", str(tmp_path / "cache"))


def rebuild(path: Path) -> Path:
    return FileLoader().open(str(path)).directory()


def rebuilt(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(rebuild(path) / "tokenizer.json"))


def random_strings(alphabet: str, count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(count)]


@pytest.mark.torch
def test_smollm2_tokenizes_as_its_own_tokenizer_does(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The reference is transformers' conversion with the digit splitting that it loses."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    reference = converted.backend_tokenizer
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    reference.post_processor = None
    directory = rebuild(smollm2_gguf)
    own = Tokenizer.from_file(str(directory / "tokenizer.json"))
    special = ["<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "<|im_start|", "<repo_name>x"]
    alphabet = "ab cd 0123456789 \n\t漢字🙂é'sS.,!?<|_>Ωжش\u200d\u00a0\u3000" + chr(0x1F468)
    for text in STRINGS + special + random_strings(alphabet, 1000):
        expected = reference.encode(text)
        got = own.encode(text)
        assert got.ids == expected.ids, text
        decoded = own.decode(got.ids, skip_special_tokens=False)
        assert decoded == reference.decode(expected.ids, skip_special_tokens=False)

    loaded = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    prompt = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == converted.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    assert loaded.model_max_length == 8192


def test_transformers_loads_what_was_rebuilt(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "m.gguf")
    directory = rebuild(tmp_path / "m.gguf")
    loaded = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "the 12"}]
    prompt = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|turn|>user: the 12<|end|><|turn|>assistant: "
    ids = loaded(prompt).input_ids
    assert ids == rebuilt(tmp_path / "m.gguf").encode(prompt).ids
    assert ids[0] == loaded.bos_token_id == 1
    assert loaded.decode(ids, skip_special_tokens=True) == "user: the 12assistant: "
    assert loaded.eos_token == "<|end|>"
    special = json.loads((directory / "special_tokens_map.json").read_text())
    assert special == {"bos_token": "<|turn|>", "eos_token": "<|end|>"}


def test_named_chat_templates_are_all_kept(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template.tool_use": "TOOLS"})
    loaded = AutoTokenizer.from_pretrained(rebuild(tmp_path / "m.gguf"))
    messages = [{"role": "user", "content": "x"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "<|turn|>user: x<|end|>"
    named = loaded.apply_chat_template(messages, tokenize=False, chat_template="tool_use")
    assert named == "TOOLS"


def test_a_user_defined_token_is_one_token_but_not_special(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    own = rebuilt(tmp_path / "m.gguf")
    ids = own.encode("a<tool>b<|end|>").ids
    assert own.token_to_id("<tool>") in ids
    assert own.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_every_byte_survives(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    own = rebuilt(tmp_path / "m.gguf")
    for text in [*STRINGS, "".join(map(chr, range(0x250)))]:
        assert own.decode(own.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's I'LL 1234 x\n\n  y", "it|'s| I|'|LL| 1234| x|\n\n | y"),
        ("smollm", "it's 1234 x½", "it|'s| |1|2|3|4| x|½"),
        ("llama-bpe", "it's I'LL 1234 x\n\n  y!!\n", "it|'s| I|'LL| |123|4| x|\n\n| | y|!!\n"),
        ("llama3", "(a)b 12", "(a|)b| |12"),
        ("smaug-bpe", "12345", "123|45"),
        ("qwen2", "it's I'LL 12 x", "it|'s| I|'LL| |1|2| x"),
        ("deepseek-r1-qwen", "12", "1|2"),
        ("default", "it's $5 1234", "it|'|s| |$|5| |123|4"),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path: Path, pre: str, text: str, words: str) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": pre})
    pieces = rebuilt(tmp_path / "m.gguf").pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[begin:end] for _, (begin, end) in pieces) == words


def test_qwen2_composes_characters_and_others_do_not(tmp_path: Path) -> None:
    for pre, composed in (("qwen2", "\u00e9"), ("gpt-2", "e\u0301")):
        write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": pre})
        own = rebuilt(tmp_path / "m.gguf")
        assert own.decode(own.encode("e\u0301").ids) == composed


def test_llama3_takes_a_word_that_is_a_token_without_merging(tmp_path: Path) -> None:
    tokens, kinds, merges = byte_level_vocabulary()
    vocabulary = ([*tokens, "Ġwhole"], [*kinds, 1], merges)
    for pre, tokens_of in (("llama-bpe", ["<|turn|>", "Ġwhole"]), ("gpt-2", None)):
        write_gguf(
            tmp_path / "m.gguf",
            metadata={"tokenizer.ggml.pre": pre},
            without=("tokenizer.ggml.add_bos_token",),
            vocabulary=vocabulary,
        )
        got = rebuilt(tmp_path / "m.gguf").encode(" whole").tokens
        assert got == (tokens_of or list("Ġwhole"))


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({"add_bos_token": False}, "a"),
        ({"add_bos_token": True}, "<|turn|> a"),
        ({"add_bos_token": False, "add_eos_token": True}, "a <|end|>"),
        ({"add_bos_token": True, "add_eos_token": True}, "<|turn|> a <|end|>"),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, flags: dict[str, bool], ids: str
) -> None:
    from transformers import AutoTokenizer

    metadata = {f"tokenizer.ggml.{key}": value for key, value in flags.items()}
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    loaded = AutoTokenizer.from_pretrained(rebuild(tmp_path / "m.gguf"))
    assert loaded.convert_ids_to_tokens(loaded("a").input_ids) == ids.split()
    assert loaded("a", add_special_tokens=False).input_ids == [loaded.convert_tokens_to_ids("a")]


def test_a_special_token_may_hold_any_character(tmp_path: Path) -> None:
    tokens, kinds, merges = byte_level_vocabulary()
    tokens[1] = "$<:1>"
    write_gguf(
        tmp_path / "m.gguf",
        vocabulary=(tokens, kinds, merges),
        metadata={"tokenizer.ggml.add_bos_token": True},
    )
    own = rebuilt(tmp_path / "m.gguf")
    assert own.encode("a").tokens == ["$<:1>", "a"]
    assert own.encode("a", "b").tokens == ["$<:1>", "a", "$<:1>", "b"]


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    """A SentencePiece BPE with byte fallback, Llama 2's kind, trained on a few lines."""
    import sentencepiece

    rng = random.Random(1)
    words = ["the", "quick", "brown", "fox", "jumps", "lazy", "banana", "bandana", "aaaa", "été"]
    words += ["12", "2024"]
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=355,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_sentencepiece(
    path: Path, model: Any, without: tuple[str, ...] = (), **metadata: Any
) -> None:
    count = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(count)
    ]
    tokens = [model.id_to_piece(i) for i in range(count)]
    kinds[tokens.index("<tool>")] = 4
    write_gguf(
        path,
        vocabulary=(tokens, kinds, ["a b"]),
        metadata={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.scores": [float(model.get_score(i)) for i in range(count)],
            "tokenizer.ggml.bos_token_id": model.bos_id(),
            "tokenizer.ggml.eos_token_id": model.eos_id(),
            "tokenizer.ggml.unknown_token_id": model.unk_id(),
            **metadata,
        },
        without=("tokenizer.ggml.pre", "tokenizer.ggml.merges", *without),
    )


def test_a_sentencepiece_tokenizer_gives_sentencepieces_tokens(
    tmp_path: Path, sentencepiece_model: Any
) -> None:
    write_sentencepiece(tmp_path / "m.gguf", sentencepiece_model)
    own = rebuilt(tmp_path / "m.gguf")
    texts = ["the quick brown fox", "bandana banana  aaaaaaa", "foxes été 2024!", "漢🙂", "a\n b"]
    texts += random_strings("thequickbrownfoxabn é12 漢\n", 500)
    for text in texts:
        expected = sentencepiece_model.encode(text)
        got = own.encode(text, add_special_tokens=False)
        assert got.ids == expected, text
        assert own.decode(got.ids) == sentencepiece_model.decode(expected)


def test_sentencepiece_adds_bos_unless_the_file_says_no(
    tmp_path: Path, sentencepiece_model: Any
) -> None:
    write_sentencepiece(
        tmp_path / "m.gguf", sentencepiece_model, without=("tokenizer.ggml.add_bos_token",)
    )
    assert rebuilt(tmp_path / "m.gguf").encode("fox").tokens[0] == "<s>"
    write_sentencepiece(tmp_path / "n.gguf", sentencepiece_model)
    assert rebuilt(tmp_path / "n.gguf").encode("fox").tokens[0] != "<s>"


def test_the_space_in_front_is_left_out_where_the_file_says_so(
    tmp_path: Path, sentencepiece_model: Any
) -> None:
    write_sentencepiece(
        tmp_path / "m.gguf", sentencepiece_model, **{"tokenizer.ggml.add_space_prefix": False}
    )
    own = rebuilt(tmp_path / "m.gguf")
    assert own.encode("the fox", add_special_tokens=False).tokens[0].startswith("t")
    assert own.decode(own.encode(" the<tool> fox").ids) == " the<tool> fox"


def test_as_many_rows_as_tokens_are_needed(tmp_path: Path) -> None:
    tensors = llama_tensors(np.random.default_rng(0))
    tensors["token_embd.weight"] = np.zeros((100, HIDDEN), np.float32)
    write_gguf(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*269 tokens.*'token_embd\.weight'.*100"):
        rebuild(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        ({"tokenizer.ggml.model": "t5"}, ("tokenizer.ggml.model='t5'", "gpt2 and llama")),
        ({"tokenizer.ggml.pre": "falcon"}, ("tokenizer.ggml.pre='falcon'", "llama-bpe")),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, ("'a' twice",)),
        ({"tokenizer.ggml.token_type": [1, 1]}, ("token_type has 2 entries",)),
        ({"tokenizer.ggml.merges": ["nospace"]}, ("'nospace'", "no pair")),
        ({"tokenizer.ggml.merges": ["zz qq"]}, ("tokenizer.ggml.*", "zz")),
        ({"tokenizer.ggml.merges": [1, 2]}, ("tokenizer.ggml.merges", "list of str")),
        ({"tokenizer.ggml.eos_token_id": 9999}, ("eos_token_id=9999", "269 tokens")),
        ({"tokenizer.ggml.add_eos_token": 1}, ("add_eos_token", "true or false")),
        ({"tokenizer.chat_template": 5}, ("tokenizer.chat_template", "text")),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5, 0.25]},
            ("scores has 2 entries for 269",),
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(
    tmp_path: Path, metadata: dict[str, Any], parts: tuple[str, ...]
) -> None:
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        rebuild(tmp_path / "m.gguf")
    for part in ("m.gguf", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("key", ["tokens", "token_type", "model", "pre", "merges"])
def test_absent_tokenizer_metadata_is_named(tmp_path: Path, key: str) -> None:
    write_gguf(tmp_path / "m.gguf", without=(f"tokenizer.ggml.{key}",))
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*tokenizer\.ggml\.{key}"):
        rebuild(tmp_path / "m.gguf")


def test_bos_asked_for_but_absent_is_refused(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf",
        metadata={"tokenizer.ggml.add_bos_token": True},
        without=("tokenizer.ggml.bos_token_id",),
    )
    with pytest.raises(CheckpointError, match=r"add_bos_token is set.*bos_token_id"):
        rebuild(tmp_path / "m.gguf")


def test_the_alphabet_of_the_fixture_is_gpt2s() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
