"""Prompts of an exact number of tokens, counted with the model's own tokenizer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads import Workload

NOUNS = (
    "harbour lantern orchard violin glacier compass bakery meadow engine library sailor thunder "
    "carpet chimney planet river basket doctor winter market painter valley ladder signal forest "
    "teacher castle mirror tunnel garden kettle island pocket village shadow window"
)
VERBS = (
    "follows remembers repairs carries watches measures paints answers crosses borrows hides opens "
    "studies builds warms divides forgets lifts collects describes visits protects"
)
ADJECTIVES = (
    "quiet golden narrow distant patient broken careful northern hollow gentle curious early "
    "heavy silver ordinary crowded bitter famous sudden pale"
)

#: Text cut at a token's end seldom encodes to another count; then other text is tried.
ATTEMPTS = 100


class Encoding(Protocol):
    """The part of ``tokenizers.Encoding`` that is used."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        ...


class Tokenizer(Protocol):
    """The part of ``tokenizers.Tokenizer`` that is used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Turn text into tokens."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Turn tokens into text."""
        ...


def load_tokenizer(source: str) -> Tokenizer:
    """Load a tokenizer from a ``tokenizer.json``, or from any model that hexllm can open.

    Raises:
        HexllmError: Nothing is there, or it has no tokenizer.json.
    """
    from tokenizers import Tokenizer as FastTokenizer

    path = Path(source)
    if path.is_dir():
        path /= "tokenizer.json"
    if not (path.is_file() and path.suffix == ".json"):
        path = _tokenizer_file_of_model(source)
    tokenizer: Tokenizer = FastTokenizer.from_file(str(path))
    return tokenizer


def _tokenizer_file_of_model(uri: str) -> Path:
    """Return the path of the tokenizer.json that hexllm's loaders give for ``uri``."""
    from hexllm.core.errors import CheckpointError
    from hexllm.core.plugins import load_plugins
    from hexllm.core.settings import PluginSettings

    path = load_plugins(PluginSettings()).open_checkpoint(uri).file("tokenizer.json")
    if path is None:
        raise CheckpointError(f"{uri} has no tokenizer.json: name one with --tokenizer=PATH.")
    return path


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Return how many tokens ``text`` is, without special tokens."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def build_prompts(tokenizer: Tokenizer, workload: Workload, seed: int) -> list[str]:
    """Return one prompt a request; another seed gives other text, the shared prefix included.

    Raises:
        ValueError: The tokenizer never gave the length asked for.
    """
    rng = random.Random(seed)
    prefix = _extend(tokenizer, rng, "", workload.shared_prefix_len)
    return [_extend(tokenizer, rng, prefix, workload.input_len) for _ in range(workload.requests)]


def _extend(tokenizer: Tokenizer, rng: random.Random, prefix: str, length: int) -> str:
    """Return ``prefix`` with exactly ``length`` tokens more, its own tokens unchanged.

    Raises:
        ValueError: No such text was found.
    """
    if length == 0:
        return prefix
    before = tokenizer.encode(prefix, add_special_tokens=False).ids
    end = len(before) + length
    for _ in range(ATTEMPTS):
        ids: list[int] = []
        text = prefix
        while len(ids) < end:
            # A sentence is eight tokens at least, so this ends after few rounds.
            missing = (end - len(ids)) // 8 + 1
            text = " ".join([*([text] if text else []), *(_sentence(rng) for _ in range(missing))])
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        # The whole is decoded, not the new part alone: many tokenizers drop a leading space.
        candidate = tokenizer.decode(ids[:end], skip_special_tokens=False)
        again = tokenizer.encode(candidate, add_special_tokens=False).ids
        if candidate.startswith(prefix) and len(again) == end and again[: len(before)] == before:
            return candidate
    raise ValueError(f"This tokenizer gave no text of exactly {end} tokens in {ATTEMPTS} tries.")


def _sentence(rng: random.Random) -> str:
    """Return a sentence of ten words or so."""

    def pick(words: str) -> str:
        return rng.choice(words.split())

    count = rng.choice(("one", "two", "seven", "forty", "a hundred", "no"))
    return (
        f"The {pick(ADJECTIVES)} {pick(NOUNS)} {pick(VERBS)} {count} {pick(ADJECTIVES)} "
        f"{pick(NOUNS)}s near the {pick(NOUNS)}."
    )
