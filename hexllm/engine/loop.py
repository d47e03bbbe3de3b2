"""The engine's loop: take messages, plan, compute, report."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from hexllm.core.events import EngineStats
from hexllm.engine.messages import (
    AbortRequests,
    GenerateRequest,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepSeconds,
)
from hexllm.engine.request import Request
from hexllm.engine.step import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hexllm.engine.blocks import BlockManager
    from hexllm.engine.buckets import Buckets
    from hexllm.engine.messages import EngineInfo, ToEngine, TokenLogprobs
    from hexllm.engine.runner import Runner
    from hexllm.engine.scheduler import Plan, Scheduler
    from hexllm.ops.sampling import Sampled

logger = logging.getLogger(__name__)

#: How often an engine that computes without results says that it lives, in seconds.
_SIGN_OF_LIFE_SECONDS = 1.0


class Engine:
    """A loaded model with its scheduler. One thread drives it, message by message, step by step.

    Attributes:
        info: What it knows of itself.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        blocks: BlockManager,
        buckets: Buckets,
        runner: Runner,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._blocks = blocks
        self._buckets = buckets
        self._runner = runner
        self._outputs: list[RequestOutput] = []
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._step_seconds = 0.0
        self._last_end = 0.0
        self._last_report = 0.0
        self._steps: list[StepSeconds] = []
        self._computing: tuple[Plan, Sampled, float] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is open or a step still computes."""
        return self._scheduler.has_work or self._computing is not None

    def handle(self, message: ToEngine) -> None:
        """Take one message; it counts from the next step on."""
        match message:
            case GenerateRequest(request_id, prompt):
                if 0 < len(prompt) < self.info.max_model_len:
                    self._scheduler.add(Request(message, self.info.max_model_len))
                    return
                # The server refuses these first. Here one would wait for ever, and all behind it.
                error = f"a prompt of {len(prompt)} tokens does not fit {self.info.max_model_len}"
                self._outputs.append(RequestOutput(request_id, finish_reason="error", error=error))
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    if self._scheduler.finish(request_id) is not None:
                        self._outputs.append(RequestOutput(request_id, finish_reason="abort"))
            case Shutdown():
                pass  # the process's own business

    def advance(self) -> None:
        """Dispatch the next step, then wait for the one before it; ``take_outputs`` has results.

        So the device never waits for the host: a step is planned while one computes, and what
        that one sampled is reported while the next computes.
        """
        computing, self._computing = self._computing, self._start_step()
        if computing is not None:
            self._end_step(*computing)

    def _start_step(self) -> tuple[Plan, Sampled, float] | None:
        """Plan a step and hand it to the device; None when there is nothing to compute."""
        now = time.monotonic()
        plan = self._scheduler.schedule(now)
        if plan is None:
            return None
        return plan, self._runner.dispatch(plan, shape_of(plan, self._buckets)), now

    def _end_step(self, plan: Plan, sampled: Sampled, started: float) -> None:
        """Wait for a step and take in what it sampled."""
        waits_since = time.monotonic()
        tokens, logprobs = self._runner.result(plan, sampled)
        waited = time.monotonic() - waits_since
        by_id: dict[str, TokenLogprobs | None] = {
            work.request.request_id: entry for work, entry in zip(plan.works, logprobs, strict=True)
        }
        results = self._scheduler.commit(plan, tokens)
        for request, reason in results:
            entry = by_id[request.request_id]
            self._outputs.append(
                RequestOutput(
                    request.request_id,
                    token_ids=(request.tokens[-1],),
                    logprobs=None if entry is None else (entry,),
                    finish_reason=reason,
                    num_cached_tokens=request.num_cached_tokens,
                )
            )
        self._num_steps += 1
        self._num_prompt_tokens += sum(work.num_prompt_tokens for work in plan.works)
        self._num_output_tokens += len(results)
        # It began when the device was free: after the step before it, if that was under way.
        now = time.monotonic()
        seconds = now - max(started, self._last_end)
        self._step_seconds += seconds
        self._steps.append(StepSeconds(host=seconds - waited, device=waited))
        self._last_end = now

    def take_outputs(self) -> StepOutputs | None:
        """Return what happened since the last call, None when nothing is worth telling.

        Steps without results are told of once a second and when the last one has ended, so that
        an engine that hangs can be told from one that computes a long prompt.
        """
        now = time.monotonic()
        is_due = not self.has_work or now - self._last_report >= _SIGN_OF_LIFE_SECONDS
        if not self._outputs and not (self._steps and is_due):
            return None
        self._last_report = now
        outputs, self._outputs = tuple(self._outputs), []
        steps, self._steps = tuple(self._steps), []
        return StepOutputs(outputs, self.stats(), steps)

    def stats(self) -> EngineStats:
        """Return the counters as they stand."""
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_late_compiles=self._runner.num_late_compiles,
            step_seconds=self._step_seconds,
        )

    def run(
        self,
        receive: Callable[[bool], list[ToEngine]],
        send: Callable[[StepOutputs], None],
    ) -> None:
        """Serve until a Shutdown message comes.

        Args:
            receive: Returns the messages that have come; waits for one when its argument is True.
            send: Takes results.
        """
        while True:
            for message in receive(not self.has_work):
                if isinstance(message, Shutdown):
                    return
                self.handle(message)
            self.advance()
            outputs = self.take_outputs()
            if outputs is not None:
                send(outputs)
