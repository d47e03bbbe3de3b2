"""On whose account a request runs, as far as its headers say."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import Request

#: Hexadecimal digits of a key's digest: enough to tell keys apart, too few to be mistaken for one.
_DIGITS = 16


def api_key_digest(request: Request) -> str | None:
    """Return ``key-`` and the start of the SHA-256 of the request's API key; None without one.

    The key is what the ``Authorization`` header has after its scheme (``Bearer``). It is not
    checked here, and only its digest goes on, so that no log or plugin gets to see a key.
    """
    _, _, key = request.headers.get("authorization", "").strip().partition(" ")
    key = key.strip()
    if not key:
        return None
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:_DIGITS]}"
