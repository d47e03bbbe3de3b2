"""One HTTP request at the engine: its sequences in one stream, measured, and cleaned up after."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hexllm.core.events import RequestFinished
from hexllm.engine.messages import GenerateRequest, SamplingParams
from hexllm.server.errors import DeadlineError, EngineRequestError
from hexllm.server.sequence import Delta, Sequence, TextOptions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from hexllm.core.errors import RequestError
    from hexllm.engine.client import EngineClient
    from hexllm.server.admission import Admission
    from hexllm.server.metrics import ServerMetrics
    from hexllm.server.notifier import Notifier


class Seeds:
    """Seeds for requests that bring none: the same order of requests, the same seeds."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> int:
        """Return the next request's seed, 32 bits."""
        return self._random.getrandbits(32)


def fold_seed(seed: int, choice: int) -> int:
    """Return the 32-bit seed of one choice: choice 0 of a 32-bit seed has that seed itself."""
    if choice == 0 and 0 <= seed < 2**32:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


class Generation:
    """Everything one HTTP request generates.

    Attributes:
        request_id: The id in the response.
        created: Seconds since the epoch, whole.
        sequences: Choice by choice; prompt ``p``'s choice ``j`` is number ``p * n + j``.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: ServerMetrics,
        notifier: Notifier,
        admission: Admission,
        *,
        timeout: float | None,
        request_id: str,
        route: str,
        n: int,
        user: str | None,
        sequences: list[Sequence],
    ) -> None:
        self.request_id = request_id
        self.arrival_time = time.time()
        self.created = int(self.arrival_time)
        self.sequences = sequences
        self._client = client
        self._metrics = metrics
        self._notifier = notifier
        self._admission = admission
        self._timeout = timeout
        self._ended_by: RequestError | None = None
        self._route = route
        self._n = n
        self._user = user
        self._first_token: float | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield what is new of each sequence until all have finished.

        Closing it early (or cancelling its task) aborts what still runs.

        Raises:
            QueueFullError: There is no room; nothing has been sent to the engine.
            DeadlineError: They took too long.
            RequestError: What ``end`` was given.
            EngineRequestError: The engine gave one of them up.
            EngineDeadError: The engine is gone.
        """
        self._admission.enter(self)
        timer = self._set_timer()
        start = time.perf_counter()
        previous = dict.fromkeys((sequence.index for sequence in self.sequences), start)
        outcome = "abort"
        self._metrics.requests_in_flight += 1
        try:
            one = len(self.sequences) == 1
            source = self._run(self.sequences[0]) if one else self._merged()
            async with contextlib.aclosing(source):
                async for delta in source:
                    self._observe(delta, start, previous)
                    yield delta
            outcome = self._outcome()
        except Exception:
            outcome = "error"
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._admission.leave(self)
            self._metrics.requests_in_flight -= 1
            self._finish(outcome, time.perf_counter() - start)

    def end(self, error: RequestError) -> None:
        """Abort what still runs; ``deltas`` raises ``error``."""
        if self._ended_by is not None:
            return
        self._ended_by = error
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                self._client.abort(sequence.request.request_id)

    def _set_timer(self) -> asyncio.TimerHandle | None:
        # One timer a request: a timeout around each token would cost one a token.
        if self._timeout is None:
            return None
        loop = asyncio.get_running_loop()
        return loop.call_later(self._timeout, self._expire, self._timeout)

    def _expire(self, timeout: float) -> None:
        self._metrics.requests_timed_out += 1
        self.end(DeadlineError(timeout))

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` of what was generated so far."""
        firsts = self.sequences[:: self._n]
        prompt = sum(len(sequence.request.prompt_token_ids) for sequence in firsts)
        completion = sum(sequence.num_tokens for sequence in self.sequences)
        cached = sum(sequence.num_cached_tokens for sequence in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def _run(self, sequence: Sequence) -> AsyncGenerator[Delta, None]:
        if self._ended_by is not None:
            raise self._ended_by  # before the engine has heard of it
        outputs = self._client.generate(sequence.request)
        try:
            async for output in outputs:
                if output.finish_reason == "error":
                    raise EngineRequestError(output.error or "The engine gave no reason.")
                if output.finish_reason == "abort":
                    if self._ended_by is not None:
                        raise self._ended_by
                    raise EngineRequestError("The request was aborted in the engine.")
                delta = sequence.feed(output)
                yield delta
                if delta.finish_reason is not None:
                    return
            raise EngineRequestError("The engine ended the request without a reason.")
        finally:
            # Not left to the garbage collector: blocks must be back within a step.
            close = getattr(outputs, "aclose", None)
            if close is not None:
                await close()

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        async def pump(sequence: Sequence) -> None:
            try:
                async with contextlib.aclosing(self._run(sequence)) as deltas:
                    async for delta in deltas:
                        queue.put_nowait(delta)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(sequence)) for sequence in self.sequences]
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _observe(self, delta: Delta, start: float, previous: dict[int, float]) -> None:
        if not delta.num_tokens:
            return
        now = time.perf_counter()
        if self._first_token is None:
            self._first_token = now - start
        last = previous[delta.index]
        if last == start:
            self._metrics.time_to_first_token.observe(now - start)
            sequence = self.sequences[delta.index]
            self._metrics.prompt_tokens += len(sequence.request.prompt_token_ids)
            self._metrics.cached_tokens += sequence.num_cached_tokens
        else:
            self._metrics.inter_token_latency.observe((now - last) / delta.num_tokens)
        self._metrics.generation_tokens += delta.num_tokens
        previous[delta.index] = now

    def _outcome(self) -> str:
        reasons = {sequence.finish_reason for sequence in self.sequences}
        return "stop" if reasons == {"stop"} else "length"

    def _finish(self, outcome: str, duration: float) -> None:
        for sequence in self.sequences:
            unfinished = "error" if outcome == "error" else "abort"
            self._metrics.count_finished(sequence.finish_reason or unfinished)
            if sequence.finish_reason is not None:
                self._metrics.request_prompt_tokens.observe(len(sequence.request.prompt_token_ids))
                self._metrics.request_generation_tokens.observe(sequence.num_tokens)
        if outcome in ("stop", "length"):
            self._metrics.e2e_latency.observe(duration)
        self._notifier.notify(
            "hexllm_request_finished",
            event=RequestFinished(
                request_id=self.request_id,
                route=self._route,
                finish_reason=outcome,
                num_prompt_tokens=self.usage()["prompt_tokens"],
                num_output_tokens=sum(sequence.num_tokens for sequence in self.sequences),
                arrival_time=self.arrival_time,
                time_to_first_token=self._first_token,
                duration=duration,
                user=self._user,
            ),
        )


def build_sequences(
    prompts: list[tuple[int, ...]],
    samplings: list[SamplingParams],
    *,
    n: int,
    request_id: str,
    eos_token_ids: tuple[int, ...],
    priority: int,
    user: str | None,
    cache_salt: str | None,
    api_key: str | None,
    tokenizer: Any,
    options: TextOptions,
    index: int = 0,
) -> list[Sequence]:
    """Return the sequences of ``n`` choices for each prompt, numbered from ``index``.

    Args:
        prompts: Token ids of each prompt.
        samplings: One per prompt; its ``seed`` is any whole number and is folded per choice.
        n: Choices per prompt.
        request_id: The response's id; a sequence's own is derived from it.
        eos_token_ids: The model's end tokens.
        priority: For scheduling policies.
        user: For scheduling policies.
        cache_salt: Who may share the prompts' blocks; None is everybody without one.
        api_key: For scheduling policies: a digest of the key that it came with.
        tokenizer: Makes their text.
        options: How the text is wanted.
        index: The first one's number.
    """
    now = time.monotonic()
    sequences = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        for choice in range(n):
            request = GenerateRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt,
                sampling=replace(sampling, seed=fold_seed(sampling.seed, choice)),
                eos_token_ids=eos_token_ids,
                arrival_time=now,
                priority=priority,
                user=user,
                cache_salt=cache_salt,
                api_key=api_key,
            )
            sequences.append(Sequence(index, request, tokenizer, options))
            index += 1
    return sequences
