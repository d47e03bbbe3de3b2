"""Reads a request's JSON body: bounded, and refused with a sentence when it is not usable."""

from __future__ import annotations

import asyncio
import contextlib
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import RequestError
from hexllm.server.errors import ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import Request

#: Of a body that is refused for its size, what is read (and dropped) so that the client, which
#: is still sending, gets to see the answer.
_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_SECONDS = 2.0


async def read_json(
    request: Request, limit: int, *, any_content_type: bool = False
) -> dict[str, Any]:
    """Return the JSON object in the body of ``request``.

    Args:
        request: Whose body has not been read.
        limit: The most bytes to accept.
        any_content_type: Read it as JSON whatever it is said to be.

    Raises:
        RequestError: The body is too large (413), not said to be JSON (415), not JSON, not an
            object, or has text that no encoding can carry (400).
        ClientGoneError: The client hung up while sending it.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if not (any_content_type or kind == "application/json" or kind.endswith("+json")):
        raise RequestError(
            f"Content-Type {kind!r} is not understood: send application/json.",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    body = parse_json(await _read_bounded(request, limit))
    if not isinstance(body, dict):
        raise RequestError(f"The body is a JSON {_json_type(body)}; it must be an object.")
    return body


def parse_json(raw: bytes) -> Any:
    """Return what ``raw`` holds as JSON; NaN and Infinity pass, to be refused by their field.

    Raises:
        RequestError: It is not JSON, or some text in it has a lone surrogate.
    """
    try:
        # Decoded here, not by json.loads: that one guesses UTF-16 and lets surrogates through.
        body = json.loads(raw.decode("utf-8-sig"))
    except RecursionError as error:
        raise RequestError("The body is nested too deeply to be read as JSON.") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, a number of 5000 digits
        raise RequestError(f"The body is not JSON: {error}.") from error
    for where, text in _texts(body, ""):
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"{where or 'The body'} has half of a surrogate pair "
                    f"(\\u{ord(text[error.start]):04x}) at character {error.start}: that is no "
                    f"text.",
                    param=where or None,
                ) from error
    return body


async def _read_bounded(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    too_large = announced.isdigit() and int(announced) > limit
    received = bytearray()
    while not too_large:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        received += message.get("body", b"")
        too_large = len(received) > limit
        if not message.get("more_body", False):
            break
    if too_large:
        await _drain(request)
        raise RequestError(
            f"The body is larger than {limit} bytes, this server's --max_request_bytes.",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
    return bytes(received)


async def _drain(request: Request) -> None:
    dropped = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while dropped < _DRAIN_BYTES:
                message = await request.receive()
                dropped += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield every text in ``value`` (keys too) with its place, such as ``messages[0].content``."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield "", key
            yield from _texts(item, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, str | dict | list):
                yield from _texts(item, f"{where}[{i}]")


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
