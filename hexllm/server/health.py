"""Whether the server can be sent requests: ``/ping``, ``/health``, and the gate before the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import hexllm
from hexllm.server.errors import error_object
from hexllm.server.state import server_state

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Receive, Scope, Send

    from hexllm.server.state import ServerState

#: Seconds after which a client that came too early may ask again.
RETRY_AFTER = 5

router = APIRouter()


def describe_health(state: ServerState) -> dict[str, Any]:
    """Return the body of ``/ping``: ``ready``, or what stands between now and ready."""
    client = state.client
    if client.failure is not None:
        return {"status": "failed", "error": client.failure}
    if state.is_stopping:
        return {"status": "stopping"}
    if state.is_ready:
        return {"status": "ready"}
    body: dict[str, Any] = {"status": "loading"}
    if client.progress is not None:
        body["progress"] = {
            "phase": client.progress.phase,
            "done": client.progress.done,
            "total": client.progress.total,
            "detail": client.progress.detail,
        }
    return body


@router.get("/ping", summary="200 once requests are served")
@router.get("/health", summary="200 once requests are served")
async def ping_route(request: Request) -> Response:
    """Answer 200 once requests are served, else 503 and why."""
    state = server_state(request)
    body = describe_health(state)
    return JSONResponse(body, status_code=200 if body["status"] == "ready" else 503)


@router.get("/version", summary="This server's version")
async def version_route() -> dict[str, str]:
    """Answer with hexllm's version."""
    return {"version": hexllm.__version__}


class ReadinessGate:
    """Answers 503 in place of the application while requests cannot be served."""

    def __init__(self, app: ASGIApp, state: ServerState, always_open: Collection[str]) -> None:
        self._app = app
        self._state = state
        self._always_open = frozenset(always_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or self._state.is_ready or scope["path"] in self._always_open:
            await self._app(scope, receive, send)
            return
        health = describe_health(self._state)
        message = {
            "failed": f"The engine has failed: {health.get('error')}",
            "stopping": "The server is stopping.",
        }.get(health["status"], "The model is still loading; /ping says how far it is.")
        response = JSONResponse(
            error_object(message, status=503, code=f"server_{health['status']}"),
            status_code=503,
            headers={"retry-after": str(RETRY_AFTER)},
        )
        await response(scope, receive, send)
