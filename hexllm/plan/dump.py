"""Compiles a program in a process of its own, and has the compiler print its kernels' bundles.

libtpu takes the flags of its dumps from the environment when it is loaded, once a process (as
compile options they are accepted and do nothing), hence the process. Of the two hundred megabytes
that it would print only the final bundles are asked for.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hexllm.core.errors import HexllmError

_MODULE = "module.hlo"


@dataclass(frozen=True)
class Dump:
    """What the compiler made of a program.

    Attributes:
        hlo: The text of the scheduled module.
        bundles: The final bundles' text of each fusion and kernel, by its instruction's name.
    """

    hlo: str
    bundles: dict[str, str]

    def kernel(self, name: str) -> str:
        """Return the bundles of the one kernel whose name starts so.

        Raises:
            KeyError: None does, or several do.
        """
        found = [each for each in self.bundles if each.partition(".")[0] == name]
        if len(found) != 1:
            raise KeyError(f"{len(found)} of the kernels {sorted(self.bundles)} are {name!r}")
        return self.bundles[found[0]]


def dump(function: str, timeout: float = 600, **arguments: Any) -> Dump:
    """Compile what a function lowers, and return its bundles.

    Args:
        function: ``package.module:name``; called with the arguments, it returns what
            ``jax.jit(…).lower(…)`` does. Its module must be importable in a new process.
        timeout: Seconds after which the compiler is given up.
        arguments: Whatever JSON can carry.

    Raises:
        HexllmError: It does not compile; the message ends with what was printed.
    """
    with tempfile.TemporaryDirectory(prefix="hexllm-dump-") as folder:
        flags = (
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=final_bundles",
        )
        given = os.environ.get("LIBTPU_INIT_ARGS", "").split()
        environment = {
            **os.environ,
            "LIBTPU_INIT_ARGS": " ".join((*given, *flags)),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-m", __name__, function, json.dumps(arguments), folder]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired as error:
            raise HexllmError(
                f"{function} did not compile within {timeout:g} s. Allow it more, or compile less."
            ) from error
        if done.returncode:
            raise HexllmError(f"{function} does not compile: {done.stderr.strip()[-2000:]}")
        return _read(Path(folder))


def _read(folder: Path) -> Dump:
    bundles = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        found = re.fullmatch(r"\d+-(.+?)-\d+-final_bundles\.txt", path.name)
        if found and not found[1].startswith(("<", "TLP")):
            bundles[found[1]] = path.read_text(errors="replace")
    return Dump((folder / _MODULE).read_text(), bundles)


def main(function: str, arguments: str, folder: str) -> None:
    """Compile in this process; see ``dump``."""
    module, _, name = function.partition(":")
    lowered = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(folder, _MODULE).write_text(lowered.compile().as_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
