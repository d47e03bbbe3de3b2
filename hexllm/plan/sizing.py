"""What a server's memory is used for on one mesh, and which lengths fit.

Before anything is compiled, steps' needs are estimated from the model's widths: good enough to say
which lengths are worth compiling for, and what another topology would hold. Compiled programs then
say what they need themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from hexllm.engine.buckets import Buckets
from hexllm.engine.capacity import (
    ProgramMemory,
    affordable_blocks,
    largest_shapes,
    program_bytes,
)
from hexllm.engine.programs import Programs
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

#: A program's code: of each layer, and at least. Of the programs of docs/design/kernels.md the
#: largest has 0.27 MiB a layer; identical layers share most of it.
_CODE_BYTES_A_LAYER = 300 << 10
_LEAST_CODE_BYTES = 10 << 20


class Sizer:
    """Finds what fits on one mesh.

    Attributes:
        programs: Of the model.
        weights: Bytes on each device.
        bytes_per_block: Of a KV block, on each device.
    """

    def __init__(
        self, model: Model, mesh: Mesh, dtype: DTypeLike, settings: Settings, chip: Chip
    ) -> None:
        self._chip, self._settings = chip, settings
        self.programs = Programs(
            model.family,
            model.cfg,
            mesh,
            dtype,
            block_size=settings.block_size,
            num_slots=settings.max_decode_seqs,
            attention_backend=settings.attention_backend,
        )
        self.weights = self.programs.param_bytes()
        self.bytes_per_block = self.programs.bytes_per_block()

    def buckets(self, length: int) -> Buckets:
        """Return the shapes of a server with this ``max_model_len``."""
        return Buckets(self._settings, length, self._settings.block_size)

    def longest(self, limit: int) -> tuple[int, Memory] | None:
        """Return the longest of ``limit``, its half, quarter … that fits; None where none does."""
        while True:
            memory = self.memory(limit)
            if memory.holds(limit):
                return limit, memory
            if limit // 2 < SHORTEST:
                return None
            limit //= 2

    def memory(
        self, length: int, found: Sequence[Program] = (), weights: int | None = None
    ) -> Memory:
        """Return the memory at this ``max_model_len``.

        Args:
            length: Tokens.
            found: Programs that were compiled; what the others need is estimated.
            weights: Bytes on each device, if not the model's own.
        """
        weights = self.weights if weights is None else weights
        shapes = self.buckets(length).shapes()
        prefill, decode = (self._need(shape, found) for shape in largest_shapes(shapes))
        programs = program_bytes(prefill, decode, shapes)
        free = max(0, self._chip.hbm_bytes - weights - programs.temporaries - programs.code)
        blocks = self._settings.num_blocks
        if blocks is None:
            blocks = affordable_blocks(free, self.bytes_per_block, shapes, self._settings)
        return Memory(
            hbm=self._chip.hbm_bytes,
            weights=weights,
            temporaries=programs.temporaries,
            code=programs.code,
            kv=blocks * self.bytes_per_block,
            num_programs=len(shapes) + len({shape.seqs for shape in shapes}),
            bytes_per_block=self.bytes_per_block,
            num_blocks=blocks,
            block_size=self._settings.block_size,
            is_measured=bool(found),
        )

    def decisive(self, length: int) -> StepShape:
        """Return the step that is expected to need most."""
        shapes = largest_shapes(self.buckets(length).shapes())
        return max(shapes, key=lambda shape: self.estimate(shape).temporaries)

    def estimate(self, shape: StepShape) -> ProgramMemory:
        """Return about what a step needs, from the model's widths.

        Four arrays of [T, D] live at a time, and what a layer's projections give on one device; of
        a token's experts, each counts. Logits are float32. ``tests/tpu/test_steps.py`` holds it
        against what the compiler says.
        """
        cfg, size = self.programs.cfg, self.programs.mesh.size
        experts = getattr(cfg, "num_experts_per_tok", 1)
        heads = (cfg.num_attention_heads + 2 * cfg.num_key_value_heads) * cfg.head_dim
        mlp = getattr(cfg, "moe_intermediate_size", cfg.intermediate_size)
        wide = max(cfg.intermediate_size, experts * mlp)
        width = (3 + experts) * cfg.hidden_size + (heads + 2 * wide) / size
        activations = shape.tokens * width * jnp.dtype(self.programs.dtype).itemsize
        logits = 4 * shape.seqs * cfg.vocab_size / size
        code = max(_LEAST_CODE_BYTES, _CODE_BYTES_A_LAYER * cfg.num_hidden_layers)
        return ProgramMemory(int(activations + logits), code)

    def _need(self, shape: StepShape, found: Sequence[Program]) -> ProgramMemory:
        """Return what a step needs: what it was compiled to, or an estimate.

        The code of another step of its kind is as good as its own.
        """
        estimate = self.estimate(shape)
        kind = "decode" if shape.max_query_len == 1 else "prefill"
        own = [program for program in found if program.shape == shape]
        alike = [program for program in found if program.kind == kind]
        return ProgramMemory(
            own[0].temporary_bytes if own else estimate.temporaries,
            max((program.code_bytes for program in alike), default=estimate.code),
        )
