"""The block manager: which KV blocks are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class BlockManager:
    """Hands out KV blocks by number and takes them back.

    Blocks freed last are handed out first: they are likelier to be in a CPU's cache.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, count: int) -> bool:
        """Return whether ``count`` blocks are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` blocks that nobody else holds.

        Raises:
            RuntimeError: Too few are free; ask ``can_allocate`` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_free[block] = False
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            RuntimeError: A block is free already, so two requests believed that they held it.
        """
        for block in blocks:
            if self._is_free[block]:
                raise RuntimeError(f"KV block {block} was freed twice")
            self._is_free[block] = True
            self._free.append(block)
