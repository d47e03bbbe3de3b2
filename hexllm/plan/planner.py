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
from hexllm.plan.records import Plan, Timed
from hexllm.plan.sizing import Sizer

if TYPE_CHECKING:
    from hexllm.engine.buckets import Buckets, StepShape
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
    sizer = Sizer(model, mesh, dtype, settings, topology.chip)
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
        weight_bytes=sizer.weights,
        decode=None,
        prefill=None,
        programs=(),
        flags=(),
        remedies=(),
        notes=_notes(topology, mesh.size, options),
    )
    if sizer.weights >= topology.chip.hbm_bytes:
        return _refused(plan, sizer, _too_heavy(plan))
    if settings.max_model_len is not None:
        memory = sizer.memory(limit)
        return _timed(plan, sizer, memory) if memory.holds(limit) else _too_long(plan, sizer)
    found = sizer.longest(limit)
    while found is not None:
        tried = _timed(dataclasses.replace(plan, max_model_len=found[0]), sizer, found[1])
        if tried.fits:
            return tried
        found = sizer.longest(found[0] // 2)
    return _too_long(plan, sizer)


def _timed(plan: Plan, sizer: Sizer, memory: Memory) -> Plan:
    """Compile what matters of a model that seems to fit, and say how fast it is."""
    options, length = plan.options, plan.max_model_len
    buckets = sizer.buckets(length)
    context, seqs = _batch(plan, memory, buckets)
    shapes = buckets.shapes()
    decode = buckets.decode(seqs, blocks_for(context, memory.block_size))
    prompt = min(context, buckets.max_prefill_tokens)
    prefill = buckets.prefill(prompt, 1)
    # Of the largest steps the one that needs most decides about memory.
    wanted = [*dict.fromkeys([sizer.decisive(length), prefill, decode])]
    samplers = [decode.seqs]
    if options.all_buckets:
        wanted += [shape for shape in shapes if shape not in wanted]
        samplers += sorted({shape.seqs for shape in shapes} - set(samplers))
    dump = options.dump_hlo and options.dump_hlo / plan.topology.name.replace(":", "-")
    compiler = Compiler(sizer.programs, plan.topology.chip, dump)

    contexts = {decode: context, prefill: prompt}

    def step(shape: StepShape) -> Program:
        full = shape.tokens if shape.max_query_len > 1 else shape.blocks * memory.block_size
        timed_seqs = seqs if shape == decode else None
        known = contexts.get(shape, full)
        return compiler.step(shape, memory.num_blocks, seqs=timed_seqs, context=known)

    tasks = [functools.partial(step, shape) for shape in wanted]
    samples = [functools.partial(compiler.sampler, size) for size in samplers]
    try:
        programs = in_parallel([*tasks, *samples])
    except OutOfHbmError as error:
        return _refused(plan, sizer, f"A step needs more memory than a device has: {error}")
    steps = {program.shape: program for program in programs if program.shape is not None}
    sampling = {program.seqs: program for program in programs if program.kind == "sample"}
    memory = sizer.memory(length, programs)
    plan = dataclasses.replace(plan, memory=memory, programs=tuple(programs))
    if not memory.holds(length):
        return _too_long(plan, sizer)

    def timed(shape: StepShape, work: Work, seqs: int, tokens: int) -> Timed:
        floor = work.floor_us(plan.topology.chip)
        return Timed(seqs, context, tokens, work, floor, steps[shape], sampling.get(shape.seqs))

    plan = dataclasses.replace(
        plan,
        fits=True,
        decode=timed(decode, decode_work(sizer.programs, seqs, context), seqs, seqs),
        prefill=timed(prefill, prefill_work(sizer.programs, prompt), 1, prompt),
    )
    return dataclasses.replace(plan, flags=server_flags(plan))


def _batch(plan: Plan, memory: Memory, buckets: Buckets) -> tuple[int, int]:
    """Return the context and the number of sequences of the timed decode."""
    options = plan.options
    context = options.context or min(CONTEXT, plan.max_model_len)
    if context > plan.max_model_len:
        raise ConfigError(
            f"--context={context} is over max_model_len={plan.max_model_len}. "
            f"Use {plan.max_model_len} or less."
        )
    most = min(options.settings.max_decode_seqs, memory.seqs_of(context))
    # A full step: sequences are padded to one of the sizes that are compiled.
    full = max((n for n in buckets.decode_seqs if n <= most), default=1)
    if options.seqs is not None and options.seqs > options.settings.max_decode_seqs:
        raise ConfigError(
            f"--seqs={options.seqs} is over max_decode_seqs={options.settings.max_decode_seqs}. "
            f"Lower it, or raise --max_decode_seqs."
        )
    return context, options.seqs or full


def _refused(plan: Plan, sizer: Sizer, reason: str) -> Plan:
    plan = dataclasses.replace(plan, fits=False, reason=reason)
    return dataclasses.replace(plan, remedies=remedies(plan, sizer))


def _too_heavy(plan: Plan) -> str:
    return (
        f"The weights alone would take {plan.weight_bytes / GIB:.2f} GiB of each device's "
        f"{plan.topology.chip.hbm_bytes / GIB:.2f} GiB."
    )


def _too_long(plan: Plan, sizer: Sizer) -> Plan:
    return _refused(
        plan,
        sizer,
        f"Beside the weights ({plan.weight_bytes / GIB:.2f} GiB) and the largest step there is no "
        f"room for one sequence of max_model_len={plan.max_model_len} tokens in a device's "
        f"{plan.topology.chip.hbm_bytes / GIB:.2f} GiB.",
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
