"""Plans one model on one topology: what fits, then how fast it can be."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp

from hexllm.core.errors import ConfigError
from hexllm.plan.advice import remedies, server_flags
from hexllm.plan.compiling import Compiler, OutOfHbmError, in_parallel
from hexllm.plan.floors import decode_work, prefill_work
from hexllm.plan.memory import GIB, blocks_for
from hexllm.plan.opening import choose_mesh
from hexllm.plan.probing import Prober
from hexllm.plan.records import Plan, Timed

if TYPE_CHECKING:
    from hexllm.engine.buckets import StepShape
    from hexllm.plan.floors import Work
    from hexllm.plan.records import Memory, Model, Options, Program
    from hexllm.plan.topology import Topology

#: Tokens of each sequence of the timed steps where none are asked for.
CONTEXT = 1024


def make_plan(model: Model, topology: Topology, options: Options) -> Plan:
    """Return what the model needs and how fast it can be on a topology.

    Args:
        model: The model.
        topology: The chips.
        options: What else is asked.

    Raises:
        ConfigError: The options do not fit the model or the topology.
    """
    settings = options.settings
    mesh = choose_mesh(model, topology, options.tensor_parallel_size)
    dtype = jnp.dtype("bfloat16" if settings.dtype == "auto" else settings.dtype)
    prober = Prober(model, mesh, dtype, settings, topology.chip)
    limit = model.cfg.max_position_embeddings
    plan = Plan(
        model=model,
        topology=topology,
        options=options,
        dtype=dtype.name,
        tensor_parallel_size=mesh.size,
        fits=False,
        reason=None,
        max_model_len=limit,
        model_limit=limit,
        memory=None,
        weight_bytes=prober.weights,
        decode=None,
        prefill=None,
        programs=(),
        flags=(),
        remedies=(),
        notes=_notes(topology, mesh.size, options),
    )
    if prober.weights >= topology.chip.hbm_bytes:
        return _refused(plan, prober, _too_heavy(plan))
    if settings.max_model_len is not None:
        memory = prober.memory(limit)
        found = None if memory is None else (limit, memory)
    else:
        found = prober.longest(limit)
    if found is None:
        return _refused(plan, prober, _too_long(plan))
    return _timed(dataclasses.replace(plan, max_model_len=found[0]), prober, found[1])


def _timed(plan: Plan, prober: Prober, memory: Memory) -> Plan:
    """Compile what matters of a model that seems to fit, and say how fast it is."""
    options, length = plan.options, plan.max_model_len
    context, seqs = _batch(plan, memory)
    buckets = prober.buckets(length)
    shapes = buckets.shapes()
    decode = buckets.decode(seqs, blocks_for(context, memory.block_size))
    prefill = buckets.prefill(context, 1)
    # Of the largest steps the one that needs most decides about memory.
    largest = max(prober.needs(length).items(), key=lambda need: need[1].temporaries)[0]
    wanted = [*dict.fromkeys([largest, prefill, decode])]
    samplers = [*dict.fromkeys([decode.seqs, prefill.seqs])]
    if options.all_buckets:
        wanted += [shape for shape in shapes if shape not in wanted]
        samplers += sorted({shape.seqs for shape in shapes} - set(samplers))
    dump = options.dump_hlo and options.dump_hlo / plan.topology.name.replace(":", "-")
    compiler = Compiler(prober.programs, plan.topology.chip, dump)

    def step(shape: StepShape) -> Program:
        is_timed = shape in (decode, prefill)
        return compiler.step(
            shape,
            memory.num_blocks,
            seqs=seqs if is_timed and shape.max_query_len == 1 else None,
            context=context if is_timed else _full_context(shape, memory.block_size),
        )

    tasks = [functools.partial(step, shape) for shape in wanted]
    samples = [functools.partial(compiler.sampler, size) for size in samplers]
    try:
        programs = in_parallel([*tasks, *samples])
    except OutOfHbmError as error:
        return _refused(plan, prober, f"A step needs more memory than there is: {error}")
    steps = {program.shape: program for program in programs if program.shape is not None}
    sampling = {program.seqs: program for program in programs if program.kind == "sample"}
    memory = prober.measured(length, programs)
    plan = dataclasses.replace(plan, memory=memory, programs=tuple(programs))
    if memory.num_blocks * memory.block_size < length or memory.used > memory.hbm:
        return _refused(plan, prober, _too_long(plan))

    def timed(shape: StepShape, work: Work, seqs: int, tokens: int) -> Timed:
        floor = work.floor_us(plan.topology.chip)
        return Timed(seqs, context, tokens, work, floor, steps[shape], sampling[shape.seqs])

    plan = dataclasses.replace(
        plan,
        fits=True,
        decode=timed(decode, decode_work(prober.programs, seqs, context), seqs, seqs),
        prefill=timed(prefill, prefill_work(prober.programs, context), 1, context),
    )
    return dataclasses.replace(plan, flags=server_flags(plan))


def _full_context(shape: StepShape, block_size: int) -> int:
    """Return the tokens of each sequence that fill a shape."""
    return shape.tokens if shape.max_query_len > 1 else shape.blocks * block_size


def _batch(plan: Plan, memory: Memory) -> tuple[int, int]:
    """Return the context and the number of sequences of the timed decode."""
    options = plan.options
    context = options.context or min(CONTEXT, plan.max_model_len)
    if context > plan.max_model_len:
        raise ConfigError(
            f"--context={context} is over max_model_len={plan.max_model_len}. "
            f"Use {plan.max_model_len} or less."
        )
    most = min(options.settings.max_decode_seqs, memory.seqs_of(context))
    if options.seqs is not None and options.seqs > options.settings.max_decode_seqs:
        raise ConfigError(
            f"--seqs={options.seqs} is over max_decode_seqs={options.settings.max_decode_seqs}. "
            f"Lower it, or raise --max_decode_seqs."
        )
    return context, options.seqs or max(1, most)


def _refused(plan: Plan, prober: Prober, reason: str) -> Plan:
    plan = dataclasses.replace(plan, fits=False, reason=reason)
    return dataclasses.replace(plan, remedies=remedies(plan, prober))


def _too_heavy(plan: Plan) -> str:
    return (
        f"The weights alone take {plan.weight_bytes / GIB:.2f} GiB of each chip's "
        f"{plan.topology.chip.hbm_bytes / GIB:.2f} GiB in {plan.dtype}."
    )


def _too_long(plan: Plan) -> str:
    return (
        f"Beside the weights ({plan.weight_bytes / GIB:.2f} GiB a chip) and the largest step there "
        f"is no room for one sequence of max_model_len={plan.max_model_len} tokens in "
        f"{plan.topology.chip.hbm_bytes / GIB:.2f} GiB."
    )


def _notes(topology: Topology, used: int, options: Options) -> tuple[str, ...]:
    notes: list[str] = []
    if used < topology.num_devices and options.tensor_parallel_size is None:
        notes.append(
            f"The model divides into {used} of {topology.num_devices} devices: the others are idle."
        )
    if topology.num_hosts > 1:
        notes.append(
            f"{topology.name} is {topology.num_hosts} hosts, and hexllm serves from one so far: "
            f"this is what to plan with, not what works today."
        )
    return tuple(notes)
