"""Says in one sentence why the hub gave nothing, and what to do about it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hexllm.plugins.loaders.hub import HubModel


def explain(error: Exception, model: HubModel) -> str:
    """Return what to tell the user of ``error``, which a request for ``model`` ended with."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain = list(_causes(error))
    for cause in chain:
        if isinstance(cause, GatedRepoError):
            return (
                f"Model {model.repo} is gated. Ask for access at {model.endpoint}/{model.repo}, "
                f"then set HF_TOKEN to a token of that account ({_token_state()})."
            )
        if isinstance(cause, RepositoryNotFoundError):
            return (
                f"Model {model.repo} is not on {model.endpoint}, or is private. Check its name, or "
                f"set HF_TOKEN to a token that may read it ({_token_state()})."
            )
        if isinstance(cause, RevisionNotFoundError):
            return (
                f"Model {model.repo} has no revision {model.revision!r}. "
                f"See {model.endpoint}/{model.repo}/commits for those it has."
            )
        if isinstance(cause, HFValidationError):
            return f"{model.repo!r} is not a name that the hub can have: {cause}"
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            advice = {
                401: f"Set HF_TOKEN to a valid token ({_token_state()}).",
                403: f"Set HF_TOKEN to a token that may read it ({_token_state()}).",
                429: "Wait before trying again, or set HF_TOKEN for a higher limit.",
            }.get(status, "Try again later.")
            return f"{model.endpoint} answered {status} for model {model.repo}. {advice}"
    where = f"revision {model.revision!r}" if model.revision else "its default branch"
    if model.is_offline and isinstance(error, LocalEntryNotFoundError):
        return (
            f"Model {model.repo} ({where}) is not, or not whole, in the cache {model.cache}, and "
            f"HF_HUB_OFFLINE forbids fetching it. Unset HF_HUB_OFFLINE, set HF_HOME to the cache "
            f"that has it, or fetch it first: hf download {model.repo}"
        )
    root = chain[-1]
    return (
        f"Model {model.repo} cannot be fetched from {model.endpoint}: "
        f"{type(root).__name__}: {str(root).splitlines()[0] if str(root) else 'no reason given'}. "
        f"Check the network and HF_ENDPOINT, or give a local directory."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and what it was raised from, outermost first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def _token_state() -> str:
    return "the one that is set may not" if os.environ.get("HF_TOKEN") else "none is set now"
