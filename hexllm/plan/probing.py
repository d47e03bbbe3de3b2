"""How much memory a model's steps take, found with the first few of its layers.

A step's temporaries hardly depend on the number of layers, since each layer's are free before the
next one's are needed; so a model of few layers, which compiles in seconds, tells which lengths are
worth compiling the whole one for.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from hexllm.engine.buckets import Buckets
from hexllm.engine.capacity import (
    ProgramMemory,
    affordable_blocks,
    measured_shapes,
    program_bytes,
)
from hexllm.engine.programs import Programs
from hexllm.model.specs import flatten
from hexllm.plan.compiling import Compiler, OutOfHbmError, in_parallel
from hexllm.plan.memory import blocks_for
from hexllm.plan.records import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from hexllm.core.settings import Settings
    from hexllm.engine.buckets import StepShape
    from hexllm.plan.chips import Chip
    from hexllm.plan.records import Model, Program

#: The shortest context that is tried where none is asked for.
SHORTEST = 512


class Prober:
    """Finds what fits on one mesh.

    Attributes:
        programs: Of the whole model.
    """

    def __init__(
        self, model: Model, mesh: Mesh, dtype: DTypeLike, settings: Settings, chip: Chip
    ) -> None:
        self._model, self._chip, self._settings = model, chip, settings
        self.programs = make_programs(model, mesh, dtype, settings, model.cfg.num_hidden_layers)
        self._few = make_programs(model, mesh, dtype, settings, distinct_layers(model))
        self.weights = self.programs.param_bytes()
        self.bytes_per_block = self.programs.bytes_per_block()
        self._needs: dict[int, dict[StepShape, ProgramMemory]] = {}

    def buckets(self, length: int) -> Buckets:
        """Return the shapes of a server with this ``max_model_len``."""
        return Buckets(self._settings, length, self._settings.block_size)

    def memory(self, length: int, weights: int | None = None) -> Memory | None:
        """Return the memory at this ``max_model_len``; None where no sequence of it fits.

        Args:
            length: Tokens.
            weights: Bytes on each device, if not the model's own.
        """
        weights = self.weights if weights is None else weights
        least = blocks_for(length, self._settings.block_size) * self.bytes_per_block
        if weights + least > self._chip.hbm_bytes:
            return None
        try:
            needs = self.needs(length)
        except OutOfHbmError:
            return None
        memory = self.with_needs(length, list(needs.values()), weights, is_measured=False)
        return memory if memory.num_blocks * memory.block_size >= length else None

    def needs(self, length: int) -> dict[StepShape, ProgramMemory]:
        """Return what the largest steps at this ``max_model_len`` need, by few layers of them.

        Raises:
            OutOfHbmError: More than there is.
        """
        if length not in self._needs:
            shapes = measured_shapes(self.buckets(length).shapes())
            compiler = Compiler(self._few, self._chip)
            found = in_parallel([functools.partial(compiler.step, s, s.blocks) for s in shapes])
            scale = self.programs.cfg.num_hidden_layers / self._few.cfg.num_hidden_layers
            self._needs[length] = {
                shape: ProgramMemory(program.temporary_bytes, int(program.code_bytes * scale))
                for shape, program in zip(shapes, found, strict=True)
            }
        return self._needs[length]

    def measured(self, length: int, found: Sequence[Program]) -> Memory:
        """Return the memory at this ``max_model_len``, given programs of the whole model."""
        needs = dict(self.needs(length))
        for program in found:
            if program.shape is not None:
                need = ProgramMemory(program.temporary_bytes, program.code_bytes)
                needs[program.shape] = need
        return self.with_needs(length, list(needs.values()), self.weights, is_measured=True)

    def with_needs(
        self, length: int, needs: Sequence[ProgramMemory], weights: int, *, is_measured: bool
    ) -> Memory:
        """Return the memory where programs need so much."""
        shapes = self.buckets(length).shapes()
        samplers = len({shape.seqs for shape in shapes})
        free = self._chip.hbm_bytes - weights - program_bytes(needs, shapes)
        settings = self._settings
        blocks = settings.num_blocks
        if blocks is None:
            blocks = affordable_blocks(max(free, 0), self.bytes_per_block, shapes, settings)
        return Memory(
            hbm=self._chip.hbm_bytes,
            weights=weights,
            temporaries=max(n.temporaries for n in needs),
            code=max(n.code for n in needs) * len(shapes),
            kv=blocks * self.bytes_per_block,
            num_programs=len(shapes) + samplers,
            bytes_per_block=self.bytes_per_block,
            num_blocks=blocks,
            block_size=settings.block_size,
            is_measured=is_measured,
        )

    def longest(self, limit: int) -> tuple[int, Memory] | None:
        """Return the longest of ``limit``, its half, quarter … that fits; None where none does."""
        length = limit
        while True:
            memory = self.memory(length)
            if memory is not None:
                return length, memory
            if length // 2 < SHORTEST:
                return None
            length //= 2


def make_programs(
    model: Model, mesh: Mesh, dtype: DTypeLike, settings: Settings, layers: int
) -> Programs:
    """Return the programs of a model's first layers, as a server with these settings has them."""
    return Programs(
        model.family,
        dataclasses.replace(model.cfg, num_hidden_layers=layers),
        mesh,
        dtype,
        block_size=settings.block_size,
        num_slots=settings.max_decode_seqs,
        attention_backend=settings.attention_backend,
    )


def distinct_layers(model: Model) -> int:
    """Return how many of the first layers have all kinds of layers among them; at least two."""
    family, cfg = model.family, model.cfg
    kinds = [
        (family.kv_spec(cfg, i), tuple(flatten(family.layer_specs(cfg, i)).items()))
        for i in range(cfg.num_hidden_layers)
    ]
    last = max(kinds.index(kind) for kind in set(kinds))
    return min(max(2, last + 1), cfg.num_hidden_layers)
