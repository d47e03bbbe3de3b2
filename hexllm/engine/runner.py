"""Compiles the programs of steps and runs them over the KV cache."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring

from hexllm.engine.messages import TokenLogprobs
from hexllm.engine.scheduler import Plan
from hexllm.engine.step import StepInputs, build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hexllm.engine.buckets import StepShape
    from hexllm.engine.messages import SamplingParams
    from hexllm.engine.programs import Programs
    from hexllm.ops.kv_cache import LayerKV
    from hexllm.ops.sampling import Sampled

logger = logging.getLogger(__name__)


class Runner:
    """Owns the KV cache and the compiled programs: one a shape, and one sampler a batch size.

    Sampling is a program of its own because it depends on the number of sequences only, while it
    takes as long to compile as a dozen layers: shapes share it. Logits stay on the device, and so
    do the tokens sampled last: the next step starts from them before the host has seen them.

    Attributes:
        num_late_compiles: Programs that were compiled, or compiled again, after warm-up.
    """

    def __init__(self, programs: Programs, params: Any, *, use_jit: bool) -> None:
        """Take the programs to compile and the parameters to run them with, on the devices."""
        self._programs = programs
        self._params = params
        self._use_jit = use_jit
        self._kv: tuple[LayerKV, ...] = ()
        self._num_blocks = 0
        self._last_tokens = jnp.zeros(programs.num_slots, jnp.int32, device=programs.replicated)
        self._compiled: dict[StepShape | int, Callable[..., Any]] = {}
        self._is_warm = False
        self.num_late_compiles = 0

    def bytes_per_block(self) -> int:
        """Return the bytes that one KV block takes of each device, over all layers."""
        return self._programs.bytes_per_block()

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache. Programs are compiled for this number of blocks."""
        self._num_blocks = num_blocks
        self._kv = self._programs.allocate_kv(num_blocks)

    def temporary_bytes(self, shape: StepShape, num_blocks: int) -> int:
        """Return what a step of this shape needs of each device besides weights and KV.

        It is found by compiling the step.

        Args:
            shape: The step.
            num_blocks: Blocks to compile it with; the result hardly depends on them.
        """
        kv = self._programs.kv_shapes(num_blocks)
        compiled = self._programs.lower_step(shape, self._params, kv).compile()
        analysis = compiled.memory_analysis()
        if analysis is None:
            return 0
        return int(analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes)

    def warm_up(self, shapes: list[StepShape], progress: Callable[[int, int, str], None]) -> None:
        """Compile every shape, several at a time, and run the host's own small programs once.

        Args:
            shapes: All that can occur.
            progress: Told after each with (done, total, shape).
        """
        if self._use_jit:
            samplers = sorted({shape.seqs for shape in shapes}, reverse=True)
            tasks: list[StepShape | int] = [*shapes, *samplers]
            with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile") as pool:
                futures = {pool.submit(self._compile, task): task for task in tasks}
                try:
                    for done, future in enumerate(as_completed(futures), start=1):
                        task = futures[future]
                        self._compiled[task] = future.result()
                        progress(done, len(tasks), _title(task))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        # The smallest step, of nothing but padding, runs the transfers to and fro once.
        smallest = shapes[-1]
        self._finish(self._call(smallest, self._padding(smallest, self._num_blocks)), 0, True)
        self._is_warm = True

    def dispatch(self, plan: Plan, shape: StepShape) -> Sampled:
        """Start a step and return its result on the device, which may not be there yet.

        It runs after the steps dispatched before it, whose results may still be to come.
        """
        inputs = self._build(plan, shape, self._num_blocks)
        with self._counting_compiles():
            return self._call(shape, inputs)

    def result(self, plan: Plan, sampled: Sampled) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for a step and return each sequence's token, and logprobs where asked for."""
        params = [work.request.sampling for work in plan.works]
        wants = any(p.logprobs is not None for p in params)
        with self._counting_compiles():
            host = self._finish(sampled, len(params), wants)
        tokens = [int(token) for token in host.tokens]
        return tokens, [_logprobs(host, s, p) for s, p in enumerate(params)]

    def _finish(self, sampled: Sampled, size: int, wants_logprobs: bool) -> Sampled:
        if not wants_logprobs:
            return sampled.replace(tokens=np.asarray(sampled.tokens)[:size])  # type: ignore[attr-defined]
        return jax.tree.map(lambda x: np.asarray(x)[:size], sampled)

    def _build(self, plan: Plan, shape: StepShape, num_blocks: int) -> StepInputs:
        return build(
            plan,
            shape,
            block_size=self._programs.block_size,
            num_blocks=num_blocks,
            num_slots=self._programs.num_slots,
        )

    def _padding(self, shape: StepShape, num_blocks: int) -> StepInputs:
        """Return a step of nothing but padding."""
        return self._build(Plan("prefill", ()), shape, num_blocks)

    def _compile(self, task: StepShape | int) -> Callable[..., Any]:
        """Compile a step's shape, or the sampler of a number of sequences."""
        if isinstance(task, int):
            return self._programs.lower_sample(task).compile()
        return self._programs.lower_step(task, self._params, self._kv).compile()

    def _call(self, shape: StepShape, inputs: StepInputs) -> Sampled:
        params, kv, last = self._params, self._kv, self._last_tokens
        if not self._use_jit:
            with jax.disable_jit():
                tokens, step, rows, slots = jax.tree.map(jnp.asarray, inputs)
                logits, self._kv = self._programs.step(params, kv, last, tokens, step)
                sampled, self._last_tokens = self._programs.sample(logits, rows, last, slots)
                return sampled
        tokens, step, rows, slots = inputs
        logits, self._kv = self._program(shape)(params, kv, last, tokens, step)
        sampled, self._last_tokens = self._program(shape.seqs)(logits, rows, last, slots)
        return sampled

    def _program(self, task: StepShape | int) -> Callable[..., Any]:
        program = self._compiled.get(task)
        if program is None:
            logger.info("Compiling %s.", _title(task))
            program = self._compiled[task] = self._compile(task)
        return program

    @contextlib.contextmanager
    def _counting_compiles(self) -> Iterator[None]:
        """Count what is compiled on this thread meanwhile, if the warm-up is over."""
        if not (self._is_warm and self._use_jit):
            yield
            return
        before = _compiles.count
        yield
        if _compiles.count != before:
            self.num_late_compiles += _compiles.count - before
            logger.error("%d programs were compiled after warm-up.", _compiles.count - before)


def _title(task: StepShape | int) -> str:
    return f"sampling of {task} sequences" if isinstance(task, int) else str(task)


class _Compiles(threading.local):
    """How many programs JAX has compiled on this thread."""

    count = 0


_compiles = _Compiles()


def _count_compile(event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    if event == "/jax/core/compile/backend_compile_duration":
        _compiles.count += 1


# Once a process: JAX keeps its listeners for ever.
monitoring.register_event_duration_secs_listener(_count_compile)


def _logprobs(host: Sampled, s: int, params: SamplingParams) -> TokenLogprobs | None:
    if params.logprobs is None:
        return None
    count = params.logprobs
    top = zip(host.top_tokens[s, :count], host.top_logprobs[s, :count], strict=True)
    return TokenLogprobs(
        logprob=float(host.logprobs[s]),
        top=tuple((int(token), float(value)) for token, value in top if np.isfinite(value)),
    )
