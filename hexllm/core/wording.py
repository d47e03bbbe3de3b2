"""How error messages name alternatives, so that each one does it the same way."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the member of ``known`` that ``name`` most likely stands for, None when none is near.

    Case is ignored.
    """
    by_lower = {option.lower(): option for option in sorted(known, reverse=True)}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with its leading space, or nothing when no name is near."""
    found = nearest(name, known)
    return "" if found is None else f" Did you mean {found!r}?"


def listing(names: Iterable[str], conjunction: str = "and") -> str:
    """Return ``a, b and c``, or ``none`` for no names."""
    items = list(names)
    if not items:
        return "none"
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} {conjunction} {items[-1]}"


def described(error: BaseException) -> str:
    """Return ``Class: message`` on one line, or the class alone when it has no message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
