"""Which KV blocks hold the tokens that a prompt begins with.

A full block is known by a key: a digest over its own tokens and the key of the block before it, so
that equal keys mean equal tokens from the sequence's start. The chain begins at what else decides a
block's content, or who may see it (``Origin``).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.core.settings import Settings

Key = bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """What two sequences must share, besides their first tokens, to share blocks.

    Attributes:
        model: The model and its revision.
        adapter: A digest of the adapter's content; a name would live on over a reload. None
            without one.
        cache_salt: The request's own; None is a value of its own, not the empty string.
    """

    model: str
    adapter: str | None = None
    cache_salt: str | None = None

    def key(self) -> Key:
        """Return the key before the first block's."""
        # Quoted strings in fixed places: no two different origins are written alike.
        written = repr(("hexllm", self.model, self.adapter, self.cache_salt))
        return hashlib.sha256(written.encode("utf-8", "backslashreplace")).digest()


def next_key(before: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a full block of ``tokens`` after the block of key ``before``."""
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """The blocks that can be found by key, and in which order those that nobody holds are evicted.

    It says which block holds what; the block manager says who holds which block.
    """

    def __init__(self, model: str, block_size: int, unit: int | None = None) -> None:
        """Start empty.

        Args:
            model: The model and its revision, for ``Origin``.
            block_size: P.
            unit: Hits are whole multiples of so many tokens (rounded up to whole blocks), and of
                P where it is None.
        """
        self.model = model
        self.block_size = block_size
        self.unit = math.lcm(unit or block_size, block_size)
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # held by nobody, least recent first

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and that can be evicted."""
        return len(self._idle)

    def extend(self, keys: list[Key], tokens: Sequence[int], origin: Origin) -> None:
        """Append to ``keys`` those of the full blocks of ``tokens`` that it lacks."""
        size = self.block_size
        for i in range(len(keys), len(tokens) // size):
            before = keys[-1] if keys else origin.key()
            keys.append(next_key(before, tokens[i * size : (i + 1) * size]))

    def find(self, keys: Sequence[Key], num_tokens: int) -> list[int]:
        """Return the blocks that a sequence of ``num_tokens`` tokens can begin with.

        Args:
            keys: Of its full blocks, in order.
            num_tokens: One at least is left to compute: the first output needs its logits.
        """
        most = (num_tokens - 1) // self.unit * self.unit // self.block_size
        blocks: list[int] = []
        for key in keys[:most]:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        step = self.unit // self.block_size
        return blocks[: len(blocks) // step * step]

    def put(self, key: Key, block: int) -> None:
        """Remember what a block holds, from now until it is dropped; the first of a key stays."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def __contains__(self, block: int) -> bool:
        """Return whether a block can be found by a key."""
        return block in self._key_of

    def hold(self, block: int) -> None:
        """Learn that somebody holds a block."""
        self._idle.pop(block, None)

    def release(self, block: int) -> None:
        """Learn that nobody holds a block any more; its content stays until it is evicted."""
        self._idle[block] = None

    def evict(self) -> int:
        """Forget what the block holds that was released longest ago, and return the block."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block


def make_prefix_cache(settings: Settings) -> PrefixCache | None:
    """Return the cache that the settings ask for, None for none."""
    if not settings.enable_prefix_cache_hbm:
        return None
    unit = settings.prefill_len_padding if settings.prefix_cache_unit == "padding" else None
    return PrefixCache(f"{settings.model}@{settings.revision}", settings.block_size, unit)
