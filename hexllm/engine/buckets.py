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


def ladder(first: tuple[int, ...], step: int, top: int) -> tuple[int, ...]:
    """Return ``first``, then ``step`` doubled again and again, all below ``top``, then ``top``."""
    sizes = set(first)
    size = step
    while size < top:
        sizes.add(size)
        size *= 2
    return (*sorted(size for size in sizes if size < top), top)


class Buckets:
    """Chooses the smallest shape that holds a step."""

    def __init__(self, settings: Settings, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        width = -(-max_model_len // block_size)
        padding = settings.prefill_len_padding
        top = -(-max_model_len // padding) * padding
        # Prompts shorter than one padding unit are common in chats: a few smaller sizes.
        small = tuple(size for size in (padding // 8, padding // 4, padding // 2) if size >= 16)
        self.prefill_tokens = ladder(small, padding, top)
        self.prefill_seqs = ladder((1,), settings.prefill_seqs_padding, settings.max_prefill_seqs)
        self.decode_seqs = ladder((1,), settings.decode_seqs_padding, settings.max_decode_seqs)
        self.decode_blocks = ladder((), settings.decode_blocks_padding, width)
        self._width = width
        # A prompt whose first blocks are in the cache attends to more than it computes.
        self._has_context = settings.enable_prefix_cache_hbm

    @property
    def max_prefill_tokens(self) -> int:
        """The most new tokens one step takes."""
        return self.prefill_tokens[-1]

    def prefill(self, tokens: int, seqs: int) -> StepShape:
        """Return the shape of a prefill of ``tokens`` new tokens in ``seqs`` sequences."""
        size = _at_least(self.prefill_tokens, tokens)
        blocks = min(-(-size // self.block_size), self._width)
        if self._has_context:
            blocks = self._width
        return StepShape(size, _at_least(self.prefill_seqs, seqs), blocks, size)

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
