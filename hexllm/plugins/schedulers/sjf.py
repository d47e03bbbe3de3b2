"""The shortest prompt first, with ageing so that long ones have their turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.core.policy import Phase, QueueView, RequestView


class Options(BaseModel):
    """What ``[options.sjf]`` may hold.

    Attributes:
        ageing: Tokens by which a request's prompt counts as shorter for each second since it
            came. A prompt of L tokens is overtaken by those alone that come within L / ``ageing``
            seconds after it. More is nearer to first come, first served.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ageing: float = Field(default=100.0, gt=0, allow_inf_nan=False)


class ShortestFirst:
    """Serves requests by the length of their prompts, less what they have aged.

    All age at one rate, so of two requests the one that is ahead stays ahead. Blocks are taken
    from the last in this order; so the first always advances.
    """

    def __init__(self, options: Options) -> None:
        """Keep the options; the policy has no other state."""
        self._ageing = options.ageing

    def admission_order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Return ``waiting`` by prompt and age; equal ones by arrival."""

        def rank(request: RequestView) -> tuple[float, float]:
            return self._length(request, now), request.arrival_time

        return sorted(waiting, key=rank)

    def next_phase(self, queues: QueueView) -> Phase:
        """Choose prefill: a short request that has come should not wait for running ones."""
        return "prefill"

    def preemption_victim(self, running: Sequence[RequestView]) -> RequestView:
        """Return the last of ``running`` by prompt and age."""
        # Any moment will do for all alike; the last arrival keeps the numbers small and exact.
        now = max(request.arrival_time for request in running)
        ranks = [(self._length(request, now), request.arrival_time) for request in running]
        last = max(ranks)
        return [each for each, rank in zip(running, ranks, strict=True) if rank == last][-1]

    def on_finished(self, request: RequestView) -> None:
        """Forget nothing, because nothing is kept."""

    def _length(self, request: RequestView, now: float) -> float:
        """Return the prompt's length in tokens, less what the request has aged."""
        return request.num_prompt_tokens - self._ageing * (now - request.arrival_time)
