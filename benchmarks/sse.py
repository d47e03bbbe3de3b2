"""A hand-written reader of HTTP/1.1 event streams.

General HTTP clients spend 100 µs and more on a chunk. With 32 streams on a machine that the server
needs itself, that alone would make every server look slower and burstier than it is. Here a chunk
costs a few: no JSON is parsed while the clock runs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

DONE = b"[DONE]"
MAX_ERROR_BODY = 2000


class ProtocolError(Exception):
    """The server's bytes are no HTTP/1.1 response."""


class ResponseReader:
    """Takes a response's bytes in pieces of any size and gives its events' data.

    Attributes:
        status: The HTTP status, None until the head is read.
        is_complete: Whether the body's end has been seen.
        body: The first bytes of the body, for error messages.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_complete = False
        self.body = b""
        self._raw = bytearray()
        self._line = bytearray()
        self._is_chunked = False
        self._left: int | None = None  # bytes of the body or chunk to come; None: until it closes
        self._is_between_chunks = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of the ``data:`` lines that ``data`` completes.

        Raises:
            ProtocolError: This is no HTTP response.
        """
        self._raw += data
        if self.status is None and not self._read_head():
            return []
        return self._read_chunks() if self._is_chunked else self._read_plain()

    def end(self) -> None:
        """Note that the server closed the connection, which ends a body of unknown length."""
        if self.status is not None and not self._is_chunked and self._left is None:
            self.is_complete = True

    def _read_head(self) -> bool:
        """Read status and headers once they are whole, and say whether they are."""
        head, separator, rest = bytes(self._raw).partition(b"\r\n\r\n")
        if not separator:
            return False
        status_line, *lines = head.split(b"\r\n")
        words = status_line.split(maxsplit=2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise ProtocolError(f"not an HTTP/1.1 status line: {status_line[:60]!r}")
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(b":")
            if name.lower() == b"transfer-encoding":
                self._is_chunked = value.strip().lower() == b"chunked"
            elif name.lower() == b"content-length":
                self._left = int(value)
        self._is_between_chunks = self._is_chunked
        self._raw = bytearray(rest)
        return True

    def _read_plain(self) -> list[bytes]:
        """Take what is there, up to the announced length if there is one."""
        data = bytes(self._raw)
        self._raw.clear()
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.is_complete = self._left == 0
        return self._read_events(data)

    def _read_chunks(self) -> list[bytes]:
        """Take every whole or partial chunk that is there."""
        events: list[bytes] = []
        while self._raw and not self.is_complete:
            if self._is_between_chunks:
                line, separator, _ = self._raw.partition(b"\r\n")
                if not separator:
                    break
                del self._raw[: len(line) + 2]
                if line:  # else it is the line end that closes the chunk before
                    try:
                        self._left = int(line.partition(b";")[0], 16)
                    except ValueError as error:
                        raise ProtocolError(f"not a chunk size: {bytes(line[:20])!r}") from error
                    self.is_complete = self._left == 0
                    self._is_between_chunks = False
                continue
            take = min(self._left or 0, len(self._raw))
            events += self._read_events(bytes(self._raw[:take]))
            del self._raw[:take]
            self._left = (self._left or 0) - take
            self._is_between_chunks = self._left == 0
        return events

    def _read_events(self, data: bytes) -> list[bytes]:
        """Split body bytes into lines and return the payloads of the ``data:`` lines."""
        if len(self.body) < MAX_ERROR_BODY:
            self.body += data[: MAX_ERROR_BODY - len(self.body)]
        self._line += data
        if b"\n" not in data:
            return []
        *lines, rest = bytes(self._line).split(b"\n")
        self._line = bytearray(rest)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(slots=True)
class Exchange:
    """One request and everything that came back, with the times of both.

    Attributes:
        sent: When the request was sent, by ``time.perf_counter()``.
        ended: When the response ended; None if it never did.
        events: Each event's arrival and its raw data.
        failure: What went wrong, None when the stream closed with ``[DONE]``.
    """

    sent: float = 0.0
    ended: float | None = None
    events: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = "unfinished at the time limit"


class _Connection(asyncio.Protocol):
    """Sends one request when the connection stands and stamps what comes back."""

    def __init__(self, request: bytes, exchange: Exchange) -> None:
        self._request = request
        self._exchange = exchange
        self._reader = ResponseReader()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            self._exchange.events += [(now, event) for event in self._reader.feed(data)]
        except ProtocolError as error:
            self._finish(str(error))
            return
        if self._reader.is_complete:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.end()
        if self._reader.is_complete:
            self._finish(None)
        else:
            self._finish(f"the connection broke{f': {exc}' if exc else ''}")

    def _finish(self, failure: str | None) -> None:
        if self.finished.done():
            return
        events = self._exchange.events
        if failure is None and self._reader.status != 200:
            text = self._reader.body.decode(errors="replace")[:300]
            failure = f"HTTP {self._reader.status}: {text}"
        elif failure is None and (not events or events[-1][1] != DONE):
            # Most often an error event, which says more than the missing end.
            last = events[-1][1].decode(errors="replace")[:300] if events else "no event"
            failure = f"the stream ended without [DONE]; last: {last}"
        self._exchange.failure = failure
        self._exchange.ended = time.perf_counter()
        self.finished.set_result(None)


async def exchange(host: str, port: int, request: bytes, into: Exchange) -> None:
    """Send one request on a connection of its own and fill ``into`` as the response comes."""
    into.sent = time.perf_counter()
    try:
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(request, into), host, port
        )
    except OSError as error:
        into.failure = f"no connection: {error}"
        return
    try:
        await connection.finished
    finally:
        transport.abort()  # also when the time limit cancels this: the server must see it go
