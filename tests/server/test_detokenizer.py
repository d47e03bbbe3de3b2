from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexllm.server.detokenizer import (
    ByteDecoder,
    StopScanner,
    WindowDecoder,
    open_text_stream,
)

if TYPE_CHECKING:
    from hexllm.server.tokenizer import Tokenizer

VOCAB = 400
token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=60)
fixture_is_constant = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
TEXT = "Grüße 🙂👩‍👩‍👧‍👦 é 你好 the end"


def stream_text(stream, ids) -> list[str]:
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.stopped_by is not None:
            return pieces
    pieces.append(stream.flush())
    return pieces


@pytest.mark.parametrize("skip", [True, False])
@fixture_is_constant
@given(ids=token_ids)
def test_a_byte_level_stream_is_the_decode_of_all_tokens(tokenizer, skip, ids):
    assert tokenizer.is_byte_level
    decoder = ByteDecoder(tokenizer, skip_special_tokens=skip)
    text = "".join(decoder.push(token_id) for token_id in ids) + decoder.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_an_incomplete_character_is_held_back_and_then_whole(tokenizer: Tokenizer):
    ids = [tokenizer_id(tokenizer, byte) for byte in TEXT.encode()]
    stream = open_text_stream(tokenizer, ())
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert stream.flush() == ""


def tokenizer_id(tokenizer: Tokenizer, byte: int) -> int:
    """The token that is this one byte."""
    return next(i for i in range(VOCAB) if tokenizer.token_bytes(i) == bytes([byte]))


def test_a_character_cut_off_at_the_end_is_shown_as_a_replacement(tokenizer):
    ids = [tokenizer_id(tokenizer, byte) for byte in "ab🙂".encode()[:-1]]
    stream = open_text_stream(tokenizer, ())
    assert "".join(stream.push(token_id) for token_id in ids) == "ab"
    assert stream.is_holding
    assert stream.flush() == "\ufffd"


@fixture_is_constant
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
def test_the_window_decoder_gives_the_text_that_follows_the_prompt(sentencepiece_like, text, cut):
    prompt, text = text[:cut], text[cut:]
    prompt_ids = sentencepiece_like.encode("a" + prompt, add_special_tokens=False)
    ids = sentencepiece_like.encode("a" + prompt + text, add_special_tokens=False)
    if ids[: len(prompt_ids)] != prompt_ids:
        return  # the text was not cut where a token ends
    decoder = WindowDecoder(sentencepiece_like, prompt_ids, skip_special_tokens=True)
    shown = "".join(decoder.push(i) for i in ids[len(prompt_ids) :]) + decoder.flush()
    whole = sentencepiece_like.decode(ids)
    if not sentencepiece_like.decode(prompt_ids).endswith("\ufffd"):
        assert sentencepiece_like.decode(prompt_ids) + shown == whole


def test_the_window_decoder_keeps_the_space_after_the_prompt(sentencepiece_like):
    prompt = sentencepiece_like.encode("hello", add_special_tokens=False)
    both = sentencepiece_like.encode("hello world", add_special_tokens=False)
    decoder = WindowDecoder(sentencepiece_like, prompt, skip_special_tokens=True)
    text = "".join(decoder.push(token_id) for token_id in both[len(prompt) :])
    assert text + decoder.flush() == " world"


def test_the_window_decoder_shows_endless_garbage_in_time(sentencepiece_like):
    byte = sentencepiece_like.encode("\u0080", add_special_tokens=False)[-1]  # <0x80>
    decoder = WindowDecoder(sentencepiece_like, (), skip_special_tokens=True)
    shown = [decoder.push(byte) for _ in range(64)]
    assert "\ufffd" in "".join(shown)
    assert len(decoder._window) < 32


@pytest.fixture(scope="session")
def sentencepiece_like():
    """A tokenizer that decodes as Llama 2's: a space mark, byte tokens, the first space gone."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    from hexllm.server.tokenizer import Tokenizer

    letters = [chr(c) for c in range(0x21, 0x7F)]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁", "▁w", "he"]
    backend = Backend(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("▁", "w"), ("h", "e")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert not tokenizer.is_byte_level
    return tokenizer


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, reading character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("abc", max_size=30)
stop_strings = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


@given(text=letters, stops=stop_strings, cuts=st.lists(st.integers(0, 30)))
def test_stop_strings_are_found_however_the_text_is_divided(text, stops, cuts):
    expected, matched = reference_stop(text, stops)
    scanner = StopScanner(stops)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    shown = ""
    for start, end in itertools.pairwise(bounds):
        shown += scanner.push(text[start:end])
        # Nothing is ever shown that has to be taken back.
        assert expected.startswith(shown)
    shown += "" if scanner.matched else scanner.flush()
    assert (shown, scanner.matched) == (expected, matched)


@given(text=letters, stops=stop_strings)
def test_text_is_held_back_only_while_it_may_begin_a_stop_string(text, stops):
    if reference_stop(text, stops)[1] is not None:
        return
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(char) for char in text)
    held = text[len(shown) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)


@fixture_is_constant
@given(ids=token_ids, data=st.data())
def test_a_stop_string_cut_from_the_text_itself_never_leaks(tokenizer, ids, data):
    text = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    if not stop:
        return
    stream = open_text_stream(tokenizer, (), stop=[stop])
    shown = "".join(stream_text(stream, ids))
    assert stop not in shown
    assert shown == text[: text.index(stop)]
    assert stream.stopped_by == stop


def test_the_stop_string_is_shown_when_it_is_asked_for():
    scanner = StopScanner(["STOP"], include_stop=True)
    assert scanner.push("go ST") == "go "
    assert scanner.push("OP and more") == "STOP"
    assert scanner.push("more") == ""
