from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexllm.core.settings import Settings
from hexllm.engine.blocks import BlockManager
from hexllm.engine.prefix_cache import Origin, PrefixCache, make_prefix_cache, next_key
from tests.engine.tiny import make_engine, request, run, write_model

P = 4


def keys_of(cache, tokens, **origin):
    keys = []
    cache.extend(keys, tokens, Origin(cache.model, **origin))
    return keys


def fill(manager, tokens, **origin):
    """Do what a sequence does: share, allocate the rest, remember its full blocks."""
    keys = keys_of(manager.cache, tokens, **origin)
    shared = manager.share(keys, len(tokens))
    blocks = shared + manager.allocate(manager.blocks_for(len(tokens)) - len(shared))
    for block, key in zip(blocks, keys, strict=False):
        manager.remember(block, key)
    return blocks, len(shared)


def test_origins_differ_in_each_of_their_parts():
    origins = [
        Origin("m"),
        Origin("n"),
        Origin("m", adapter="a"),
        Origin("m", cache_salt="a"),
        Origin("m", adapter="a', 'b"),
        Origin("m", adapter="a", cache_salt="b"),
        Origin("m", cache_salt="None"),
        Origin("m", cache_salt="\ud800"),
    ]
    assert len({origin.key() for origin in origins}) == len(origins)


def test_a_key_depends_on_all_tokens_before_and_on_nothing_after():
    cache = PrefixCache("m", P)
    keys = keys_of(cache, range(12))
    assert len(set(keys)) == 3
    assert keys_of(cache, [*range(8), 99, 9, 10, 11])[:2] == keys[:2]
    assert not set(keys_of(cache, [99, *range(1, 12)])) & set(keys)
    assert keys_of(cache, range(15)) == keys  # a block that is not full has none
    assert next_key(keys[0], [4, 5, 6, 7]) == keys[1]


@pytest.mark.parametrize(
    ("unit", "num_tokens", "hit"),
    [
        (None, 16, 12),
        (None, 17, 16),
        (None, 4, 0),
        (8, 16, 8),
        (8, 17, 16),
        (6, 17, 12),
        (6, 12, 0),
    ],
)
def test_hits_are_whole_units_and_leave_a_token_to_compute(unit, num_tokens, hit):
    manager = BlockManager(20, P, PrefixCache("m", P, unit))
    fill(manager, range(16))
    assert fill(manager, range(num_tokens))[1] * P == hit


@pytest.mark.parametrize("origin", [{"cache_salt": "a"}, {"adapter": "a"}])
def test_another_origin_shares_nothing(origin):
    manager = BlockManager(20, P, PrefixCache("m", P))
    fill(manager, range(16))
    assert fill(manager, range(16), **origin)[1] == 0
    assert fill(manager, range(16), **origin)[1] == 3


def test_the_least_recently_released_goes_first_and_tails_before_prefixes():
    manager = BlockManager(6, P, PrefixCache("m", P))
    old, _ = fill(manager, range(8))
    new, _ = fill(manager, range(50, 58))
    manager.free(old)
    manager.free(new)
    manager.free(manager.share(keys_of(manager.cache, range(9)), 9))  # old is used again
    assert manager.num_free == 6
    taken = manager.allocate(5)
    assert set(taken[:2]) == set(range(6)) - {*old, *new}  # empty ones before any is evicted
    assert taken[2:] == [new[1], new[0], old[1]]
    assert manager.share(keys_of(manager.cache, range(9)), 9) == [old[0]]
    assert manager.num_free == 0


