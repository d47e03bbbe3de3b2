"""The contract of a scheduling policy: it answers questions about frozen views.

A policy never touches the scheduler's state, and each of its answers is verified here before the
scheduler acts on it, so that a wrong policy cannot corrupt a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from hexllm.core.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request.

    Attributes:
        request_id: The engine's name for it, unique.
        arrival_time: Seconds on the engine's clock (``time.monotonic``) when it came.
        num_prompt_tokens: Length of its prompt.
        num_output_tokens: Tokens generated so far (kept over a preemption).
        max_tokens: The most it may generate.
        num_blocks: KV blocks it holds now.
        num_preemptions: How often it lost its blocks.
        priority: The request's ``priority`` field; smaller is more urgent; 0 by default.
        user: The request's ``user`` field, or None.
        api_key: A digest of the key in its ``Authorization`` header (the key itself never reaches
            a policy), or None.
    """

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int = 0
    num_preemptions: int = 0
    priority: int = 0
    user: str | None = None
    api_key: str | None = None

    @property
    def tenant(self) -> str:
        """On whose account it runs: its ``user``, else its API key's digest, else ``""``."""
        return self.user or self.api_key or ""


@dataclass(frozen=True, slots=True)
class QueueView:
    """The scheduler's queues at one moment.

    Attributes:
        waiting: Requests without blocks, in order of arrival.
        running: Requests that hold blocks, in order of admission.
        num_free_blocks: KV blocks nobody holds.
        num_blocks: All KV blocks.
        now: Seconds on the engine's clock.
    """

    waiting: tuple[RequestView, ...]
    running: tuple[RequestView, ...]
    num_free_blocks: int
    num_blocks: int
    now: float


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Decides who is served next. Built once per engine, with its validated options, or nothing."""

    def admission_order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Return all of ``waiting``, first to be admitted first."""
        ...

    def next_phase(self, queues: QueueView) -> Phase:
        """Choose the next step's kind. Asked only when both kinds are possible."""
        ...

    def preemption_victim(self, running: Sequence[RequestView]) -> RequestView:
        """Name the request of ``running`` (never empty) that gives up its blocks."""
        ...

    def on_finished(self, request: RequestView) -> None:
        """Learn that a request ended, for whatever reason."""
        ...


def verified_order(
    policy: str, waiting: Sequence[RequestView], answer: Sequence[RequestView]
) -> list[str]:
    """Return the request ids of ``answer`` once it is known to be a permutation of ``waiting``.

    Raises:
        PolicyError: A request is missing, doubled or unknown.
    """
    try:
        ids = [view.request_id for view in answer]
    except (TypeError, AttributeError) as error:
        raise PolicyError(
            f"Scheduling policy {policy!r}: admission_order returned {answer!r}, "
            f"not a sequence of the views it was given."
        ) from error
    expected = [view.request_id for view in waiting]
    if sorted(ids) != sorted(expected):
        missing = sorted(set(expected) - set(ids))
        unknown = sorted(set(ids) - set(expected))
        raise PolicyError(
            f"Scheduling policy {policy!r}: admission_order must return each of the "
            f"{len(expected)} waiting requests once; missing {missing[:3]}, unknown "
            f"{unknown[:3]}, {len(ids) - len(set(ids))} repeated."
        )
    return ids


def verified_phase(policy: str, answer: object) -> Phase:
    """Return ``answer`` once it is known to be a phase.

    Raises:
        PolicyError: It is neither ``prefill`` nor ``decode``.
    """
    if answer == "prefill":
        return "prefill"
    if answer == "decode":
        return "decode"
    raise PolicyError(
        f"Scheduling policy {policy!r}: next_phase returned {answer!r}; "
        f"it must be 'prefill' or 'decode'."
    )


def verified_victim(policy: str, running: Sequence[RequestView], answer: object) -> str:
    """Return the victim's request id once it is known to be one of ``running``.

    Raises:
        PolicyError: The answer is not a view of a running request.
    """
    request_id = getattr(answer, "request_id", None)
    if request_id not in {view.request_id for view in running}:
        raise PolicyError(
            f"Scheduling policy {policy!r}: preemption_victim returned {answer!r}; "
            f"it must be one of the {len(running)} running requests it was given."
        )
    return str(request_id)
