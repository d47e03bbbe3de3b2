"""Shortest first: the mean wait is the least that any order gives, if lengths are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.core.policy import Phase, QueueView, RequestView


class Options(BaseModel):
    """What ``[options.shortest]`` may hold.

    Attributes:
        by: What counts as a request's length, in tokens.
        patience: Seconds after which a waiting request goes before shorter ones, so that a
            steady stream of short ones cannot keep a long one out for ever.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    by: Literal["prompt", "output", "total"] = "total"
    patience: float = Field(default=30.0, ge=0)


class ShortestFirst:
    """Admits the shortest request first and takes blocks from the longest."""

    def __init__(self, options: Options) -> None:
        """Keep the options; the policy has no other state."""
        self._options = options

    def admission_order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Return the overdue by arrival, then the rest by length (equal ones by arrival)."""

        def rank(request: RequestView) -> tuple[bool, float, float]:
            if now - request.arrival_time >= self._options.patience:
                return (False, request.arrival_time, 0.0)
            return (True, self._length(request), request.arrival_time)

        return sorted(waiting, key=rank)

    def next_phase(self, queues: QueueView) -> Phase:
        """Choose prefill: a short request that has come should not wait for long ones."""
        return "prefill"

    def preemption_victim(self, running: Sequence[RequestView]) -> RequestView:
        """Return the request with the most left to do; the latest to arrive of equal ones."""
        return max(running, key=lambda request: (self._left(request), request.arrival_time))

    def on_finished(self, request: RequestView) -> None:
        """Do nothing: no state is kept of a request."""

    def _length(self, request: RequestView) -> int:
        prompt = 0 if self._options.by == "output" else request.num_prompt_tokens
        output = 0 if self._options.by == "prompt" else request.max_tokens
        return prompt + output

    def _left(self, request: RequestView) -> int:
        return request.max_tokens - request.num_output_tokens
