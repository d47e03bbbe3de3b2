"""Every answer that is not a success: one JSON shape, OpenAI's error object, on every route."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hexllm.core.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

#: What a client that hung up is logged as; nobody receives it.
CLIENT_CLOSED_REQUEST = 499


class EngineRequestError(RequestError):
    """The engine ended a request that was fine by the server."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=HTTPStatus.INTERNAL_SERVER_ERROR)


class QueueFullError(RequestError):
    """As many requests wait as may.

    Attributes:
        retry_after: Whole seconds after which it is worth while to ask again.
    """

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, status=HTTPStatus.TOO_MANY_REQUESTS)
        self.retry_after = retry_after


class DeadlineError(RequestError):
    """A request took longer than the server lets one take."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The request was not finished {seconds:g} s after it came, the most that this server "
            f"gives one (--request_timeout_seconds). Ask for fewer tokens, or when it is less "
            f"busy.",
            status=HTTPStatus.GATEWAY_TIMEOUT,
        )


class DrainedError(RequestError):
    """The server ended before the request did."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The server is stopping, and the request was not finished in the {seconds:g} s it "
            f"had (--drain_seconds). Send it again.",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
        )


class ClientGoneError(Exception):
    """The client closed its connection before the answer was ready."""


_CODES: dict[type[RequestError], str] = {
    QueueFullError: "rate_limit_exceeded",
    DeadlineError: "request_timeout",
    DrainedError: "server_stopping",
}


def error_object(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object for an answer of ``status``."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe_exception(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and error object for an exception raised while answering.

    Anything that is not a known error is logged with its trace and hidden from the client.
    """
    if isinstance(error, RequestError):
        return error.status, error_object(
            str(error), status=error.status, param=error.param, code=_code(error)
        )
    if isinstance(error, EngineDeadError):
        status = int(HTTPStatus.SERVICE_UNAVAILABLE)
        return status, error_object(str(error), status=status, code="engine_dead")
    logger.error("A request failed because of a bug", exc_info=error)
    status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
    return status, error_object("Internal error; the server's log has it.", status=status)


def _code(error: RequestError) -> str | None:
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    if error.status == HTTPStatus.NOT_FOUND and error.param == "model":
        return "model_not_found"
    if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return "request_too_large"
    return None


def error_response(error: Exception) -> Response:
    """Return the response for an exception raised while answering."""
    status, body = describe_exception(error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(body, status_code=status, headers=headers)


def error_json(error: Exception) -> str:
    """Return the error object of an exception as compact JSON, for a stream that has begun."""
    return json.dumps(describe_exception(error)[1], separators=(",", ":"))


async def _on_known(_request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        HTTPStatus.NOT_FOUND: f"There is no route {request.url.path}.",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.url.path} does not take {request.method}.",
    }.get(HTTPStatus(error.status_code), str(error.detail))
    return JSONResponse(
        error_object(message, status=error.status_code),
        status_code=error.status_code,
        headers=error.headers,
    )


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` an error object in JSON."""
    app.add_exception_handler(RequestError, _on_known)
    app.add_exception_handler(EngineDeadError, _on_known)
    app.add_exception_handler(ClientGoneError, _on_gone)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_known)
