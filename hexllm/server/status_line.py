"""One line that tells how far something is, on a terminal and in a log."""

from __future__ import annotations

import shutil
import time
from typing import IO

#: Away from a terminal (in CI's log, say) the same phase is told of again after this long.
QUIET_SECONDS = 30.0


class StatusLine:
    """One line on stderr that is written over on a terminal, and now and then a line elsewhere."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._shown = ""
        self._shown_at = 0.0

    def show(self, text: str, key: str) -> None:
        """Show ``text``; away from a terminal only when ``key`` has changed, or after a while."""
        now = time.monotonic()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[2K{text[:width]}", end="", file=self._stream, flush=True)
        elif key != self._shown or now - self._shown_at >= QUIET_SECONDS:
            print(text, file=self._stream, flush=True)
        else:
            return
        self._shown, self._shown_at = key, now

    def close(self) -> None:
        """Leave a clean line behind."""
        if self._is_terminal and self._shown:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)
        self._shown = ""
