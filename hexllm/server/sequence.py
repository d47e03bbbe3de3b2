"""One generated sequence as the client sees it: tokens in, pieces of text and logprobs out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hexllm.server.detokenizer import open_text_stream

if TYPE_CHECKING:
    from hexllm.engine.messages import (
        FinishReason,
        GenerateRequest,
        RequestOutput,
        TokenLogprobs,
    )
    from hexllm.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request wants its text.

    Attributes:
        stop: Strings that end it.
        include_stop: Whether a stop string, or the text of the token that ended it, is shown.
        skip_special_tokens: Whether special tokens have no text.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One generated token's logprobs.

    Attributes:
        token_id: The token.
        logprobs: Its own and the likeliest ones.
        text_offset: Where its text begins in the generated text, in characters.
    """

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one sequence.

    Attributes:
        index: Which choice it belongs to.
        text: Text that is now shown.
        num_tokens: Tokens taken from the engine since the last delta.
        logprobs: Of the tokens that are now shown; empty when none were asked for.
        finish_reason: Set on the last delta only.
        stop_reason: The stop string or stop token that ended it, if one did.
    """

    index: int
    text: str
    num_tokens: int
    logprobs: tuple[LogprobEntry, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.text and not self.logprobs and self.finish_reason is None


class Sequence:
    """The state of one sequence between the engine and the response.

    Attributes:
        index: Its choice's number in the response.
        request: What the engine was asked.
        num_tokens: Tokens generated, the end token and a stop string's included.
        num_cached_tokens: Prompt tokens served from the prefix cache.
        cumulative_logprob: Sum of the generated tokens' logprobs, where they were asked for.
        finish_reason: None while it runs.
    """

    def __init__(
        self, index: int, request: GenerateRequest, tokenizer: Tokenizer, options: TextOptions
    ) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self._include_stop = options.include_stop
        self._stream = open_text_stream(
            tokenizer,
            request.prompt_token_ids,
            stop=options.stop,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
        )
        self._unshown: deque[LogprobEntry] = deque()

    def feed(self, output: RequestOutput) -> Delta:
        """Take what a step added and return what is new to show.

        A delta with a ``finish_reason`` is the last one; the engine may not know yet (a stop
        string is found here, not there).
        """
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        stream, text, before = self._stream, "", self.num_tokens
        stop_reason: str | int | None = None
        last = len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.logprobs is not None:
                logprobs = output.logprobs[i]
                self.cumulative_logprob += logprobs.logprob
                self._unshown.append(LogprobEntry(token_id, logprobs, stream.decoded_length))
            if i == last and output.finish_reason == "stop":
                stop_reason = token_id if token_id in self._stop_token_ids else None
                if not self._include_stop:
                    break
            text += stream.push(token_id)
            if stream.stopped_by is not None:
                break
        if output.finish_reason is not None and stream.stopped_by is None:
            self.finish_reason = output.finish_reason
            text += stream.flush()
        if stream.stopped_by is not None:
            self.finish_reason, stop_reason = "stop", stream.stopped_by
        return Delta(
            self.index,
            text,
            self.num_tokens - before,
            self._shown_logprobs(),
            self.finish_reason,
            stop_reason,
        )

    @property
    def _stop_token_ids(self) -> tuple[int, ...]:
        return self.request.sampling.stop_token_ids

    def _shown_logprobs(self) -> tuple[LogprobEntry, ...]:
        """Return logprobs of the tokens whose text is shown; never those of a stop string.

        A token of which only a part is shown, because a stop string begins inside it, would give
        the stop string away.
        """
        if not self._unshown:
            return ()
        stream = self._stream
        if stream.stopped_by is None and (self.finish_reason or not stream.is_holding):
            shown = tuple(self._unshown)
            self._unshown.clear()
            return shown
        entries = []
        while self._unshown and self._unshown[0].text_offset < stream.text_length:
            following = self._unshown[1].text_offset if len(self._unshown) > 1 else None
            end = stream.decoded_length if following is None else following
            if end > stream.text_length and not self._include_stop:
                break
            entries.append(self._unshown.popleft())
        return tuple(entries)
