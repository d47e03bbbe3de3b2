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


@given(
    st.integers(1, 3000),
    st.integers(1, 300),
    st.sampled_from([16, 64, 512]),
    st.integers(1, 1000),
    st.data(),
)
def test_every_mixed_step_has_a_shape_that_holds_it(length, running, padding, more, data):
    settings = Settings(
        model="m",
        max_decode_seqs=running,
        prefill_len_padding=padding,
        enable_chunked_prefill=True,
        max_num_batched_tokens=running + more,
    )
    buckets = Buckets(settings, length, block_size=16)
    assert buckets.max_prefill_tokens == running + more
    shapes = buckets.shapes()
    assert len(set(shapes)) == len(shapes)
    seqs = data.draw(st.integers(1, running))
    tokens = data.draw(st.integers(seqs, running + more))
    shape = buckets.prefill(tokens, seqs)
    assert shape in shapes
    assert shape.tokens == shape.max_query_len >= max(tokens, shape.seqs)
    assert shape.seqs >= seqs
    assert shape.blocks * 16 >= length  # a piece's sequence may be as long as any


def test_chunked_prefill_takes_hex_llms_sizes_by_default():
    chunked = {"model": "m", "enable_chunked_prefill": True}
    buckets = Buckets(Settings(**chunked), 8192, block_size=32)
    assert buckets.prefill_tokens == (32, 64, 128, 256, 512, 768)
    assert buckets.prefill_seqs == (1, 16, 64, 256)
    assert buckets.max_prefill_seqs == 5
    assert len(buckets.shapes()) == 14 + 20
    assert Buckets(Settings(**chunked, max_decode_seqs=900), 8192, 32).max_prefill_tokens == 1156


def test_a_cached_prefix_needs_the_whole_width_of_the_table():
    settings = Settings(model="m", enable_prefix_cache_hbm=True)
    assert Buckets(settings, 8192, block_size=32).prefill(10, 1) == StepShape(64, 1, 256, 64)


def test_defaults_of_a_long_model_need_few_programs():
    buckets = Buckets(Settings(model="m"), 8192, block_size=32)
    shapes = buckets.shapes()
    assert len([s for s in shapes if s.max_query_len == 1]) == 14
    assert len([s for s in shapes if s.max_query_len > 1]) == 8
    assert buckets.decode(3, 10) == StepShape(8, 8, 128, 1)
    assert buckets.prefill(200, 1) == StepShape(256, 1, 8, 256)
