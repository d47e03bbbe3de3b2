"""What the notify hooks carry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's counters after a step. Counters grow for the engine's life; the rest is now.

    Attributes:
        num_running: Requests that hold KV blocks.
        num_waiting: Requests that hold none yet.
        num_blocks: KV blocks in all.
        num_free_blocks: KV blocks nobody holds.
        num_preemptions: Counter of requests that lost their blocks.
        num_steps: Counter of steps.
        num_prompt_tokens: Counter of prompt tokens computed.
        num_output_tokens: Counter of tokens sampled.
        num_late_compiles: Counter of programs compiled after warm-up; anything but 0 is a fault.
        step_seconds: Counter of seconds spent in steps.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_late_compiles: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """One request's end, as ``hexllm_request_finished`` gives it.

    Attributes:
        request_id: The id in the response (``cmpl-…``, ``chatcmpl-…``).
        route: The path it came by.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        num_prompt_tokens: Tokens in its prompt.
        num_output_tokens: Tokens generated, over all its choices.
        arrival_time: Seconds since the epoch.
        time_to_first_token: Seconds, None when no token came.
        duration: Seconds from arrival to end.
        user: The request's ``user`` field, or None.
    """

    request_id: str
    route: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_time: float
    time_to_first_token: float | None
    duration: float
    user: str | None = None
