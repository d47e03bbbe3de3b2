"""Whether the server can be sent requests: ``/ping``, ``/health``, and the gate before the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import hexllm
from hexllm.core.errors import RequestError
from hexllm.server.errors import error_object, error_response
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
    if state.is_hung:
        return {"status": "hung", "silent_seconds": round(client.silence, 1)}
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


@router.get("/ping", summary="200 while requests are served")
async def ping_route(request: Request) -> Response:
    """Answer 200 once requests are served, else 503 and why."""
    state = server_state(request)
    body = describe_health(state)
    return JSONResponse(body, status_code=200 if body["status"] == "ready" else 503)


@router.get("/health", summary="200 while the server is of use")
async def health_route(request: Request) -> Response:
    """Answer 200 while requests are served or finished, else 503 and why.

    So unlike ``/ping`` it stays 200 while the server drains: it is not ready, but alive. Where it
    is the deployment's readiness route, it is ``/ping``.
    """
    state = server_state(request)
    body = describe_health(state)
    good = {"ready"} if state.settings.health_route == "/health" else {"ready", "stopping"}
    return JSONResponse(body, status_code=200 if body["status"] in good else 503)


@router.get("/version", summary="This server's version")
async def version_route() -> dict[str, str]:
    """Answer with hexllm's version."""
    return {"version": hexllm.__version__}


class ReadinessGate:
    """Answers in place of the application while requests cannot be served, and counts them."""

    def __init__(self, app: ASGIApp, state: ServerState, always_open: Collection[str]) -> None:
        self._app = app
        self._state = state
        self._always_open = frozenset(always_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in self._always_open:
            await self._app(scope, receive, send)
        elif not self._state.is_ready:
            await self._refuse(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Every POST generates. A full server says so before it reads a body and tokenizes.
            if scope["method"] == "POST":
                self._state.admission.check_room()
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        self._state.exchanges.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.exchanges.end()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        health = describe_health(self._state)
        message = {
            "failed": f"The engine has failed: {health.get('error')}",
            "hung": f"The engine has not ended a step for {health.get('silent_seconds')} s.",
            "stopping": "The server is stopping.",
        }.get(health["status"], "The model is still loading; /ping says how far it is.")
        # A kept connection would bring the client's next request here, too.
        closing = {"connection": "close"} if health["status"] == "stopping" else {}
        response = JSONResponse(
            error_object(message, status=503, code=f"server_{health['status']}"),
            status_code=503,
            headers={"retry-after": str(RETRY_AFTER), **closing},
        )
        await response(scope, receive, send)
