"""Compiles a model's programs for devices that are not there, and reads what comes out."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax

from hexllm.plan.floors import kv_specs, layer_kv_bytes, prefill_work, visible
from hexllm.plan.hlo import parse_module
from hexllm.plan.kernel_times import decode_issue_us, prefill_issue_us
from hexllm.plan.records import Program
from hexllm.plan.schedule import simulate
from hexllm.plan.walk import KernelPrice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hexllm.engine.buckets import StepShape
    from hexllm.engine.programs import Programs
    from hexllm.plan.chips import Chip

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfHbmError(Exception):
    """The compiler found that a program needs more memory than a device has.

    Attributes:
        needed: Bytes, as far as the compiler said; else None.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        found = re.search(r"(?:temporaries \(|[Uu]sed )([\d.]+)([KMGT]?)", text)
        self.needed = int(float(found[1]) * _UNITS[found[2]]) if found else None


class Compiler:
    """Compiles programs for one chip's mesh.

    Attributes:
        programs: Of the model.
        chip: Of the mesh's devices.
    """

    def __init__(self, programs: Programs, chip: Chip, dump: Path | None = None) -> None:
        """Take what to compile, and a directory for the programs' scheduled HLO."""
        self.programs = programs
        self.chip = chip
        self._params = programs.param_shapes()
        self._dump = dump

    def step(
        self, shape: StepShape, num_blocks: int, *, seqs: int | None = None, context: int = 1
    ) -> Program:
        """Compile a step and estimate its time.

        Args:
            shape: The step's.
            num_blocks: Of the KV pool.
            seqs: How many sequences it is timed with; None is all of the shape's.
            context: Tokens of each.

        Raises:
            OutOfHbmError: It needs more memory than there is.
        """
        kv = self.programs.kv_shapes(num_blocks)
        kind = "decode" if shape.max_query_len == 1 else "prefill"
        prices = kernel_prices(self.programs, self.chip, seqs or shape.seqs, context)
        return self._compile(
            lambda: self.programs.lower_step(shape, self._params, kv),
            {"title": str(shape), "kind": kind, "shape": shape, "seqs": shape.seqs},
            num_blocks,
            prices,
        )

    def sampler(self, seqs: int) -> Program:
        """Compile the sampler of so many sequences.

        Raises:
            OutOfHbmError: It needs more memory than there is.
        """
        what = {"title": f"sampling of {seqs} sequences", "kind": "sample", "shape": None}
        return self._compile(lambda: self.programs.lower_sample(seqs), {**what, "seqs": seqs}, 0)

    def _compile(
        self,
        lower: Callable[[], jax.stages.Lowered],
        what: dict[str, Any],
        num_blocks: int,
        prices: dict[str, KernelPrice] | None = None,
    ) -> Program:
        begin = time.perf_counter()
        lowered = lower()
        middle = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error) and "HBM" in str(error).upper():
                raise OutOfHbmError(str(error)) from error
            raise
        end = time.perf_counter()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None  # TPU compilers always have both
        assert memory is not None
        if self._dump is not None:
            self._dump.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "-", what["title"])
            (self._dump / f"{name}.hlo.txt").write_text(text, encoding="utf-8")
        return Program(
            **what,
            num_blocks=num_blocks,
            lower_s=middle - begin,
            compile_s=end - middle,
            argument_bytes=memory.argument_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            total_bytes=memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes,
            estimate=simulate(parse_module(text), self.chip, kernels=prices),
        )


def in_parallel(tasks: Sequence[Callable[[], Program]]) -> list[Program]:
    """Return what the tasks give, computed on as many threads as there are cores.

    Raises:
        OutOfHbmError: One of them needs more memory than there is.
    """
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile") as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def kernel_prices(
    programs: Programs, chip: Chip, seqs: int, context: int
) -> dict[str, KernelPrice]:
    """Return what a call of each attention kernel takes, the mean over the layers.

    Args:
        programs: Of the model on its mesh.
        chip: Of the mesh's devices.
        seqs: Sequences of a decode.
        context: Tokens of each, or of a prefill's prompt.
    """
    layers = programs.cfg.num_hidden_layers
    specs = kv_specs(programs)
    shards = programs.mesh.size
    issue_us = sum(
        decode_issue_us(
            chip.name, seqs, visible(spec, context), spec.num_kv_heads // shards, spec.head_dim
        )
        for spec in specs
    )
    decoded = seqs * sum(layer_kv_bytes(programs, context)) / layers
    prompt = sum(layer_kv_bytes(programs, context, only_visible=False)) / layers
    products_us = prefill_work(programs, context).attention_flops / layers / chip.peak_flops * 1e6
    return {
        "hexllm_decode_attention": KernelPrice(issue_us / layers, decoded),
        "hexllm_ragged_attention": KernelPrice(
            prefill_issue_us(chip.name, products_us, specs[0].head_dim), prompt
        ),
    }
