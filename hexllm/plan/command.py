"""``hexllm plan``: what a model needs and how fast it can be on TPUs, without a TPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hexllm.core.errors import ConfigError, HexllmError
from hexllm.core.plugins import load_plugins
from hexllm.core.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

HELP = """\
usage: hexllm plan MODEL --topology NAME [flags]

Compile the programs that `hexllm serve` would run, for TPUs that need not be there, and report
whether the model fits, what takes the memory, and how fast a step can be. MODEL is whatever
`hexllm serve --model` takes, a directory with nothing but a config.json, or a config.json. No
weights are read. Exits with 0 when it fits, 1 when it does not, 2 for a mistake in the input.

  --topology NAME           v5e:2x2, v6e-8, ct5lp-hightpu-4t, …
  --compare NAME,NAME,…     a table, a row a topology, instead of one report
  --tensor_parallel_size N  devices to spread the model over (default: all that it divides into)
  --context N               tokens of each sequence of the timed steps (default: 1024)
  --seqs N                  sequences of the timed decode (default: as many as fit)
  --chip_price USD          dollars a chip and hour: gives the cost of a million tokens
  --all_buckets             compile every program of a server, not only those that decide
  --dump_hlo DIR            keep each program's scheduled HLO
  --json                    print JSON, for programs (docs/plan.md has its keys)

Any flag of `hexllm serve` that shapes programs or memory works too: --max_model_len, --dtype,
--block_size, --max_decode_seqs, --hbm_utilization_factor, … Where --max_model_len is not given, it
is the model's own, halved until it fits.
"""

#: Flags of this command alone -> whether they take a value.
FLAGS = {
    "topology": True,
    "compare": True,
    "tensor_parallel_size": True,
    "context": True,
    "seqs": True,
    "chip_price": True,
    "all_buckets": False,
    "dump_hlo": True,
    "json": False,
}


def main(argv: Sequence[str]) -> int:
    """Plan, and print it.

    Args:
        argv: The words after ``hexllm plan``.

    Returns:
        0 when the model fits (with ``--compare``, on any topology), 1 when it does not, 2 for a
        mistake in the input, which one line on stderr tells.
    """
    if not argv or "--help" in argv or "-h" in argv:
        print(HELP, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    try:
        return _plan(argv)
    except HexllmError as error:
        print(f"hexllm: {error}", file=sys.stderr)
        return 2


def _plan(argv: Sequence[str]) -> int:
    own, rest = split_flags(argv)
    settings = load_settings(rest)
    # Before JAX is imported: a TPU that is there is not taken.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from hexllm.plan.as_json import as_json
    from hexllm.plan.opening import open_model
    from hexllm.plan.planner import make_plan
    from hexllm.plan.records import Options
    from hexllm.plan.report import as_table, as_text
    from hexllm.plan.topology import parse_topology

    names = own.get("compare", "").split(",") if "compare" in own else []
    names = ([own["topology"]] if "topology" in own else []) + [name for name in names if name]
    if not names:
        raise ConfigError("No topology is named. Give --topology=v5e:2x2, for instance.")
    topologies = list(dict.fromkeys(parse_topology(name) for name in names))
    size = _whole(own, "tensor_parallel_size")
    if size is None and settings.tensor_parallel_size > 1:
        size = settings.tensor_parallel_size
    options = Options(
        settings=settings,
        tensor_parallel_size=size,
        context=_whole(own, "context"),
        seqs=_whole(own, "seqs"),
        chip_price=_price(own),
        all_buckets="all_buckets" in own,
        dump_hlo=Path(own["dump_hlo"]).expanduser() if "dump_hlo" in own else None,
    )
    model = open_model(settings, load_plugins(settings.plugins))
    plans = [make_plan(model, topology, options) for topology in topologies]
    if "json" in own:
        found = [as_json(plan) for plan in plans]
        print(json.dumps(found if "compare" in own else found[0], indent=2, ensure_ascii=False))
    else:
        print(as_table(plans) if "compare" in own else as_text(plans[0]))
    return 0 if any(plan.fits for plan in plans) else 1


def split_flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return this command's own flags, and the words for ``load_settings``.

    Args:
        argv: The words after ``hexllm plan``; the first that is no flag is the model.

    Raises:
        ConfigError: A flag lacks its value, or has one that it does not take.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    words = list(argv)
    if words and not words[0].startswith("-"):
        rest.append(f"--model={words.pop(0)}")
    while words:
        word = words.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in FLAGS:
            rest.append(word)
            # ``--name value`` of a setting: the value must not be taken for the model.
            if word.startswith("--") and not has_value and words and not words[0].startswith("--"):
                rest.append(words.pop(0))
            continue
        if FLAGS[name] and not has_value:
            if not words or words[0].startswith("--"):
                raise ConfigError(
                    f"--{name} has no value. Write --{name}=…; see hexllm plan --help."
                )
            value = words.pop(0)
        if not FLAGS[name] and has_value:
            raise ConfigError(f"{word} takes no value. Write --{name} alone, or leave it out.")
        own[name] = value
    return own, rest


def _whole(own: dict[str, str], name: str) -> int | None:
    if name not in own:
        return None
    if not own[name].isdecimal() or int(own[name]) < 1:
        raise ConfigError(
            f"--{name}={own[name]} is not usable: it takes a whole number from 1 up. Correct it, "
            f"or leave it out."
        )
    return int(own[name])


def _price(own: dict[str, str]) -> float | None:
    if "chip_price" not in own:
        return None
    try:
        price = float(own["chip_price"])
    except ValueError:
        price = -1.0
    if not 0 < price < 1e6:
        raise ConfigError(
            f"--chip_price={own['chip_price']} is not usable: it takes US dollars a chip and hour, "
            f"above 0. Correct it, or leave it out."
        )
    return price
