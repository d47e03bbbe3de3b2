"""Where loaders keep what they made or fetched, safely between processes that do so at once."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hexllm.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator


def cache_directory(kind: str) -> Path:
    """Return hexllm's cache directory for ``kind``, made when absent.

    It lies under ``HEXLLM_CACHE``, else under ``XDG_CACHE_HOME/hexllm``, else ``~/.cache/hexllm``.

    Raises:
        CheckpointError: It cannot be made or written.
    """
    chosen = os.environ.get("HEXLLM_CACHE")
    if chosen:
        root = Path(chosen).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hexllm"
    directory = root / kind
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"Cache directory {directory} cannot be made: {error.strerror}. "
            f"Set HEXLLM_CACHE to a directory that can be written."
        ) from error
    return directory


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file ``lock`` against other processes and threads.

    The lock ends with the process that holds it, however that ends.
    """
    import fcntl

    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"Lock file {lock} cannot be opened: {error.strerror}. "
            f"Set HEXLLM_CACHE to a directory that can be written."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """Give an empty directory that becomes ``target`` in one rename once the block succeeds.

    When another process published ``target`` meanwhile, its result stands and this one is dropped.
    Nothing is left behind when the block fails.
    """
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(
            f"Cache directory {target.parent} cannot be written: {error.strerror}. "
            f"Set HEXLLM_CACHE to a directory that can be written."
        ) from error
    try:
        yield draft
        # mkdtemp makes it private; a cache shared by a group of users must stay readable.
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
