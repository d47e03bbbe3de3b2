import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexllm.core.settings import Settings
from hexllm.engine.buckets import Buckets, StepShape, ladder


@pytest.mark.parametrize(
    ("first", "step", "top", "sizes"),
    [
        ((1,), 8, 256, (1, 8, 16, 32, 64, 128, 256)),
        ((1,), 8, 20, (1, 8, 16, 20)),
        ((1,), 8, 1, (1,)),
        ((), 128, 64, (64,)),
        ((64, 128), 512, 512, (64, 128, 512)),
    ],
)
def test_ladder(first, step, top, sizes):
    assert ladder(first, step, top) == sizes


@given(
    st.integers(1, 3000),
    st.integers(1, 40),
    st.integers(1, 300),
    st.data(),
)
def test_every_step_that_can_occur_has_a_shape_that_holds_it(length, prefills, running, data):
    settings = Settings(
        model="m", max_prefill_seqs=prefills, max_decode_seqs=running, prefill_len_padding=64
    )
    buckets = Buckets(settings, length, block_size=16)
    shapes = set(buckets.shapes())
    assert len(shapes) == len(buckets.shapes())
    tokens = data.draw(st.integers(1, buckets.max_prefill_tokens))
    seqs = data.draw(st.integers(1, prefills))
    shape = buckets.prefill(tokens, seqs)
    assert shape in shapes
    assert shape.tokens >= tokens
    assert shape.seqs >= seqs
    assert shape.blocks * 16 >= min(tokens, length)
    seqs = data.draw(st.integers(1, running))
    blocks = data.draw(st.integers(1, -(-length // 16)))
    shape = buckets.decode(seqs, blocks)
    assert shape in shapes
    assert shape.tokens == shape.seqs >= seqs
    assert shape.blocks >= blocks


def test_defaults_of_a_long_model_need_few_programs():
    buckets = Buckets(Settings(model="m"), 8192, block_size=32)
    shapes = buckets.shapes()
    assert len([s for s in shapes if s.max_query_len == 1]) == 14
    assert len([s for s in shapes if s.max_query_len > 1]) == 8
    assert buckets.decode(3, 10) == StepShape(8, 8, 128, 1)
    assert buckets.prefill(200, 1) == StepShape(256, 1, 8, 256)
