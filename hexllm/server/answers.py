"""What the OpenAI routes' answers have in common: JSON, collected choices, logprobs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexllm.engine.messages import FinishReason
    from hexllm.server.generation import Generation
    from hexllm.server.sequence import LogprobEntry
    from hexllm.server.tokenizer import Tokenizer

#: One encoder for every piece: making one per call costs more than encoding a token's text.
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

#: JSON has no infinity; vLLM's stand-in for the logarithm of zero.
_LOG_ZERO = -9999.0


@dataclass(slots=True)
class CollectedChoice:
    """A whole choice, put together from the same deltas a stream would have sent.

    Attributes:
        text: All of its text.
        logprobs: Of every token shown, empty when none were asked for.
        finish_reason: Why it ended.
        stop_reason: The stop string or stop token that ended it, if one did.
    """

    text: str = ""
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


async def collect(generation: Generation) -> list[CollectedChoice]:
    """Run ``generation`` to its end and return its choices in order.

    Raises:
        EngineRequestError: The engine gave one of them up.
        EngineDeadError: The engine is gone.
    """
    choices = [CollectedChoice() for _ in generation.sequences]
    texts: list[list[str]] = [[] for _ in choices]
    async for delta in generation.deltas():
        choice = choices[delta.index]
        texts[delta.index].append(delta.text)
        choice.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
    for choice, pieces in zip(choices, texts, strict=True):
        choice.text = "".join(pieces)
    return choices


def finite(logprob: float) -> float:
    """Return ``logprob`` as JSON can carry it."""
    return logprob if math.isfinite(logprob) else _LOG_ZERO


def completion_logprobs(
    entries: list[LogprobEntry] | tuple[LogprobEntry, ...],
    tokenizer: Tokenizer,
    *,
    num_top: int,
) -> dict[str, Any]:
    """Return ``logprobs`` in the form of ``/v1/completions``.

    Args:
        entries: The tokens.
        tokenizer: Writes them.
        num_top: How many of the likeliest tokens to list beside the sampled one.
    """
    tops = []
    for entry in entries:
        top = {
            tokenizer.token_text(token_id): finite(logprob)
            for token_id, logprob in entry.logprobs.top[:num_top]
        }
        top.setdefault(tokenizer.token_text(entry.token_id), finite(entry.logprobs.logprob))
        tops.append(top)
    return {
        "tokens": [tokenizer.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [finite(entry.logprobs.logprob) for entry in entries],
        "top_logprobs": tops if num_top else None,
        "text_offset": [entry.text_offset for entry in entries],
    }


def chat_logprobs(
    entries: list[LogprobEntry] | tuple[LogprobEntry, ...], tokenizer: Tokenizer, *, num_top: int
) -> dict[str, Any]:
    """Return ``logprobs`` in the form of ``/v1/chat/completions``."""

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            {
                **described(entry.token_id, entry.logprobs.logprob),
                "top_logprobs": [described(*top) for top in entry.logprobs.top[:num_top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def stream_head(generation: Generation, kind: str, model: str) -> str:
    """Return how every SSE event of a stream begins, up to its list of choices."""
    fields = encode_json(
        {
            "id": generation.request_id,
            "object": kind,
            "created": generation.created,
            "model": model,
        }
    )
    return f'data: {fields[:-1]},"choices":['
