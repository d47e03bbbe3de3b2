"""What to do: the flags of a server that fits, and what would make one fit that does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hexllm.core.settings import Settings
from hexllm.plan.memory import GIB, weight_bytes
from hexllm.plan.opening import choose_mesh, largest_size
from hexllm.plan.records import Remedy
from hexllm.plan.sizing import Sizer
from hexllm.plan.topology import Topology, layouts, parse_topology

if TYPE_CHECKING:
    from hexllm.plan.records import Plan

#: The length that remedies are sought for where none was asked for: Hex-LLM's tuning guide's.
GUIDE_LENGTH = 4096

#: Settings that shape programs and memory, and so belong to the flags that a plan is good for.
SHAPING = (
    *("block_size", "max_prefill_seqs", "prefill_seqs_padding", "prefill_len_padding"),
    *("max_decode_seqs", "decode_seqs_padding", "decode_blocks_padding", "num_blocks"),
    *("hbm_utilization_factor", "sliding_window", "attention_backend", "revision"),
    *("enable_prefix_cache_hbm", "enable_chunked_prefill", "max_num_batched_tokens"),
)


def server_flags(plan: Plan) -> tuple[str, ...]:
    """Return the flags of ``hexllm serve`` that the plan is good for."""
    settings = plan.options.settings
    flags = [f"--model={settings.model}", f"--tensor_parallel_size={plan.tensor_parallel_size}"]
    if plan.topology.num_hosts > 1:
        flags.append(f"--num_hosts={plan.topology.num_hosts}")
    flags.append(f"--max_model_len={plan.max_model_len}")
    if plan.dtype != "bfloat16":
        flags.append(f"--dtype={plan.dtype}")
    for name in SHAPING:
        value = getattr(settings, name)
        if value != Settings.model_fields[name].get_default():
            flags.append(f"--{name}" if value is True else f"--{name}={value}")
    return tuple(flags)


def remedies(plan: Plan, sizer: Sizer) -> tuple[Remedy, ...]:
    """Return what would make the model fit.

    All of it is computed; nothing is compiled.

    Args:
        plan: Of what does not fit.
        sizer: Of its mesh.
    """
    asked = plan.options.settings.max_model_len
    length = asked or min(GUIDE_LENGTH, plan.model_limit)
    found = []
    if sizer.weights < plan.topology.chip.hbm_bytes:
        found += _shorter(plan, sizer)
    found += _smaller_numbers(plan, sizer, length)
    found += _larger_topology(plan, length)
    return tuple(found)


def _shorter(plan: Plan, sizer: Sizer) -> list[Remedy]:
    longest = sizer.longest(plan.max_model_len // 2)
    if longest is None:
        return []
    text = f"--max_model_len={longest[0]} (of the lengths got by halving, the first that fits)"
    return [Remedy("max_model_len", longest[0], text)]


def _smaller_numbers(plan: Plan, sizer: Sizer, length: int) -> list[Remedy]:
    family, cfg = plan.model.family, plan.model.cfg
    whole = weight_bytes(family, cfg, "bf16")
    for kind in ("int8", "int4"):
        weights = int(sizer.weights * weight_bytes(family, cfg, kind) / whole)
        if plan.dtype == "float32":
            weights //= 2
        if not sizer.memory(length, weights=weights).holds(length):
            continue
        text = (
            f"{kind} weights: {weights / GIB:.2f} GiB a chip, with --max_model_len={length}. "
            f"Computed: hexllm serves no quantized weights so far"
        )
        return [Remedy("precision", kind, text)]
    return []


def _larger_topology(plan: Plan, length: int) -> list[Remedy]:
    chip = plan.topology.chip
    for layout in layouts(chip.name):
        topology = parse_topology(f"{chip.name}:{layout}")
        if topology.num_chips <= plan.topology.num_chips:
            continue
        sizer = _sizer(plan, topology)
        if not sizer.memory(length).holds(length):
            continue
        text = (
            f"{topology.name} ({topology.num_chips} chips, --tensor_parallel_size="
            f"{sizer.programs.mesh.size}): {sizer.weights / GIB:.2f} GiB of weights a chip in "
            f"{plan.dtype}, with --max_model_len={length}"
        )
        return [Remedy("topology", topology.name, text)]
    return []


def _sizer(plan: Plan, topology: Topology) -> Sizer:
    size = largest_size(plan.model, topology)
    mesh = choose_mesh(plan.model, topology, size)
    return Sizer(plan.model, mesh, plan.dtype, plan.options.settings, topology.chip)
