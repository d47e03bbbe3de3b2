"""The ``hexllm`` command: each subcommand is imported only when it is the one asked for."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
import sys
from typing import TYPE_CHECKING

import hexllm
from hexllm.core.errors import ConfigError, HexllmError
from hexllm.core.wording import suggestion

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Where each command's ``main(argv) -> int`` is, and its line in ``hexllm --help``.
COMMANDS = {
    "serve": ("hexllm.server.main:main", "serve a model over HTTP"),
    "demo": ("hexllm.server.demo:main", "fetch a small model, serve it and ask it a question"),
    "plan": ("hexllm.plan.command:main", "say what a model needs and how fast it is on TPUs"),
    "plugins": ("hexllm.cli:list_plugins", "list the plugins and what they offer"),
}

_PLUGINS_FLAGS = ("--json", "--check")

_PLUGINS_HELP = """\
usage: hexllm plugins [--json] [--check] [--config FILE] [--plugins.…]

List the plugins that `hexllm serve` would load with the same settings, and what they offer.

  --json   print JSON, for programs
  --check  import every implementation too; exit with 1 if a plugin or one of these is broken
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status.

    Args:
        argv: Arguments after the program's name; those of the process when None.

    Returns:
        The subcommand's own status; 2 for a mistake in flags or configuration, 1 for anything
        else that a user can mend (one line on stderr tells what), 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except HexllmError as error:
        print(f"hexllm: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone. What is still buffered has nowhere to go: without this
        # Python would complain about it at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_usage(), file=sys.stderr)
        return 2
    command, *rest = arguments
    if command in ("--help", "-h", "help"):
        print(_usage())
        return 0
    if command in ("--version", "-V"):
        print(f"hexllm {hexllm.__version__}")
        return 0
    if command not in COMMANDS:
        raise ConfigError(
            f"There is no command {command!r}.{suggestion(command, COMMANDS)} "
            f"Commands: {', '.join(COMMANDS)}."
        )
    module, _, function = COMMANDS[command][0].partition(":")
    return int(getattr(importlib.import_module(module), function)(rest))


def list_plugins(argv: Sequence[str]) -> int:
    """Print every plugin and what it offers, without importing an implementation or JAX.

    Args:
        argv: ``--json``, ``--check`` and any setting of ``hexllm serve``; those of ``plugins``
            (``--plugins.disable=…``, or a ``[plugins]`` table in ``--config``) decide.

    Returns:
        0; 1 when ``--check`` finds something broken, or ``hexllm serve`` would refuse to start
        with these plugins.
    """
    if "--help" in argv or "-h" in argv:
        print(_PLUGINS_HELP, end="")
        return 0
    from hexllm.core.plugins import inspect_plugins
    from hexllm.core.report import as_json, as_table, check_implementations
    from hexllm.core.settings import load_settings

    # A server needs a model and this list does not. The variable counts only where nothing else
    # names one.
    environ = dict(os.environ)
    environ["AIP_STORAGE_URI"] = environ.get("AIP_STORAGE_URI") or "none-needed"
    rest = [each for each in argv if each not in _PLUGINS_FLAGS]
    for each in rest:
        if near := difflib.get_close_matches(each, _PLUGINS_FLAGS, n=1, cutoff=0.8):
            raise ConfigError(f"There is no flag {each!r}. Did you mean {near[0]!r}?")
    plugins = inspect_plugins(load_settings(rest, environ).plugins)
    failures = check_implementations(plugins) if "--check" in argv else {}
    if "--json" in argv:
        print(json.dumps(as_json(plugins, failures), indent=2, ensure_ascii=False))
    else:
        print(as_table(plugins, failures))
    plugins.raise_if_unfit()
    broken = any(row.status == "broken" for row in plugins.rows)
    return 1 if "--check" in argv and (broken or failures) else 0


def _usage() -> str:
    lines = [
        f"hexllm {hexllm.__version__}: an LLM server for Cloud TPU and CPU",
        "",
        "usage: hexllm COMMAND [--help] …",
        "",
    ]
    lines += [f"  {name:<8} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    lines += ["", "hexllm --version prints the version."]
    return "\n".join(lines)
