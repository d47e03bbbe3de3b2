"""How many KV blocks the memory of a device holds beside weights and programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.core.settings import Settings
    from hexllm.engine.buckets import StepShape


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """What a compiled program needs of each device besides weights and KV, in bytes.

    Attributes:
        temporaries: While it runs.
        code: As long as it is loaded.
    """

    temporaries: int
    code: int


def largest_shapes(shapes: Sequence[StepShape]) -> tuple[StepShape, StepShape]:
    """Return the largest prefill and the largest decode: no other step needs more.

    Args:
        shapes: All that can occur, largest first.
    """
    return (
        next(s for s in shapes if s.max_query_len > 1),
        next(s for s in shapes if s.max_query_len == 1),
    )


def program_bytes(
    prefill: ProgramMemory, decode: ProgramMemory, shapes: Sequence[StepShape]
) -> ProgramMemory:
    """Return what all programs need: the most temporaries of one, and the code of each.

    A sampler, of which there is one a number of sequences, counts as a decode.

    Args:
        prefill: Of the largest prefill.
        decode: Of the largest decode.
        shapes: All that are compiled.
    """
    prefills = sum(shape.max_query_len > 1 for shape in shapes)
    others = len(shapes) - prefills + len({shape.seqs for shape in shapes})
    return ProgramMemory(
        temporaries=max(prefill.temporaries, decode.temporaries),
        code=prefill.code * prefills + decode.code * others,
    )


def affordable_blocks(
    free: int, bytes_per_block: int, shapes: Sequence[StepShape], settings: Settings
) -> int:
    """Return how many KV blocks to allocate of each device's free memory; 0 when it holds none.

    Args:
        free: Bytes that weights and programs leave.
        bytes_per_block: Of a block, on one device.
        shapes: All that can occur.
        settings: ``hbm_utilization_factor`` says how much of it to take, ``max_decode_seqs`` what
            can be used at all.
    """
    usable = int(free * settings.hbm_utilization_factor)
    most = max(shape.blocks for shape in shapes) * settings.max_decode_seqs
    return max(0, min(usable // bytes_per_block, most))
