"""What settings must hold together, beyond each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from hexllm.core.settings.fields import Settings


def check_together(settings: Settings) -> None:
    """Refuse settings that contradict one another.

    Raises:
        PydanticCustomError: Of type ``cross_check``; its message is a whole sentence.
    """
    if settings.health_route == settings.predict_route:
        raise PydanticCustomError(
            "cross_check",
            "health_route and predict_route are both {route}. Give them different paths.",
            {"route": settings.health_route},
        )
    if settings.max_num_batched_tokens is not None:
        _check_budget(settings, settings.max_num_batched_tokens)


def _check_budget(settings: Settings, budget: int) -> None:
    if not settings.enable_chunked_prefill:
        raise PydanticCustomError(
            "cross_check",
            "max_num_batched_tokens={budget} bounds the steps of chunked prefill. Add "
            "--enable_chunked_prefill, or leave it out: a step is as large as "
            "--max_prefill_seqs makes it.",
            {"budget": budget},
        )
    if budget <= settings.max_decode_seqs:
        raise PydanticCustomError(
            "cross_check",
            "max_num_batched_tokens={budget} leaves no room for prompts beside "
            "max_decode_seqs={seqs}. Give more of the one, or fewer of the other.",
            {"budget": budget, "seqs": settings.max_decode_seqs},
        )
