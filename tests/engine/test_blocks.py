import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexllm.engine.blocks import BlockManager


@given(
    st.integers(1, 20),
    st.lists(st.one_of(st.integers(0, 6), st.integers(-10, -1)), max_size=60),
)
def test_equals_a_simple_model_of_it(num_blocks, actions):
    """Positive: allocate that many; negative: free what an earlier allocation got."""
    manager = BlockManager(num_blocks, block_size=4)
    held = []
    for action in actions:
        if action >= 0:
            used = sum(map(len, held))
            assert manager.can_allocate(action) == (used + action <= num_blocks)
            if manager.can_allocate(action):
                blocks = manager.allocate(action)
                assert len(blocks) == action
                held.append(blocks)
        elif held:
            manager.free(held.pop(action % len(held)))
        flat = [block for blocks in held for block in blocks]
        assert len(set(flat)) == len(flat)
        assert all(0 <= block < num_blocks for block in flat)
        assert manager.num_free == num_blocks - len(flat)


def test_a_block_freed_twice_is_a_bug_that_shows():
    manager = BlockManager(3, 4)
    blocks = manager.allocate(2)
    manager.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        manager.free(blocks[:1])


def test_too_few_blocks_is_a_bug_that_shows():
    with pytest.raises(RuntimeError, match="3 KV blocks asked for, 2 are free"):
        BlockManager(2, 4).allocate(3)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens, blocks):
    assert BlockManager(8, 4).blocks_for(tokens) == blocks
