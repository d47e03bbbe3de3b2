"""What ``hexllm plan --json`` prints. Its keys are a stable interface; docs/plan.md has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hexllm

if TYPE_CHECKING:
    from hexllm.plan.records import Json, Memory, Plan, Program, Timed


def as_json(plan: Plan) -> Json:
    """Return a plan as plain data. Sizes are bytes a device, times microseconds."""
    model, topology = plan.model, plan.topology
    return {
        "hexllm": hexllm.__version__,
        "model": {
            "name": model.name,
            "family": model.family_name,
            "parameters": model.parameters,
            "max_position_embeddings": plan.model_limit,
        },
        "topology": {
            "name": topology.name,
            "chip": topology.chip.name,
            "chips": topology.num_chips,
            "devices": topology.num_devices,
            "hosts": topology.num_hosts,
        },
        "dtype": plan.dtype,
        "tensor_parallel_size": plan.tensor_parallel_size,
        "fits": plan.fits,
        "reason": plan.reason,
        "max_model_len": plan.max_model_len,
        "memory": None if plan.memory is None else _memory(plan, plan.memory),
        "weight_bytes": plan.weight_bytes,
        "decode": _timed(plan, plan.decode),
        "prefill": _timed(plan, plan.prefill),
        "programs": [_program(program) for program in plan.programs],
        "flags": list(plan.flags),
        "remedies": [
            {"kind": each.kind, "value": each.value, "text": each.text} for each in plan.remedies
        ],
        "notes": list(plan.notes),
    }


def _memory(plan: Plan, memory: Memory) -> dict[str, Any]:
    return {
        "hbm": memory.hbm,
        "weights": memory.weights,
        "kv": memory.kv,
        "temporaries": memory.temporaries,
        "programs": memory.code,
        "free": memory.hbm - memory.used,
        "num_programs": memory.num_programs,
        "num_blocks": memory.num_blocks,
        "block_size": memory.block_size,
        "bytes_per_block": memory.bytes_per_block,
        "sequences_at_max_model_len": memory.seqs_of(plan.max_model_len),
        "is_measured": memory.is_measured,
    }


def _timed(plan: Plan, timed: Timed | None) -> dict[str, Any] | None:
    if timed is None:
        return None
    sampling = timed.sampling
    return {
        "sequences": timed.seqs,
        "context": timed.context,
        "tokens": timed.tokens,
        "floor_us": timed.floor_us,
        "simulated_us": timed.roof_us,
        "xla_us": timed.xla_us,
        "greedy_sampling_us": sampling and sampling.estimate.cheapest_roof_us,
        "dearest_sampling_us": sampling and sampling.estimate.roof_us,
        "weight_bytes": timed.work.weight_bytes,
        "kv_bytes": timed.work.kv_bytes,
        "flops": timed.work.flops,
        "tokens_per_second": timed.tokens_per_s,
        "usd_per_million_tokens": plan.cost_per_million(timed),
        "step": timed.step.title,
        "sampling": sampling and sampling.title,
    }


def _program(program: Program) -> dict[str, Any]:
    estimate = program.estimate
    return {
        "title": program.title,
        "kind": program.kind,
        "sequences": program.seqs,
        "tokens": program.shape.tokens if program.shape else None,
        "blocks": program.shape.blocks if program.shape else None,
        "num_blocks": program.num_blocks,
        "lower_s": round(program.lower_s, 3),
        "compile_s": round(program.compile_s, 3),
        "argument_bytes": program.argument_bytes,
        "temporary_bytes": program.temporary_bytes,
        "code_bytes": program.code_bytes,
        "total_bytes": program.total_bytes,
        "simulated_us": estimate.roof_us,
        "xla_us": estimate.xla_us,
        "collectives": [
            {
                "kind": each.kind,
                "count": count,
                "bytes": each.num_bytes,
                "devices": each.group_size,
            }
            for each, count in estimate.ledger.collectives.items()
        ],
        "unpriced": dict(estimate.ledger.unpriced),
    }
