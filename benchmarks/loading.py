"""Times loading a checkpoint, against reading its files and copying them to the device.

    python benchmarks/loading.py [--gigabytes 1] [--rounds 3] [--cases phi3 mixtral] [--cold]

Each figure is the best of the rounds; load and floor take turns, each in a process of its own that
has JAX running already. ``floor`` reads every tensor into one buffer and copies it from there to a
device array as it is: no names, no rules, no cast. The files are in the page cache for both, or,
with ``--cold``, for neither. ``peak`` is the most resident memory while loading over that before,
the parameters included on a CPU. The exit status is 1 when a case is under half the floor's speed
or its peak is over the checkpoint and its largest tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.checkpoints import CASES, Case, read_model, write_case
from hexllm.core.plugins import load_plugins
from hexllm.core.settings.plugin_table import PluginSettings
from hexllm.model.loading import load_params
from hexllm.model.sharding import make_mesh

GB = 1e9
#: Of the floor's speed.
LEAST_SPEED = 0.5


@dataclass(frozen=True)
class Result:
    """What was measured of one case.

    Attributes:
        name: The case's.
        nbytes: Of the checkpoint.
        largest: Bytes of its largest tensor.
        load_s: Best time to load it.
        floor_s: Best time to read and copy it.
        peak: Bytes of host memory that loading added at most.
    """

    name: str
    nbytes: int
    largest: int
    load_s: float
    floor_s: float
    peak: int

    @property
    def speed(self) -> float:
        """Of loading over the floor's."""
        return self.floor_s / self.load_s

    @property
    def is_met(self) -> bool:
        """Whether both bounds are kept."""
        return self.speed >= LEAST_SPEED and self.peak < self.nbytes + self.largest

    def row(self) -> str:
        """Return the table's line."""
        size, bound = self.nbytes / GB, (self.nbytes + self.largest) / GB
        figures = f"{size:7.2f}{self.load_s:8.2f}{size / self.load_s:7.2f}{self.floor_s:8.2f}"
        figures += f"{self.speed:9.2f}{self.peak / GB:8.2f}{bound:8.2f}"
        return f"{self.name:26}{figures}  {'met' if self.is_met else 'MISSED'}"


Work = Callable[[], list[jax.Array]]


def load(directory: Path, dtype: str) -> Work:
    """Return what loads a checkpoint as the engine does; plugins and config.json are read here."""
    checkpoint = load_plugins(PluginSettings()).open_checkpoint(str(directory), None, {})
    family, cfg = read_model(json.loads((directory / "config.json").read_text()))
    mesh = make_mesh()

    def work() -> list[jax.Array]:
        return jax.tree.leaves(
            load_params(family, cfg, checkpoint, dtype=jnp.dtype(dtype), mesh=mesh)
        )

    return work


def read_and_copy(directory: Path) -> Work:
    """Return what reads every tensor and copies it to a device array as it is."""
    tensors = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        tensors += [(path, 8 + size + start, stop - start) for start, stop in spans]
    # One byte past a 64th: memory so aligned would become the device's without a copy.
    largest = max(nbytes for _, _, nbytes in tensors)
    raw = np.empty(largest + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 1
    buffer = raw[start : start + largest]

    def work() -> list[jax.Array]:
        arrays = []
        for path, offset, nbytes in tensors:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                view = buffer[:nbytes].data
                while view:
                    view = view[file.readinto(view) :]
            arrays.append(jax.device_put(buffer[:nbytes]).block_until_ready())
        return arrays

    return work


def measure(work: Work) -> dict[str, Any]:
    """Run once; return seconds, bytes of the arrays, and the host memory added at most."""
    jax.block_until_ready(jnp.zeros(8) + 1)  # type: ignore[no-untyped-call]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    start = time.perf_counter()
    arrays = jax.block_until_ready(work())  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - start
    nbytes = sum(array.nbytes for array in arrays)
    return {"seconds": seconds, "nbytes": nbytes, "peak": _status("VmHWM") - before}


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def set_cached(directory: Path, is_cached: bool) -> None:
    """Bring the files into the page cache, or out of it."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            if is_cached:
                while file.read(1 << 24):
                    pass
            else:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_child(what: str, directory: Path, dtype: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", what, str(directory), dtype]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def largest_tensor(directory: Path) -> int:
    """Return the bytes of a checkpoint's largest tensor."""
    checkpoint = load_plugins(PluginSettings()).open_checkpoint(str(directory), None, {})
    return max(info.nbytes for info in checkpoint.tensors().values())


def run_case(case: Case, nbytes: int, rounds: int, is_cached: bool, place: Path) -> Result:
    """Write a case's checkpoint under ``place``, measure, and remove it."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        directory = Path(folder)
        written = write_case(case, nbytes, directory)
        loads: list[dict[str, Any]] = []
        floors: list[dict[str, Any]] = []
        for _ in range(rounds):
            for what, found in (("floor", floors), ("load", loads)):
                set_cached(directory, is_cached)
                found.append(in_child(what, directory, case.dtype))
        return Result(
            name=case.name,
            nbytes=written,
            largest=largest_tensor(directory),
            load_s=min(m["seconds"] for m in loads),
            floor_s=min(m["seconds"] for m in floors),
            peak=max(m["peak"] for m in loads),
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=[""], help="names, or parts of them")
    parser.add_argument("--cold", action="store_true", help="out of the page cache before each run")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written for a while")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        what, directory, dtype = options.child
        is_load = what == "load"
        work = load(Path(directory), dtype) if is_load else read_and_copy(Path(directory))
        print(json.dumps(measure(work)))
        return 0
    print(f"jax {jax.__version__}, {jax.default_backend()}, {'cold' if options.cold else 'cached'}")
    print(
        f"{'':26}{'GB':>7}{'load s':>8}{'GB/s':>7}{'floor s':>8}{'x floor':>9}{'peak GB':>8}"
        f"{'bound':>8}"
    )
    status = 0
    for case in CASES:
        if any(part in case.name for part in options.cases):
            result = run_case(
                case,
                int(options.gigabytes * GB),
                options.rounds,
                not options.cold,
                options.directory or Path(tempfile.gettempdir()),
            )
            print(result.row(), flush=True)
            status |= not result.is_met
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
