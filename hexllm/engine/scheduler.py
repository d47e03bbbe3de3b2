"""Decides what the next step computes, by asking a policy and verifying its answers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hexllm.core.policy import QueueView, verified_order, verified_phase, verified_victim
from hexllm.engine.allocation import admit, release, remember

if TYPE_CHECKING:
    from collections.abc import Callable

    from hexllm.core.policy import Phase, SchedulingPolicy
    from hexllm.engine.blocks import BlockManager
    from hexllm.engine.messages import FinishReason
    from hexllm.engine.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's share of a step: some of its tokens, from ``start`` on.

    Attributes:
        request: Whose.
        start: The position of its first new token.
        length: How many new tokens.
        is_last: Whether they are all that was left, so that the token after them is sampled.
    """

    request: Request
    start: int
    length: int
    is_last: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        """How many of its tokens are of the prompt."""
        end = min(self.start + self.length, self.request.num_prompt_tokens)
        return max(0, end - self.start)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        phase: ``decode`` where every sequence computes one token; ``prefill`` is any mix.
        works: At least one; none is a step of nothing but padding, which warm-up compiles.
    """

    phase: Phase
    works: tuple[Work, ...]


class Scheduler:
    """Keeps the waiting and the running requests and plans steps over them.

    A step may be planned while the one before it still computes: what is sampled meanwhile counts
    as there, unknown, until ``commit`` brings it. Plans are computed and committed in their order,
    and one more is made at most before the last one is committed.

    Prefill and decode steps are separate, as Hex-LLM's were: a prefill takes whole prompts of at
    most ``max_prefill_seqs`` sequences, a decode one token of every running sequence. Or prefill is
    chunked: a step takes one token of every sequence that decodes, then pieces of prompts. When
    blocks run out, the policy names a victim, which gives up its blocks and is computed again
    later.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        policy_name: str,
        blocks: BlockManager,
        *,
        max_prefill_seqs: int,
        max_prefill_tokens: int,
        max_running_seqs: int,
        is_chunked: bool = False,
    ) -> None:
        """Start with no requests.

        Args:
            policy: Answers.
            policy_name: What messages call it.
            blocks: Where requests get KV blocks.
            max_prefill_seqs: The most sequences a step computes prompts, or pieces of them, of.
            max_prefill_tokens: The most tokens of a step that is not all decode; with
                ``is_chunked`` those that decode count, and there must be room beside all of them.
            max_running_seqs: The most sequences that hold blocks.
            is_chunked: Whether prompts are cut and computed beside decoding.
        """
        self._policy = policy
        self._policy_name = policy_name
        self._blocks = blocks
        self._max_prefill_seqs = max_prefill_seqs
        self._max_prefill_tokens = max_prefill_tokens
        self._max_running_seqs = max_running_seqs
        self._is_chunked = is_chunked
        self._waiting: dict[str, Request] = {}  # in order of arrival
        self._running: dict[str, Request] = {}  # in order of admission
        self._free_slots = list(range(max_running_seqs - 1, -1, -1))
        self._faults: set[str] = set()
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request is open."""
        return bool(self._waiting or self._running)

    def requests(self) -> list[Request]:
        """Return every open request."""
        return [*self._running.values(), *self._waiting.values()]

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting[request.request_id] = request

    def finish(self, request_id: str) -> Request | None:
        """End a request, for whatever reason, and free its blocks; None if it is not open."""
        request = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        if request is None:
            return None
        view = request.view()
        request.is_finished = True
        self._release(request)
        self._ask("on_finished", lambda: self._policy.on_finished(view), lambda: None)
        return request

    def schedule(self, now: float) -> Plan | None:
        """Return the next step; None when there is nothing to compute.

        That is so too when all that is open ends with the step under way. Blocks for the step are
        allocated, victims preempted; the caller computes it and then calls ``commit``.
        """
        plan = self._plan_mixed(now) if self._is_chunked else self._plan(now)
        for work in plan.works if plan else ():
            work.request.num_computed = work.start + work.length
            work.request.num_pending += work.is_last
            # The device has filled these blocks before any later step reads them.
            remember(self._blocks, work.request)
        return plan

    def _plan(self, now: float) -> Plan | None:
        if self._waiting and self._may_admit() and self._next_phase(now) == "prefill":
            plan = self._plan_prefill(now)
            if plan is not None:
                return plan
        return self._plan_decode() if self._running else self._plan_prefill(now)

    def commit(self, plan: Plan, tokens: list[int]) -> list[tuple[Request, FinishReason | None]]:
        """Append what a step sampled and return each request with its end, if it came.

        Args:
            plan: The step as ``schedule`` gave it.
            tokens: The sampled token of each work; of one that is not the last it means nothing.
        """
        results: list[tuple[Request, FinishReason | None]] = []
        for work, token in zip(plan.works, tokens, strict=True):
            request = work.request
            if not work.is_last:
                continue
            request.num_pending -= 1
            if request.is_finished:
                continue  # aborted, or ended by the step before, while this one ran
            reason = request.append(token)
            remember(self._blocks, request)
            if reason is not None:
                self.finish(request.request_id)
            results.append((request, reason))
        return results

    def _may_admit(self) -> bool:
        return len(self._running) < self._max_running_seqs

    def _next_phase(self, now: float) -> Phase:
        if not self._running:
            return "prefill"
        queues = QueueView(
            waiting=tuple(r.view() for r in self._waiting.values()),
            running=tuple(r.view() for r in self._running.values()),
            num_free_blocks=self._blocks.num_free,
            num_blocks=self._blocks.num_blocks,
            now=now,
        )
        return self._ask(
            "next_phase",
            lambda: verified_phase(self._policy_name, self._policy.next_phase(queues)),
            lambda: "prefill",
        )

    def _admission_order(self, now: float) -> list[str]:
        views = tuple(r.view() for r in self._waiting.values())
        return self._ask(
            "admission_order",
            lambda: verified_order(
                self._policy_name, views, self._policy.admission_order(views, now)
            ),
            lambda: [view.request_id for view in views],
        )

    def _plan_prefill(self, now: float) -> Plan | None:
        works: list[Work] = []
        num_tokens = 0
        for request_id in self._admission_order(now):
            request = self._waiting[request_id]
            if (
                len(works) == self._max_prefill_seqs
                or not self._may_admit()
                or not self._admit(request, self._max_prefill_tokens - num_tokens)
            ):
                break
            start = request.num_computed
            works.append(Work(request, start, len(request.tokens) - start))
            num_tokens += works[-1].length
        return Plan("prefill", tuple(works)) if works else None

    def _admit(self, request: Request, most: int | None) -> bool:
        """Let a waiting request run, if blocks allow; ``most`` of its tokens may be uncomputed."""
        # A free block for each running sequence, or the newcomer is soon preempted again.
        if not admit(self._blocks, request, reserve=len(self._running), most=most):
            return False
        del self._waiting[request.request_id]
        request.slot = self._free_slots.pop()
        self._running[request.request_id] = request
        return True

    def _plan_mixed(self, now: float) -> Plan | None:
        """Plan a step of one token of each sequence that decodes, then of pieces of prompts."""
        num_preemptions = self.num_preemptions
        works = self._decodes()
        left = self._max_prefill_tokens - len(works)
        most = len(works) + self._max_prefill_seqs
        for request in [r for r in self._running.values() if r.num_left > 1]:
            if left > 0 and len(works) < most:
                works.append(self._piece(request, left))
                left -= works[-1].length
        # Who has just lost its blocks would take them back before those they are meant for.
        if self._waiting and num_preemptions == self.num_preemptions:
            for request_id in self._admission_order(now) if left > 0 and len(works) < most else ():
                request = self._waiting[request_id]
                if not self._may_admit() or not self._admit(request, None):
                    break
                works.append(self._piece(request, left))
                left -= works[-1].length
                if left <= 0 or len(works) == most:
                    break
        phase: Phase = "decode" if all(work.length == 1 for work in works) else "prefill"
        return Plan(phase, tuple(works)) if works else None

    def _piece(self, request: Request, most: int) -> Work:
        """Return the next ``most`` tokens of a request, to a block's end, or all that is left."""
        start = request.num_computed
        if request.num_left <= most:
            return Work(request, start, request.num_left)
        end = start + most
        aligned = end - end % self._blocks.block_size
        return Work(request, start, (aligned if aligned > start else end) - start, is_last=False)

    def _plan_decode(self) -> Plan | None:
        works = self._decodes()
        return Plan("decode", tuple(works)) if works else None

    def _decodes(self) -> list[Work]:
        """Make room for the next token of each sequence that decodes, and return those that do."""
        for request in list(self._running.values()):
            while request.slot is not None and self._lacks_block(request):
                if self._blocks.can_allocate(1):
                    request.blocks += self._blocks.allocate(1)
                else:
                    self._preempt()
        return [
            Work(request, request.num_computed, 1)
            for request in self._running.values()
            if request.num_left == 1 and not request.will_end
        ]

    def _lacks_block(self, request: Request) -> bool:
        if request.will_end:
            return False
        return self._blocks.blocks_for(request.num_computed + 1) > len(request.blocks)

    def _preempt(self) -> None:
        views = tuple(r.view() for r in self._running.values())
        victim_id = self._ask(
            "preemption_victim",
            lambda: verified_victim(
                self._policy_name, views, self._policy.preemption_victim(views)
            ),
            lambda: views[-1].request_id,
        )
        victim = self._running.pop(victim_id)
        self._release(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        # Back to its place by arrival, which a waiting queue is in.
        self._waiting = {victim_id: victim, **self._waiting}

    def _release(self, request: Request) -> None:
        release(self._blocks, request)
        if request.slot is not None:
            self._free_slots.append(request.slot)
            request.slot = None

    def _ask(self, question: str, answer: Callable[[], T], otherwise: Callable[[], Any]) -> T:
        """Return the policy's verified answer, or go on without it: it must not stop the server."""
        try:
            return answer()
        except Exception as error:
            if question not in self._faults:
                self._faults.add(question)
                logger.exception(
                    "Scheduling policy %r failed in %s (%s). First come, first served is used "
                    "in its place; this is logged once.",
                    self._policy_name,
                    question,
                    error,
                )
            return otherwise()
