"""Prompts have exactly the length asked for, whatever the tokenizer."""

from __future__ import annotations

import dataclasses

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import prompts
from benchmarks.workloads import WORKLOADS, Workload

CORPUS = [prompts.NOUNS, prompts.VERBS, prompts.ADJECTIVES, "The near the one two seven forty."]


@pytest.fixture(scope="module", params=[260, 300, 900])
def tokenizer(request):
    """Byte-level BPE; a small vocabulary merges little, so that cuts fall inside words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=request.param, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


@pytest.mark.parametrize("length", [1, 2, 17, 128])
@pytest.mark.parametrize("shared", [0, 1, 50])
def test_exact_lengths_behind_one_shared_prefix(tokenizer, length, shared):
    workload = Workload(6, 2, input_len=length, output_len=1, shared_prefix_len=shared)
    texts = prompts.build_prompts(tokenizer, workload, seed=3)
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert {len(ids) for ids in encoded} == {shared + length}
    assert len({tuple(ids[:shared]) for ids in encoded}) == 1
    if length >= 17:
        assert len(set(texts)) == len(texts)


def test_a_seed_gives_the_same_text_and_another_seed_another_prefix(tokenizer):
    workload = Workload(2, 1, input_len=20, output_len=1, shared_prefix_len=40)
    once = prompts.build_prompts(tokenizer, workload, seed=1)
    assert once == prompts.build_prompts(tokenizer, workload, seed=1)
    other = prompts.build_prompts(tokenizer, workload, seed=2)
    assert once[0][:60] != other[0][:60]


def test_a_tokenizer_that_loses_text_is_refused():
    class Lossy:
        def encode(self, text, *, add_special_tokens):
            return type("Encoding", (), {"ids": [1] * len(text)})

        def decode(self, ids, *, skip_special_tokens):
            return "x" * (len(ids) + 1)

    with pytest.raises(ValueError, match="no text of exactly 5 tokens"):
        prompts.build_prompts(Lossy(), Workload(1, 1, 5, 1), seed=0)


def test_a_tokenizer_is_loaded_from_a_file_or_its_folder(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    for source in (path, tmp_path):
        loaded = prompts.load_tokenizer(str(source))
        assert prompts.count_tokens(loaded, "The lantern") == prompts.count_tokens(
            tokenizer, "The lantern"
        )


def test_the_named_workloads_are_those_of_the_published_figures():
    table = {
        name: (w.requests, w.concurrency, w.prompt_len, w.output_len)
        for name, w in WORKLOADS.items()
    }
    assert table == {
        "A": (8, 1, 128, 128),
        "B": (32, 8, 256, 128),
        "C": (64, 32, 256, 64),
        "D": (32, 8, 1088, 32),
        "E": (8, 4, 2000, 8),
    }
    assert "1024 shared + 64 tokens in" in WORKLOADS["D"].describe()
    assert dataclasses.replace(WORKLOADS["A"], requests=2).requests == 2
