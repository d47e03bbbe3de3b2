"""What ``hexllm plan`` prints for people: one plan, or a table of several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hexllm.plan.memory import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.plan.records import Memory, Plan, Program, Timed

_WIDTH = 92
_STATIC = (
    "Times are static: the compiler's schedule at the chip's datasheet rates. Nothing was run on a "
    "TPU."
)


def as_text(plan: Plan) -> str:
    """Return one plan."""
    lines = [*_head(plan), *_verdict(plan)]
    if plan.memory is not None:
        lines += ["", *_memory(plan, plan.memory)]
    if plan.decode is not None and plan.prefill is not None:
        lines += ["", *_times(plan, plan.decode, plan.prefill)]
        lines += ["", *_collectives(plan.decode, plan.prefill)]
    if plan.programs:
        lines += ["", *_programs(plan)]
    if plan.flags:
        lines += ["", "Start with", *_wrapped("hexllm serve " + " ".join(plan.flags), 2, " \\")]
    if plan.notes:
        lines += ["", *(line for note in plan.notes for line in _wrapped(f"Note: {note}", 0))]
    return "\n".join(lines)


def as_table(plans: Sequence[Plan]) -> str:
    """Return a row a plan."""
    priced = any(plan.options.chip_price is not None for plan in plans)
    head = ["topology", "chips", "TP", "fits", "weights", "context", "KV tokens", "seqs"]
    head += ["decode ms", "floor", "tok/s", "tok/s/chip"] + (["$/M out"] if priced else [])
    rows = [head]
    for plan in plans:
        row = [
            plan.topology.name,
            str(plan.topology.num_chips),
            str(plan.tensor_parallel_size),
            "yes" if plan.fits else "no",
            _gib(plan.weight_bytes),
        ]
        memory, decode = plan.memory, plan.decode
        if memory is None or decode is None:
            row += ["–"] * (len(head) - len(row))
        else:
            row += [
                str(plan.max_model_len),
                str(memory.num_blocks * memory.block_size),
                str(decode.seqs),
                _ms(decode.roof_us),
                _ms(decode.floor_us),
                f"{decode.tokens_per_s:,.0f}",
                f"{decode.tokens_per_s / plan.topology.num_chips:,.0f}",
            ]
            row += [f"{plan.cost_per_million(decode):.3f}"] if priced else []
        rows.append(row)
    first = plans[0]
    lines = [f"{first.model.name} ({first.model.family_name}) in {first.dtype}", ""]
    lines += _aligned(rows, indent=0)
    lines += ["", "weights: GiB a chip; context: max_model_len; seqs: of the timed decode."]
    for plan in plans:
        if plan.reason:
            lines += _wrapped(f"{plan.topology.name}: {plan.reason}", 0)
        lines += [line for note in plan.notes for line in _wrapped(f"Note: {note}", 0)]
    return "\n".join([*lines, _STATIC])


def _head(plan: Plan) -> list[str]:
    model, topology, chip = plan.model, plan.topology, plan.topology.chip
    bits = 32 if plan.dtype == "float32" else 16
    floor = model.parameters * bits / 8
    needed = -(-int(floor) // chip.hbm_bytes)
    rows = [
        ["Model", f"{model.name} (family {model.family_name}), {model.parameters / 1e9:.2f} B"],
        [
            "Topology",
            f"{topology.name}: {_count(topology.num_chips, 'chip')}, "
            f"{_count(topology.num_hosts, 'host')}, {chip.hbm_bytes / GIB:.2f} GiB of HBM a "
            f"device, --tensor_parallel_size={plan.tensor_parallel_size}",
        ],
        [
            "Memory floor",
            f"{model.parameters / 1e9:.2f} B parameters × {bits} bits = {floor / 1e9:.1f} GB, "
            f"which is {_count(needed, 'device')} without KV and programs",
        ],
    ]
    return _aligned(rows, left=True, indent=0)


def _verdict(plan: Plan) -> list[str]:
    if plan.fits:
        text = f"Fits in {plan.dtype} with --max_model_len={plan.max_model_len}."
        if plan.max_model_len < plan.model_limit:
            text += (
                f" The model's own {plan.model_limit} does not; halved again and again, this is "
                f"the first that does."
            )
        return ["", *_wrapped(text, 0)]
    lines = ["", *_wrapped(f"Does not fit in {plan.dtype}. {plan.reason}", 0)]
    if plan.remedies:
        lines.append("What would fit:")
        lines += [line for remedy in plan.remedies for line in _wrapped(f"- {remedy.text}.", 2)]
    else:
        lines.append(f"No topology of {plan.topology.chip.name} chips holds it.")
    return lines


def _memory(plan: Plan, memory: Memory) -> list[str]:
    rows = [
        ["weights", _gib(memory.weights), ""],
        [
            "KV",
            _gib(memory.kv),
            f"{memory.num_blocks} blocks of {memory.block_size} tokens, "
            f"{memory.bytes_per_block / memory.block_size / 1024:.1f} KiB a token",
        ],
        ["temporaries", _gib(memory.temporaries), "the most that one step needs"],
        ["program", _gib(memory.code), f"{memory.num_programs} programs"],
        [
            "free",
            _gib(memory.hbm - memory.used),
            f"hbm_utilization_factor={plan.options.settings.hbm_utilization_factor:g}",
        ],
    ]
    context = plan.decode.context if plan.decode else plan.max_model_len
    return [
        "HBM a device, GiB",
        *_aligned(rows, left_from=2),
        f"  {_count(memory.seqs_of(plan.max_model_len), 'sequence')} of {plan.max_model_len} "
        f"tokens (max_model_len), {memory.seqs_of(context)} of {context}",
    ]


def _times(plan: Plan, decode: Timed, prefill: Timed) -> list[str]:
    chip = plan.topology.chip
    rows = [["", "floor", "simulated", "XLA's", "ceiling"]]
    for timed, name in (
        (decode, f"decode of {_count(decode.seqs, 'sequence')} at {decode.context} tokens"),
        (prefill, f"prefill of {prefill.tokens} tokens"),
    ):
        ratio = timed.roof_us / timed.floor_us
        rows.append(
            [
                name,
                _ms(timed.floor_us),
                f"{_ms(timed.roof_us)} ({ratio:.2f}x)",
                _ms(timed.xla_us),
                f"{timed.tokens_per_s:,.0f} tokens/s",
            ]
        )
    work = decode.work
    lines = ["Time of a step, ms", *_aligned(rows)]
    lines += _wrapped(
        f"Floor of the decode: {work.weight_bytes / 1e9:.2f} GB of weights and "
        f"{work.kv_bytes / 1e9:.2f} GB of KV over {chip.hbm_bytes_per_s / 1e9:.0f} GB/s; of the "
        f"prefill: {prefill.work.flops / 1e12:.2f} TFLOP over {chip.peak_flops / 1e12:.0f} TFLOP/s "
        f"({_ms(prefill.work.compute_us(chip))}) or its bytes "
        f"({_ms(prefill.work.memory_us(chip))}).",
        2,
    )
    if decode.sampling is not None:
        sampling = decode.sampling.estimate
        lines += _wrapped(
            f"Greedy sampling is in the decode ({_ms(sampling.cheapest_roof_us)}); a batch that "
            f"draws with every mask takes up to {_ms(sampling.roof_us)}.",
            2,
        )
    lines += _wrapped(_STATIC, 2)
    if (out := plan.cost_per_million(decode)) is not None:
        lines += _wrapped(
            f"At ${plan.options.chip_price:g} a chip and hour: ${out:.3f} a million output tokens, "
            f"${plan.cost_per_million(prefill):.3f} a million input tokens, at the ceilings.",
            2,
        )
    return lines


def _collectives(decode: Timed, prefill: Timed) -> list[str]:
    rows = []
    parts = [("decode", decode.step), ("sampling", decode.sampling), ("prefill", prefill.step)]
    for name, program in parts:
        found = program.estimate.ledger.collectives if program else {}
        for each, count in sorted(found.items(), key=lambda item: -item[1] * item[0].num_bytes):
            if each.group_size > 1:
                size = f"{each.num_bytes / 1024:,.0f} KiB"
                rows.append([name, f"{count} x {each.kind}", size, f"of {each.group_size}"])
    return ["Collectives", *(_aligned(rows, left=True) if rows else ["  none"])]


def _programs(plan: Plan) -> list[str]:
    rows = [["", "compile s", "temporaries", "program MiB", "simulated ms"]]
    rows += [_program(program) for program in plan.programs]
    compiled = len(plan.programs)
    total = plan.memory.num_programs if plan.memory else compiled
    text = f"{compiled} of {total} programs compiled"
    if compiled < total:
        text += ": the largest, which decide about memory, and the timed; --all_buckets for all"
    return [text, *_aligned(rows)]


def _program(program: Program) -> list[str]:
    return [
        program.title,
        f"{program.lower_s + program.compile_s:.1f}",
        _gib(program.temporary_bytes),
        f"{program.code_bytes / 2**20:.1f}",
        _ms(program.estimate.roof_us),
    ]


def _aligned(
    rows: Sequence[Sequence[str]],
    *,
    left: bool = False,
    left_from: int | None = None,
    indent: int = 2,
) -> list[str]:
    """Return rows in columns, the first and those from ``left_from`` on (or all) to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width)
            if left or i == 0 or (left_from is not None and i >= left_from)
            else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def _wrapped(text: str, indent: int, joint: str = "") -> list[str]:
    """Return text in lines of at most ``_WIDTH``; ``joint`` ends each but the last."""
    import textwrap

    lines = textwrap.wrap(
        text,
        _WIDTH - len(joint),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2 if indent else 0),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line + joint for line in lines[:-1]] + lines[-1:]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _gib(number: float) -> str:
    return f"{number / GIB:.2f}"


def _ms(us: float) -> str:
    return f"{us / 1000:.2f}" if us < 100_000 else f"{us / 1000:,.0f}"
