"""Which URI scheme a model's name has when the user wrote none."""

from __future__ import annotations

import re
from pathlib import Path

from hexllm.core.errors import CheckpointError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def scheme_of(uri: str) -> str:
    """Return the scheme that opens ``uri``: its own, else ``file`` for a path, ``hf`` for org/name.

    An existing path wins over a repository of the same name, as everywhere in the field.

    Raises:
        CheckpointError: It is none of these; the message says what was looked for.
    """
    found = _SCHEME.match(uri)
    if found:
        return found[1].lower()
    path = Path(uri).expanduser()
    try:
        exists = bool(uri) and path.exists()
    except (OSError, ValueError):  # too long, or a NUL in it
        exists = False
    if exists:
        return "file"
    if _REPOSITORY.fullmatch(uri):
        return "hf"
    raise CheckpointError(
        f"Model {uri!r} was not found: there is no file or directory {str(path.absolute())!r}, and "
        f"it is neither a repository like 'org/name' nor a URI like 'scheme://…'."
    )
