"""Measures a running OpenAI-compatible server (hexllm, vLLM, llama.cpp, …) on this machine.

    python benchmarks/serve.py --url http://127.0.0.1:7080 --workload B --tokenizer MODEL --pid PID
    python benchmarks/serve.py --launch "hexllm serve --model=MODEL --port=7081" --workload A B

``--launch`` starts and ends the server itself. Prompts have an exact length in the model's own
tokens, other text each round (so that no prefix cache helps across rounds), and outputs a forced
length. See ``workloads.py`` for the workloads and ``metrics.py`` for what each figure means.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import http.client
import json
import os
import re
import shlex
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in {None, ""}:
    # Run as a script: the siblings get the same dotted names as in the tests.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.load import Target, parse_loopback, run_round
from benchmarks.metrics import find_doubts, median_of_rounds, summarize
from benchmarks.processes import LaunchError, MemoryWatch, launch
from benchmarks.prompts import build_prompts, load_tokenizer
from benchmarks.workloads import WORKLOADS, Workload
from hexllm.core.errors import HexllmError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.prompts import Tokenizer

#: Rows of the table: figure, its label, digits after the point.
ROWS = (
    ("output_tok_s", "output tokens/s", 1),
    ("total_tok_s", "in + out tokens/s", 1),
    ("ttft_ms_p50", "time to first token p50, ms", 1),
    ("ttft_ms_p99", "time to first token p99, ms", 1),
    ("itl_ms_p50", "inter-token latency p50, ms", 2),
    ("itl_ms_p99", "inter-token latency p99, ms", 2),
    ("tpot_ms_p50", "time per output token p50, ms", 2),
    ("tpot_ms_p99", "time per output token p99, ms", 2),
    ("client_lag_ms_p99", "client lag p99, ms", 2),
    ("failed", "failed requests", 0),
)
OVERRIDES = ("requests", "concurrency", "input_len", "output_len", "shared_prefix_len")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a mistake ends the program with a sentence."""
    parser = argparse.ArgumentParser(
        prog="serve.py", description="Measure an OpenAI-compatible server on this machine."
    )
    add = parser.add_argument
    add("--url", help="where the server listens (http://127.0.0.1:7080, or --launch's --port)")
    add("--launch", metavar="COMMAND", help="start this server, measure it and end it")
    add("--ready_seconds", type=float, default=900, help="longest wait for it (%(default)s)")
    add("--workload", nargs="+", default=["A"], choices=sorted(WORKLOADS), help="one or more")
    for name in OVERRIDES:
        add(f"--{name}", type=int, help="in place of the workload's own")
    add("--rounds", type=int, default=3, help="counted rounds of each workload (%(default)s)")
    add("--warmup_rounds", type=int, default=1, help="rounds before, not counted (%(default)s)")
    add("--model", help="the request's model (the server's first)")
    add("--tokenizer", help="tokenizer.json, or a model hexllm can open (--launch's --model)")
    add("--pid", type=int, help="the server's process, for its memory (--launch knows it)")
    add("--extra", type=json.loads, default={}, help="JSON object added to each request's body")
    add("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    add("--max_seconds", type=float, default=600, help="longest round (%(default)s)")
    add("--nice", type=int, default=-5, help="the client's priority, so that the server does not "
        "starve it (%(default)s; needs rights)")  # fmt: skip
    add("--json", nargs="?", const="-", metavar="FILE",
        help="append one JSON line a workload to FILE; without FILE print it")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not isinstance(arguments.extra, dict):
        parser.error("--extra must be a JSON object")
    words = shlex.split(arguments.launch or "")
    if arguments.url is None:
        port = _flag(words, "port") or "7080"
        arguments.url = f"http://127.0.0.1:{port}"
    arguments.tokenizer = arguments.tokenizer or _flag(words, "tokenizer") or _flag(words, "model")
    if arguments.tokenizer is None:
        parser.error("--tokenizer is needed, to build prompts of an exact length")
    try:
        arguments.host, arguments.port = parse_loopback(arguments.url)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _flag(words: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name=value`` or ``--name value`` in a command, None when absent."""
    for index, word in enumerate(words):
        match = re.fullmatch(rf"--{name}(?:=(.*))?", word)
        if match:
            return match[1] or (words[index + 1] if index + 1 < len(words) else None)
    return None


def choose_workloads(arguments: argparse.Namespace) -> dict[str, Workload]:
    """Return the workloads by name, with the command line's own lengths and counts."""
    changes = {name: getattr(arguments, name) for name in OVERRIDES}
    changes = {name: value for name, value in changes.items() if value is not None}
    return {
        name: dataclasses.replace(WORKLOADS[name], **changes)
        for name in dict.fromkeys(arguments.workload)
    }


def first_model(host: str, port: int) -> str:
    """Return the name of the first model that the server lists.

    Raises:
        LaunchError: It does not answer, or lists none.
    """
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", "/v1/models")
        return str(json.loads(connection.getresponse().read())["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
        raise LaunchError(
            f"No model is listed at http://{host}:{port}/v1/models ({error!r}). Is it running?"
        ) from error
    finally:
        connection.close()


def measure(
    target: Target,
    workload: Workload,
    tokenizer: Tokenizer,
    arguments: argparse.Namespace,
    pid: int | None,
) -> dict[str, Any]:
    """Run the rounds of one workload and return their figures, medians and doubts."""
    rounds: list[dict[str, Any]] = []
    doubts: list[str] = []
    for number in range(arguments.warmup_rounds + arguments.rounds):
        seed = arguments.seed * 1000 + number
        prompts = build_prompts(tokenizer, workload, seed)
        with ExitStack() as stack:
            watch = stack.enter_context(MemoryWatch(pid)) if pid is not None else None
            result = asyncio.run(run_round(target, workload, prompts, arguments.max_seconds))
        if number < arguments.warmup_rounds:
            continue
        figures = summarize(result, workload)
        if watch is not None:
            figures["peak_rss_mib"] = watch.peak_rss / 2**20
            figures["peak_pss_mib"] = watch.peak_pss / 2**20
        rounds.append(figures)
        doubts += find_doubts(figures, workload)
    return {
        "workload": dataclasses.asdict(workload),
        "rounds": rounds,
        "median": median_of_rounds(rounds),
        "doubts": list(dict.fromkeys(doubts)),
    }


def format_table(name: str, workload: Workload, report: dict[str, Any]) -> str:
    """Return the figures of one workload, a column a round and one of medians."""
    rounds, median = report["rounds"], report["median"]
    rows = [*ROWS]
    if "peak_rss_mib" in rounds[0]:
        rows.append(("peak_rss_mib", "peak memory (RSS), MiB", 0))
        rows.append(("peak_pss_mib", "peak memory (PSS), MiB", 0))
    heads = [*(f"round {number}" for number in range(1, len(rounds) + 1)), "median"]
    lines = [
        f"Workload {name}: {workload.describe()}",
        f"{'':31}" + "".join(f"{head:>11}" for head in heads),
    ]
    for key, label, digits in rows:
        cells = [figures.get(key) for figures in (*rounds, median)]
        texts = ["-" if cell is None else f"{cell:,.{digits}f}" for cell in cells]
        lines.append(f"{label:31}" + "".join(f"{text:>11}" for text in texts))
    lines += [f"! {doubt}" for doubt in report["doubts"]]
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line names; 1 when any request failed."""
    tokenizer = load_tokenizer(arguments.tokenizer)
    failed = 0
    with ExitStack() as stack:
        pid, ready_s = arguments.pid, None
        if arguments.launch:
            print(f"Starting {arguments.launch}", file=sys.stderr)
            pid, ready_s = stack.enter_context(
                launch(arguments.launch, arguments.host, arguments.port, arguments.ready_seconds)
            )
            print(f"Ready after {ready_s:.1f} s", file=sys.stderr)
        # After the launch: the server must not inherit it.
        if arguments.nice:
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, 0, arguments.nice)
        model = arguments.model or first_model(arguments.host, arguments.port)
        target = Target(arguments.host, arguments.port, model, arguments.extra)
        for name, workload in choose_workloads(arguments).items():
            report = measure(target, workload, tokenizer, arguments, pid)
            report = {"name": name, "model": model, "ready_s": ready_s, **report}
            failed += sum(figures["failed"] for figures in report["rounds"])
            table = format_table(name, workload, report)
            if arguments.json is None:
                print(table, "\n", sep="", flush=True)
                continue
            print(table, "\n", sep="", file=sys.stderr, flush=True)
            line = json.dumps(report)
            if arguments.json == "-":
                print(line, flush=True)
            else:
                with Path(arguments.json).open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    arguments = parse_arguments(argv)
    try:
        return run(arguments)
    except (HexllmError, LaunchError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
