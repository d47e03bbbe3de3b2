"""The few shapes a step may have. Everything a step needs is padded to one of them.

Sizes double from the configured padding, so that a server compiles a handful of programs and
padding wastes less than half of a step at worst.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hexllm.core.settings import Settings


@dataclass(frozen=True, slots=True)
class StepShape:
    """The static sizes of a step's program.

    Attributes:
        tokens: T.
        seqs: S.
        blocks: B, the width of the block tables.
        max_query_len: 1 for decode; the longest query of a prefill, which is T.
    """

    tokens: int
    seqs: int
    blocks: int
    max_query_len: int

    def __str__(self) -> str:
        if self.max_query_len == 1:
            return f"decode of {self.seqs} sequences, {self.blocks} blocks each"
        return f"prefill of {self.tokens} tokens, {self.seqs} sequences"


#: Hex-LLM's sizes of a step of chunked prefill: its tokens, what they are padded to multiples of,
#: and the most prompts that it has pieces of.
CHUNK_TOKENS = 768
CHUNK_PADDING = 256
MAX_PIECES = 5


def step_budget(settings: Settings) -> int:
    """Return the most tokens of a step with chunked prefill."""
    least = settings.max_decode_seqs + CHUNK_PADDING
    return settings.max_num_batched_tokens or max(CHUNK_TOKENS, least)


def ladder(first: tuple[int, ...], step: int, top: int) -> tuple[int, ...]:
    """Return ``first``, then ``step`` doubled again and again, all below ``top``, then ``top``."""
    sizes = set(first)
    size = step
    while size < top:
        sizes.add(size)
        size *= 2
    return (*sorted(size for size in sizes if size < top), top)


class Buckets:
    """Chooses the smallest shape that holds a step.

    Attributes:
        block_size: P.
        prefill_tokens: Sizes of T of a prefill, or of a mixed step.
        prefill_seqs: Sizes of its S.
        max_prefill_seqs: The most sequences whose prompts, or pieces of them, one step computes.
        decode_seqs: Sizes of T and S of a decode.
        decode_blocks: Sizes of its B.
    """

    def __init__(self, settings: Settings, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        width = -(-max_model_len // block_size)
        is_chunked = settings.enable_chunked_prefill
        padding = settings.prefill_len_padding
        if is_chunked:
            padding = min(padding, CHUNK_PADDING)
        top = step_budget(settings) if is_chunked else -(-max_model_len // padding) * padding
        # Prompts shorter than one padding unit are common in chats: a few smaller sizes.
        small = tuple(size for size in (padding // 8, padding // 4, padding // 2) if size >= 16)
        self.prefill_tokens = ladder(small, padding, top)
        self.decode_seqs = ladder((1,), settings.decode_seqs_padding, settings.max_decode_seqs)
        self.prefill_seqs = ladder((1,), settings.prefill_seqs_padding, settings.max_prefill_seqs)
        self.max_prefill_seqs = settings.max_prefill_seqs
        if is_chunked:
            # Pieces beside all that decode: every other size, or there would be too many shapes.
            self.prefill_seqs = self.decode_seqs[::-2][::-1]
            self.max_prefill_seqs = max(settings.max_prefill_seqs, MAX_PIECES)
        self.decode_blocks = ladder((), settings.decode_blocks_padding, width)
        self._width = width
        # Where a prompt's first tokens are in the cache, it attends to more than it computes.
        self._has_context = is_chunked or settings.enable_prefix_cache_hbm

    @property
    def max_prefill_tokens(self) -> int:
        """The most new tokens one step takes."""
        return self.prefill_tokens[-1]

    def prefill(self, tokens: int, seqs: int) -> StepShape:
        """Return the shape of a prefill of ``tokens`` new tokens in ``seqs`` sequences.

        With chunked prefill, some of the sequences may be decoding.
        """
        seqs = _at_least(self.prefill_seqs, seqs)
        size = _at_least(self.prefill_tokens, max(tokens, seqs))
        blocks = min(-(-size // self.block_size), self._width)
        if self._has_context:
            blocks = self._width
        return StepShape(size, seqs, blocks, size)

    def decode(self, seqs: int, blocks: int) -> StepShape:
        """Return the shape of a decode of ``seqs`` sequences of at most ``blocks`` blocks."""
        size = _at_least(self.decode_seqs, seqs)
        return StepShape(size, size, _at_least(self.decode_blocks, blocks), 1)

    def shapes(self) -> list[StepShape]:
        """Return every shape that can occur, the ones that take longest to compile first."""
        prefills = {self.prefill(t, s) for t in self.prefill_tokens for s in self.prefill_seqs}
        decodes = {self.decode(s, b) for s in self.decode_seqs for b in self.decode_blocks}
        return sorted(prefills | decodes, key=lambda s: (s.tokens, s.seqs, s.blocks), reverse=True)


def _at_least(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
