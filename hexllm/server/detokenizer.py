"""Turns token ids into text as they come: no split characters, and no stop string ever shown.

A response that is not streamed is the concatenation of the same pieces, so both are one text.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
#: Prompt tokens that are decoded together with the first new ones, so that a decoder which strips
#: a leading space keeps the one between the prompt and its continuation.
_CONTEXT_TOKENS = 6
#: A character spans at most this many tokens; a longer undecodable run is garbage and is shown.
_MAX_HELD_TOKENS = 8


class Decoder(Protocol):
    """Decodes one sequence, token by token."""

    @property
    def is_holding(self) -> bool:
        """Whether tokens were taken whose text is not out yet."""
        ...

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes, possibly none."""
        ...

    def flush(self) -> str:
        """Return what is still held at the end, incomplete characters as U+FFFD."""
        ...


class ByteDecoder:
    """Decodes byte-level tokens exactly as the tokenizer decodes them all at once, in O(1) each."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_holding(self) -> bool:
        """Whether tokens were taken whose text is not out yet."""
        return bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes, possibly none."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return what is still held at the end, incomplete characters as U+FFFD."""
        return self._utf8.decode(b"", True)


class WindowDecoder:
    """Decodes any tokenizer's tokens by comparing two decodes of a short window.

    The window begins at tokens already shown, because many decoders treat the first token of a
    text differently from the same token inside it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._shown = self._decode(self._window)
        if self._shown.endswith(_REPLACEMENT):
            # The prompt itself ends inside a character: nothing of it may be completed here.
            self._window, self._shown = [], ""
        self._num_shown = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    @property
    def is_holding(self) -> bool:
        """Whether tokens were taken whose text is not out yet."""
        return len(self._window) > self._num_shown

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes, possibly none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._num_shown
        if text.endswith(_REPLACEMENT) and held < _MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """Return what is still held at the end, incomplete characters as U+FFFD."""
        return self._show(self._decode(self._window)) if self.is_holding else ""

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return new


class StopScanner:
    """Cuts a growing text at the first stop string, however the text is divided.

    The stop string that *ends* first wins; of two that end together, the longer. Text is held
    back while it could still be the beginning of one.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the part of the text so far that is now known to be shown."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        pending = self._held + text
        end, matched = len(pending) + 1, ""
        for stop in self._stop:
            start = pending.find(stop)
            if start < 0:
                continue
            if start + len(stop) < end or (start + len(stop) == end and len(stop) > len(matched)):
                end, matched = start + len(stop), stop
        if matched:
            self.matched, self._held = matched, ""
            return pending[: end if self._include else end - len(matched)]
        keep = self._prefix_at_end(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """Return what was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _prefix_at_end(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


@dataclass(slots=True)
class TextStream:
    """One sequence's text: a decoder, then the stop strings.

    Attributes:
        decoder: Makes text of tokens.
        scanner: Cuts it at a stop string.
        text_length: Characters shown so far.
        decoded_length: Characters decoded so far, those held back for a stop string included.
    """

    decoder: Decoder
    scanner: StopScanner
    text_length: int = 0
    decoded_length: int = 0

    def push(self, token_id: int) -> str:
        """Return the text that is now shown. Nothing more comes once ``stopped_by`` is set."""
        text = self.decoder.push(token_id)
        if not text:
            return ""
        return self._scan(text)

    def flush(self) -> str:
        """Return the rest at the end; a stop string completed by it still counts."""
        shown = self._scan(self.decoder.flush())
        if self.scanner.matched is None:
            rest = self.scanner.flush()
            self.text_length += len(rest)
            shown += rest
        return shown

    def _scan(self, text: str) -> str:
        self.decoded_length += len(text)
        shown = self.scanner.push(text)
        self.text_length += len(shown)
        return shown

    @property
    def is_holding(self) -> bool:
        """Whether something of the tokens taken so far is not shown yet."""
        return self.text_length < self.decoded_length or self.decoder.is_holding

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return self.scanner.matched


def open_text_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    skip_special_tokens: bool = True,
) -> TextStream:
    """Return a fresh stream of text for the tokens that follow ``prompt_token_ids``."""
    decoder: Decoder
    if tokenizer.is_byte_level:
        decoder = ByteDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    else:
        decoder = WindowDecoder(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
    return TextStream(decoder, StopScanner(stop, include_stop=include_stop))
