"""Rebuilds a model's tokenizer from GGUF metadata, with the ``tokenizers`` library.

transformers can do this too, but needs torch for it and drops ``tokenizer.ggml.pre``, which says
how text is cut before merging (SmolLM2 takes each digit for itself).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hexllm.plugins.loaders.gguf_file import GgufFile

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (_CONTRACTIONS + _WORDS % "{1,3}",)
_QWEN2 = (_CONTRACTIONS + _WORDS % "",)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

#: By tokenizer.ggml.pre: the expressions that cut the text, one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    # What llama.cpp does with a file that says no more than this.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
#: Those whose own tokenizer composes characters first.
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
#: Those that take a word that is a token as it is, without merging, and begin with BOS.
_LLAMA3_NAMES = frozenset({"llama3", "llama-v3", "llama-bpe"})


def write_tokenizer(file: GgufFile, directory: Path, config: dict[str, Any]) -> None:
    """Write the tokenizer's files into ``directory``.

    They are tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Raises:
        CheckpointError: The metadata holds no tokenizer, one of an unknown kind, or a broken one.
    """
    tokens = cast("list[str]", file.items("tokenizer.ggml.tokens", str))
    if len(tokens) > config["vocab_size"]:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens holds {len(tokens)} tokens, but the tensor "
            f"'token_embd.weight' only {config['vocab_size']} rows."
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocabulary[token] != number)
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens holds {twice!r} twice.")
    kinds = cast("list[int]", file.items("tokenizer.ggml.token_type", int))
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} "
            f"tokens."
        )
    model = file.text("tokenizer.ggml.model")
    builders: dict[str, Callable[[GgufFile, dict[str, int], list[int]], Tokenizer]] = {
        "gpt2": _build_byte_level,
        "llama": _build_sentencepiece,
    }
    if model not in builders:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model={model!r} cannot be rebuilt; "
            f"{' and '.join(builders)} can. Serve the model's safetensors checkpoint instead."
        )
    special = _special_tokens(file, tokens)
    try:
        tokenizer = builders[model](file, vocabulary, kinds)
        kinds_of = list(zip(tokens, kinds, strict=True))
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in kinds_of
                if kind in (_UNKNOWN, _CONTROL)
            ]
        )
        tokenizer.add_tokens(
            [
                AddedToken(token, special=False, normalized=False)
                for token, kind in kinds_of
                if kind == _USER_DEFINED
            ]
        )
        _add_ends(file, tokenizer, special, model)
        tokenizer.save(str(directory / "tokenizer.json"))
    except CheckpointError:
        raise
    # tokenizers raises bare Exception for whatever it finds wrong in a vocabulary.
    except Exception as error:
        raise CheckpointError(
            f"{file.path}: the metadata tokenizer.ggml.* is no working tokenizer: {error}"
        ) from error
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **special,
    }
    template = _chat_template(file)
    if template is not None:
        settings["chat_template"] = template
    for name, content in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", special),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in keys.items():
        key = f"tokenizer.ggml.{key}_token_id"
        if key in file.metadata:
            number = file.integer(key)
            if not 0 <= number < len(tokens):
                raise CheckpointError(
                    f"{file.path}: {key}={number} is none of the {len(tokens)} tokens."
                )
            special[name] = tokens[number]
    return special


def _chat_template(file: GgufFile) -> str | list[dict[str, str]] | None:
    key = "tokenizer.chat_template"
    default = file.text(key) if key in file.metadata else None
    named = [
        {"name": name.removeprefix(f"{key}."), "template": file.text(name)}
        for name in file.metadata
        if name.startswith(f"{key}.")
    ]
    if not named:
        return default
    if default is not None:
        named.insert(0, {"name": "default", "template": default})
    return named


def _add_ends(file: GgufFile, tokenizer: Tokenizer, special: dict[str, str], model: str) -> None:
    """Make the tokenizer add BOS and EOS where the file, or its kind by default, says so."""
    begins = model == "llama" or file.metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    ends: dict[str, str] = {}
    for name, default in (("bos", begins), ("eos", False)):
        if not file.flag(f"tokenizer.ggml.add_{name}_token", default):
            continue
        if f"{name}_token" not in special:
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.add_{name}_token is set, but there is no "
                f"tokenizer.ggml.{name}_token_id."
            )
        ends[name] = special[f"{name}_token"]
    if not ends:
        return
    first = ["BOS"] if "bos" in ends else []
    last = ["EOS"] if "eos" in ends else []
    second = [f"{piece}:1" for piece in (*first, "$B", *last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *second],
        # Names of our own: a token with a colon in it would be misread as one with a type.
        special_tokens=[
            {"id": name.upper(), "ids": [tokenizer.token_to_id(token)], "tokens": [token]}
            for name, token in ends.items()
        ],
    )


def _build_byte_level(file: GgufFile, vocabulary: dict[str, int], kinds: list[int]) -> Tokenizer:
    """Build a byte-level BPE, GPT-2's kind."""
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} says in an unknown way how text is cut into "
            f"words; {', '.join(_SPLITS)} are known. Serve the model's safetensors checkpoint "
            f"instead."
        )
    merges = []
    for merge in file.items("tokenizer.ggml.merges", str):
        # A token may begin with a space of its own, so that the first one never separates.
        cut = merge.find(" ", 1)
        if cut < 0:
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.merges holds {merge!r}, which is no pair of tokens."
            )
        merges.append((merge[:cut], merge[cut + 1 :]))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA3_NAMES)
    )
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(file: GgufFile, vocabulary: dict[str, int], kinds: list[int]) -> Tokenizer:
    """Build SentencePiece's BPE: of all adjacent pairs that make a token, the best score first."""
    scores = cast("list[float]", file.items("tokenizer.ggml.scores", float))
    if len(scores) != len(vocabulary):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for "
            f"{len(vocabulary)} tokens."
        )
    ranked = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[number], number, left, right, token[:cut], token[cut:]))
    ranked.sort()
    unknown = next(
        (token for token, number in vocabulary.items() if kinds[number] == _UNKNOWN), None
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer
