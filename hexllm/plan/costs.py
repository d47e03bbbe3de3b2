"""What one HLO instruction moves to and from HBM, and what it multiplies.

A fusion reads of an operand only what its own slices and gathers take, and writes in place where
its result is an update of an operand. Sizes are those in memory: padding to whole tiles counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hexllm.plan.hlo import HBM

if TYPE_CHECKING:
    from hexllm.plan.chips import Chip
    from hexllm.plan.hlo import Array, Computation, Instruction, Module
    from hexllm.plan.ledger import ArrayKind

#: Instructions that take no time and move nothing.
FREE = frozenset(
    (
        *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "iota"),
        *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
    )
)

#: Custom calls that only tell the compiler something.
FREE_TARGETS = frozenset(
    (
        *("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "ShapeAssertion"),
        *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "xla_tpu_custom_call_marker"),
    )
)

_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))
_SAME_DATA = frozenset(("bitcast", "reshape", "copy", "transpose", "convert"))
_INT8 = frozenset(("s8", "u8", "s4", "u4"))


@dataclass(frozen=True)
class Cost:
    """What an instruction takes of a chip.

    Attributes:
        hbm_bytes: Read from and written to HBM.
        flops: Of matrix products.
        matmul_s: Seconds that they take at the chip's peak for their type.
    """

    hbm_bytes: float = 0
    flops: float = 0
    matmul_s: float = 0


class Costs:
    """The costs of a module's instructions on a chip, each worked out once."""

    def __init__(self, module: Module, chip: Chip) -> None:
        self._module = module
        self._chip = chip
        self._known: dict[str, Cost] = {}

    def of(self, computation: Computation, instruction: Instruction) -> Cost:
        """Return the cost of an instruction that is no loop, call, branch or kernel."""
        known = self._known.get(instruction.name)
        if known is None:
            flops, seconds = self._products(computation, instruction)
            known = Cost(self._hbm_bytes(computation, instruction), flops, seconds)
            self._known[instruction.name] = known
        return known

    def operand_bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes of an instruction's operands that lie in HBM."""
        return sum(_hbm(computation, operand) for operand in instruction.operands)

    def async_bytes(self, computation: Computation, instruction: Instruction) -> float:
        """Return the bytes of HBM that an asynchronous copy, slice or call moves.

        A copy counts once, though its bytes are read here and written there: one of the two ends
        is VMEM, or else it counts for both.
        """
        if instruction.called:
            inner = self._module.computations[instruction.called[0]]
            return sum(
                self.async_bytes(inner, each)
                if each.opcode.endswith("-start")
                else self.of(inner, each).hbm_bytes
                for each in inner
                if each.opcode not in FREE and not each.opcode.endswith(("-done", "-update"))
            )
        source, target = _ends(instruction)
        if source is None or target is None:
            return 0
        moved = min(source.num_bytes, target.num_bytes)
        return moved * ((source.space == HBM) + (target.space == HBM))

    def copied(self, computation: Computation, instruction: Instruction) -> ArrayKind | None:
        """Return the type and shape of what an instruction copies as a whole from HBM to HBM.

        Any fusion that reads all of an array and writes all of one like it counts as well.
        """
        if instruction.opcode == "copy-start":
            source, target = _ends(instruction)
            is_copy = source and target and source.space == target.space == HBM
            return (target.dtype, target.dims) if target and is_copy else None
        if instruction.opcode not in ("copy", "fusion") or not instruction.hbm_bytes:
            return None
        for index, operand in enumerate(instruction.operands):
            for result in instruction.arrays if _hbm(computation, operand) else ():
                source = _first(computation, operand)
                full = source.num_bytes
                if (
                    (source.dtype, source.dims) == (result.dtype, result.dims)
                    and result.space == source.space == HBM
                    and self.read_by(computation, instruction, index, full) == full
                    and self.of(computation, instruction).hbm_bytes >= 2 * full
                ):
                    return result.dtype, result.dims
        return None

    def read_of(self, computation: Computation, name: str, full: int) -> int:
        """Return how many bytes of an instruction's result its users read, at most ``full``."""
        users = computation.users.get(name, ())
        return min(sum(self.read_by(computation, *user, full) for user in users), full)

    def read_by(self, computation: Computation, user: Instruction, index: int, full: int) -> int:
        """Return how many bytes of its operand number ``index`` an instruction reads."""
        if user.opcode in _SLICES and index == 0:
            return min(user.num_bytes, full)
        if user.opcode in _UPDATES and index == 0:
            return 0  # in place: the rest of the operand stays as it is
        if user.opcode in _SAME_DATA and not user.is_root:
            return self.read_of(computation, user.name, full)
        if user.opcode == "fusion" and user.called:
            inner = self._module.computations[user.called[0]]
            parameter = inner.parameters.get(index)
            return full if parameter is None else self.read_of(inner, parameter.name, full)
        return full

    def written_by(self, computation: Computation, instruction: Instruction) -> int:
        """Return how many bytes of HBM a fusion writes, given the computation it calls."""
        root = computation.root
        arrays = instruction.arrays
        if root.opcode == "tuple" and len(root.operands) == len(arrays):
            parts = zip(root.operands, arrays, strict=True)
            return sum(
                self._written(computation, name, array.num_bytes) if array.hbm_bytes else 0
                for name, array in parts
            )
        full = instruction.hbm_bytes
        return self._written(computation, root.name, full) if full else 0

    def _written(self, computation: Computation, name: str, full: int) -> int:
        instruction = computation.by_name[name]
        operands = instruction.operands
        if instruction.opcode == "dynamic-update-slice":
            return min(computation.by_name[operands[1]].num_bytes, full)
        if instruction.opcode == "scatter":
            return min(computation.by_name[operands[-1]].num_bytes, full)
        if instruction.opcode in ("bitcast", "reshape"):
            return self._written(computation, operands[0], full)
        if instruction.opcode == "fusion" and instruction.called:
            inner = self._module.computations[instruction.called[0]]
            return min(self._written(inner, inner.root.name, full), full)
        return full

    def _hbm_bytes(self, computation: Computation, instruction: Instruction) -> int:
        operands = instruction.operands
        if instruction.opcode == "fusion":
            inner = self._module.computations[instruction.called[0]]
            total = self.written_by(inner, instruction)
            for index, operand in enumerate(operands):
                full = _hbm(computation, operand)
                parameter = inner.parameters.get(index)
                if full and parameter is not None:
                    full = self.read_of(inner, parameter.name, full)
                total += full
            return total
        if instruction.opcode in _SLICES:
            read = instruction.num_bytes if _hbm(computation, operands[0]) else 0
            return read + instruction.hbm_bytes
        if instruction.opcode in _UPDATES and len(operands) >= 2:
            update = operands[1] if instruction.opcode == "dynamic-update-slice" else operands[-1]
            # The update is read wherever it lies, and written once more in place.
            return 2 * computation.by_name[update].num_bytes if instruction.hbm_bytes else 0
        return self.operand_bytes(computation, instruction) + instruction.hbm_bytes

    def _products(self, computation: Computation, instruction: Instruction) -> tuple[float, float]:
        """Return the FLOPs of an instruction's matrix products, and their seconds at the peak."""
        if instruction.opcode in ("convolution", "dot"):
            left, right = (_first(computation, name) for name in instruction.operands[:2])
            flops = 2.0 * _multiplications(instruction, left, right)
            return flops, flops * _passes(instruction, left) / self._peak(left, right)
        if instruction.opcode != "fusion" or not instruction.called:
            return 0.0, 0.0
        inner = self._module.computations[instruction.called[0]]
        parts = [self._products(inner, each) for each in inner]
        return sum(flops for flops, _ in parts), sum(seconds for _, seconds in parts)

    def _peak(self, left: Array, right: Array) -> float:
        chip = self._chip
        if left.dtype in _INT8 and right.dtype in _INT8 and chip.peak_int8_flops:
            return chip.peak_int8_flops
        if left.dtype.startswith("f8") and right.dtype.startswith("f8") and chip.has_fp8:
            return chip.peak_fp8_flops
        return chip.peak_flops


def _hbm(computation: Computation, name: str) -> int:
    instruction = computation.by_name.get(name)
    return instruction.hbm_bytes if instruction is not None else 0


def _first(computation: Computation, name: str) -> Array:
    return computation.by_name[name].arrays[0]


def _ends(instruction: Instruction) -> tuple[Array | None, Array | None]:
    """Return source and target of an asynchronous copy (target first in its shape) or slice."""
    arrays = [array for array in instruction.arrays if array.dims]
    if len(arrays) < 2:
        return None, None
    if instruction.opcode == "copy-start":
        return arrays[1], arrays[0]
    return arrays[0], arrays[1]


def _passes(instruction: Instruction, left: Array) -> int:
    """Return how many bf16 products one product of float32 takes at its precision."""
    if left.dtype != "f32":
        return 1
    found = re.search(r"operand_precision=\{(\w+)", instruction.attributes)
    return {"highest": 6, "high": 3}.get(found[1] if found else "", 1)


def _multiplications(instruction: Instruction, left: Array, right: Array) -> int:
    result = instruction.arrays[0].num_elements
    if instruction.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        for axis in found[1].split(",") if found and found[1] else ():
            result *= left.dims[int(axis)]
        return result
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return result
    result *= right.dims[labels[2].index("i")]
    for axis, window in enumerate(_windows(instruction.attributes)):
        given = left.dims[labels[1].index(str(axis))]
        made = instruction.arrays[0].dims[labels[3].index(str(axis))]
        result = result * _overlaps(given, made, **window) // made
    return result


def _windows(attributes: str) -> list[dict[str, int]]:
    """Return the window of each spatial axis of a convolution, as ``_overlaps`` takes it.

    XLA writes batched and contracted axes of matrix products as spatial ones.
    """
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(re.findall(r"(\w+)=([\d_x\-]+)", found[1])) if found else {}
    if "size" not in fields:
        return []
    sizes = fields["size"].split("x")

    def values(name: str, default: str) -> list[str]:
        return fields.get(name, "x".join([default] * len(sizes))).split("x")

    names = ("stride", "lhs_dilate", "rhs_dilate")
    columns = zip(sizes, values("pad", "0_0"), *(values(name, "1") for name in names), strict=True)
    return [
        {
            "size": int(size),
            "before": int(pad.partition("_")[0]),
            "stride": int(stride),
            "spread": int(spread),
            "dilation": int(dilation),
        }
        for size, pad, stride, spread, dilation in columns
    ]


@lru_cache(maxsize=4096)
def _overlaps(
    given: int, made: int, *, size: int, before: int, stride: int, spread: int, dilation: int
) -> int:
    """Return how many pairs of a result's place and a window's place meet a value of the operand.

    Args:
        given: The operand's length along the axis.
        made: The result's.
        size: The window's.
        before: Padding before the operand.
        stride: From one window to the next.
        spread: From one value of the operand to the next (``lhs_dilate``), zeros between them.
        dilation: From one value of the window to the next.
    """
    last = (given - 1) * spread
    count = 0
    for place in range(made):
        for offset in range(size):
            at = place * stride + offset * dilation - before
            count += 0 <= at <= last and at % spread == 0
    return count
