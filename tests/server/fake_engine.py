"""An engine that follows a script, for tests of the server."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import EngineDeadError
from hexllm.core.events import EngineStats
from hexllm.engine.messages import EngineInfo, RequestOutput, StartProgress, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hexllm.engine.messages import GenerateRequest


class FakeEngine:
    """Yields scripted tokens as an engine would; records what it was asked and what it aborted.

    It ends a sequence at ``eos`` (or a stop token) with ``stop``, at ``max_tokens`` with
    ``length``, and repeats the script (token ids, or a function of the request that gives them)
    until one of these happens.
    """

    def __init__(
        self,
        script: Any,
        *,
        eos: int | None = None,
        chunk: int = 1,
        delay: float = 0.0,
        max_model_len: int = 128,
        vocab_size: int = 400,
        cached_tokens: int = 0,
        ready: bool = True,
    ) -> None:
        self.script = script
        self.eos = eos
        self.chunk = chunk
        self.delay = delay
        self.cached_tokens = cached_tokens
        self.error: str | None = None
        self.error_after = 0
        self.requests: list[GenerateRequest] = []
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.ready_info = EngineInfo(
            max_model_len=max_model_len,
            num_blocks=64,
            block_size=16,
            max_running_seqs=8,
            vocab_size=vocab_size,
            eos_token_ids=(1,),
            dtype="float32",
            platform="cpu",
            family="fake",
        )
        self.info: EngineInfo | None = self.ready_info if ready else None
        self.stats = EngineStats()
        self.progress: StartProgress | None = None
        self.failure: str | None = None
        self.on_stats: Any = None
        self.on_steps: Any = None
        self.on_failure: Any = None
        self.silence = 0.0
        self.start_error: Exception | None = None
        self.started = asyncio.Event()
        self.is_shut_down = False
        self._woken: dict[str, asyncio.Event] = {}
        self._dropped: set[str] = set()

    @property
    def is_ready(self) -> bool:
        return self.info is not None and self.failure is None

    async def start(self) -> EngineInfo:
        await self.started.wait()
        if self.start_error is not None:
            raise self.start_error
        self.info = self.ready_info
        return self.info

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self.loop = asyncio.get_running_loop()
        self.requests.append(request)
        self.open.add(request.request_id)
        self._woken[request.request_id] = asyncio.Event()
        finished = False
        try:
            async for output in self._outputs(request):
                finished = output.finish_reason is not None
                yield output
        finally:
            self.open.discard(request.request_id)
            del self._woken[request.request_id]
            if not finished:
                self.aborted.append(request.request_id)

    async def _outputs(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        tokens, reason = self._sequence(request)
        for start in range(0, len(tokens), self.chunk):
            await self._step(request.request_id)
            if request.request_id in self._dropped:
                self.aborted.append(request.request_id)
                yield RequestOutput(request.request_id, finish_reason="abort")
                return
            if self.error is not None and start >= self.error_after:
                yield RequestOutput(request.request_id, finish_reason="error", error=self.error)
                return
            part = tokens[start : start + self.chunk]
            is_last = start + self.chunk >= len(tokens)
            logprobs = None
            if request.sampling.logprobs is not None:
                logprobs = tuple(self.logprobs_of(t, request.sampling.logprobs) for t in part)
            yield RequestOutput(
                request.request_id,
                tuple(part),
                logprobs,
                reason if is_last else None,
                self.cached_tokens,
            )

    async def _step(self, request_id: str) -> None:
        if self.failure is None and self.delay:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken[request_id].wait(), self.delay)
        else:
            await asyncio.sleep(0)
        if self.failure is not None:
            raise EngineDeadError(f"The engine has died: {self.failure}")

    def _sequence(self, request: GenerateRequest) -> tuple[list[int], Any]:
        script = self.script(request) if callable(self.script) else self.script
        ends = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            ends |= set(request.eos_token_ids)
        script = list(script) + ([] if self.eos is None else [self.eos])
        tokens: list[int] = []
        while len(tokens) < request.sampling.max_tokens:
            token = script[len(tokens) % len(script)]
            tokens.append(token)
            if token in ends:
                return tokens, "stop"
        return tokens, "length"

    @staticmethod
    def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
        top = tuple((token + i, -0.25 - i) for i in range(num_top))
        return TokenLogprobs(-0.25, top)

    def die(self, reason: str) -> None:
        self.failure = reason
        for woken in self._woken.values():
            woken.set()
        if self.on_failure is not None:
            self.on_failure(reason)

    def abort(self, request_id: str) -> None:
        if request_id in self._woken:
            self._dropped.add(request_id)
            self._woken[request_id].set()

    async def shutdown(self) -> None:
        self.is_shut_down = True
