"""The block manager: who holds which KV blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.engine.prefix_cache import Key, PrefixCache


class BlockManager:
    """Hands out KV blocks by number and takes them back.

    With a prefix cache, sequences that begin alike hold the same blocks, and blocks that nobody
    holds keep their content until they are needed: those count as free, and are handed out after
    the empty ones, the least recently released first. A shared block is full, so nobody writes it.

    Empty blocks freed last are handed out first: they are likelier to be in a CPU's cache.
    """

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = cache
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._empty) + (self.cache.num_idle if self.cache else 0)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, count: int) -> bool:
        """Return whether ``count`` blocks are free."""
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` blocks that nobody else holds.

        Raises:
            RuntimeError: Too few are free; ask ``can_allocate`` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} KV blocks asked for, {self.num_free} are free")
        taken = [self._take() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, keys: Sequence[Key], num_tokens: int) -> list[int]:
        """Hold the blocks that a sequence of ``num_tokens`` tokens begins with, and return them.

        Args:
            keys: Of its full blocks, in order.
            num_tokens: All of its tokens, of which one at least is left to compute.
        """
        if self.cache is None:
            return []
        blocks = self.cache.find(keys, num_tokens)
        for block in blocks:
            self._holders[block] += 1
            self.cache.hold(block)
        return blocks

    def remember(self, block: int, key: Key) -> None:
        """Let others find a block by its key: it is full, and its holder writes it no more.

        Raises:
            RuntimeError: Nobody holds it, so it may be anybody's next.
        """
        if not self._holders[block]:
            raise RuntimeError(f"KV block {block} is held by nobody and cannot be remembered")
        if self.cache is not None:
            self.cache.put(key, block)

    def free(self, blocks: Sequence[int]) -> None:
        """Take a sequence's blocks back, each from one holder.

        Raises:
            RuntimeError: A block is free already, so two requests believed that they held it.
        """
        # From the end: a prefix without its tail is of use, a tail without its prefix is not.
        for block in reversed(blocks):
            if not self._holders[block]:
                raise RuntimeError(f"KV block {block} was freed twice")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self.cache is not None and block in self.cache:
                self.cache.release(block)
            else:
                self._empty.append(block)

    def _take(self) -> int:
        if self._empty or self.cache is None:
            return self._empty.pop()
        return self.cache.evict()