def test_what_nobody_holds_cannot_be_remembered():
    manager = BlockManager(2, P, PrefixCache("m", P))
    with pytest.raises(RuntimeError, match="held by nobody"):
        manager.remember(0, b"key")


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([None, 8]),
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.integers(1, 20), st.sampled_from([None, "salt"])),
            st.integers(0, 9),
        ),
        max_size=60,
    ),
)
def test_equals_a_simple_model_of_it(num_blocks, unit, actions):
    """A tuple is a sequence that comes (family, length, salt), a number is one that goes."""
    manager = BlockManager(num_blocks, P, PrefixCache("m", P, unit))
    content = {}  # block -> the (salt, tokens up to its end) that were written there
    held = []
    for action in actions:
        if isinstance(action, int):
            if held:
                manager.free(held.pop(action % len(held)))
        else:
            family, length, salt = action
            tokens = tuple((family, i)[i % 2] for i in range(length))
            keys = keys_of(manager.cache, tokens, cache_salt=salt)
            shared = manager.share(keys, length)
            assert len(shared) * P < length
            assert len(shared) * P % (unit or P) == 0
            for i, block in enumerate(shared):
                assert content[block] == (salt, tokens[: (i + 1) * P])
            needed = manager.blocks_for(length) - len(shared)
            if not manager.can_allocate(needed):
                manager.free(shared)
                continue
            fresh = manager.allocate(needed)
            assert not {*fresh} & {block for blocks in held for block in blocks}
            assert not {*fresh} & {*shared}
            for i, block in enumerate(fresh, start=len(shared)):
                content[block] = (salt, tokens[: (i + 1) * P])
                if (i + 1) * P <= length:
                    manager.remember(block, keys[i])
            held.append(shared + fresh)
        in_use = {block for blocks in held for block in blocks}
        assert manager.num_free == num_blocks - len(in_use)
    for blocks in held:
        manager.free(blocks)
    assert manager.num_free == num_blocks
    assert sorted(manager.allocate(num_blocks)) == list(range(num_blocks))


def test_the_settings_say_what_is_cached():
    assert make_prefix_cache(Settings(model="m")) is None
    on = {"model": "m", "enable_prefix_cache_hbm": True}
    assert make_prefix_cache(Settings(**on)).unit == 512
    assert make_prefix_cache(Settings(**on, prefix_cache_unit="block")).unit == 32
    assert make_prefix_cache(Settings(**on, block_size=2048)).unit == 2048
    models = {make_prefix_cache(Settings(**on, revision=r)).model for r in (None, "a")}
    assert len(models) == 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cached(directory):
    return make_engine(directory, "--enable_prefix_cache_hbm", "--max_prefill_seqs=2")


def ask(engine, message):
    """Return a request's tokens and how many of its prompt's were in the cache."""
    engine.handle(message)
    tokens, hits = (), set()
    while engine.has_work:
        engine.advance()
        for output in outputs.outputs if (outputs := engine.take_outputs()) else ():
            tokens += output.token_ids
            hits.add(output.num_cached_tokens)
    (hit,) = hits
    return tokens, hit


def test_a_hit_gives_the_same_tokens_and_is_reported(cached, directory):
    plain = make_engine(directory)
    shared = [(i * 7) % 97 for i in range(140)]
    for i, (length, hit) in enumerate([(140, 0), (140, 128), (128, 64), (100, 64), (64, 0)]):
        message = request(str(i), [*shared[:length]], 8, eos=(), logprobs=1)
        before = cached.stats().num_prompt_tokens
        tokens, found = ask(cached, message)
        assert (length, found) == (length, hit)
        assert cached.stats().num_prompt_tokens - before == length - hit
        assert tokens == run(plain, message)[0][0]
    assert ask(cached, request("other", [96, *shared[1:]], 1))[1] == 0
    assert cached.stats().num_free_blocks == cached.stats().num_blocks
    assert cached.stats().num_late_compiles == 0


def test_a_salt_keeps_its_prompts_apart(cached):
    prompt = [3] * 100
    hits = []
    for i, salt in enumerate([None, "a", "a", "b", None]):
        plain = request(str(i), prompt, 1)
        hits.append(ask(cached, replace(plain, cache_salt=salt))[1])
    assert hits == [0, 0, 64, 0, 64]


def test_outputs_are_found_too_by_block(directory):
    engine = make_engine(directory, "--enable_prefix_cache_hbm", "--prefix_cache_unit=block")
    prompt = [(i * 5) % 97 for i in range(30)]
    tokens, hit = ask(engine, request("a", prompt, 20, eos=()))
    assert hit == 0
    # 49 of 50 tokens were computed: the last one was sampled, and nobody asked what follows it.
    again, hit = ask(engine, request("b", [*prompt, *tokens, 1, 2, 3], 5, eos=()))
    assert hit == 48
    plain = make_engine(directory)
    assert again == run(plain, request("b", [*prompt, *tokens, 1, 2, 3], 5, eos=()))[0][0]
