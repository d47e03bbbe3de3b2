"""Responses that end with their client: whoever hangs up frees what was being made for them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from hexllm.server.errors import ClientGoneError, error_json, error_response

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

SSE_DONE = "data: [DONE]\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, or cancel it once the client hangs up.

    Starlette does not cancel a handler whose client is gone; this does.

    Raises:
        ClientGoneError: The client hung up first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def sse_error(error: Exception) -> str:
    """Return the events that end an SSE stream because of ``error``."""
    return f"data: {error_json(error)}\n\n{SSE_DONE}"


class Stream(Response):
    """A response sent piece by piece, each piece in an HTTP chunk of its own.

    The status waits for the first piece, so that a request which fails before it has a status of
    its own. A later failure becomes a last piece.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[str, None],
        *,
        media_type: str = "text/event-stream",
        on_error: Callable[[Exception], str] = sse_error,
    ) -> None:
        self.pieces = pieces
        self.on_error = on_error
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces until they end or the client hangs up."""
        with contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with contextlib.aclosing(self.pieces) as pieces:
            try:
                async for piece in pieces:
                    if not started:
                        started = True
                        await send(
                            {
                                "type": "http.response.start",
                                "status": self.status_code,
                                "headers": self.raw_headers,
                            }
                        )
                    await _send_body(send, piece.encode())
            except Exception as error:
                if not started:
                    await error_response(error)(scope, receive, send)
                    return
                await _send_body(send, self.on_error(error).encode())
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
