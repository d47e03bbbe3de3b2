"""Gives requests their KV blocks: what a prefix cache has of them, fresh ones for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hexllm.engine.prefix_cache import Origin

if TYPE_CHECKING:
    from hexllm.engine.blocks import BlockManager
    from hexllm.engine.request import Request


def admit(blocks: BlockManager, request: Request, *, reserve: int, most: int | None) -> bool:
    """Give a request that holds nothing the blocks for all its tokens; False if it cannot be.

    ``request.num_computed`` is then how many tokens its blocks hold already.

    Args:
        blocks: Where they come from.
        request: Who gets them.
        reserve: Blocks that must be left free after that.
        most: How many of its tokens may be left to compute; None is any number.
    """
    _extend_keys(blocks, request)
    shared = blocks.share(request.keys, len(request.tokens))
    needed = blocks.blocks_for(len(request.tokens)) - len(shared)
    num_left = len(request.tokens) - len(shared) * blocks.block_size
    if (most is not None and num_left > most) or not blocks.can_allocate(needed + reserve):
        blocks.free(shared)
        return False
    request.blocks = shared + blocks.allocate(needed)
    request.num_computed = len(shared) * blocks.block_size
    request.num_remembered = len(shared)
    if request.num_preemptions == 0:
        request.num_cached_tokens = request.num_computed
    return True


def remember(blocks: BlockManager, request: Request) -> None:
    """Let others find the blocks that a request has filled with tokens that are known."""
    if blocks.cache is None:
        return
    num_full = min(request.num_computed, len(request.tokens)) // blocks.block_size
    if num_full <= request.num_remembered:
        return
    _extend_keys(blocks, request)
    for i in range(request.num_remembered, num_full):
        blocks.remember(request.blocks[i], request.keys[i])
    request.num_remembered = num_full


def release(blocks: BlockManager, request: Request) -> None:
    """Take a request's blocks; what it computed is to be computed again, or found."""
    blocks.free(request.blocks)
    request.blocks = []
    request.num_computed = 0
    request.num_remembered = 0


def _extend_keys(blocks: BlockManager, request: Request) -> None:
    """Bring the keys of a request's full blocks up to its tokens, which only grow."""
    if blocks.cache is not None:
        origin = Origin(blocks.cache.model, cache_salt=request.cache_salt)
        blocks.cache.extend(request.keys, request.tokens, origin)
