"""The event-stream reader gives the same events however the network cuts the bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sse import ProtocolError, ResponseReader

LINES = [b'{"a": 1}', b'{"text": "\xc3\xa9\\n"}', b"[DONE]"]
BODY = b": a comment\n\n" + b"".join(b"data: " + line + b"\n\n" for line in LINES)


def respond(body: bytes, header: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\nServer: x\r\n" + header + b"\r\n\r\n" + body


def chunk(body: bytes, sizes: list[int]) -> bytes:
    chunked = b""
    start = 0
    for size in [*sizes, len(body)]:
        part = body[start : start + size]
        start += size
        if part:
            chunked += b"%X;ext=1\r\n%b\r\n" % (len(part), part)
    return chunked + b"0\r\n\r\n"


def read(data: bytes, cuts: list[int]) -> tuple[ResponseReader, list[bytes]]:
    reader = ResponseReader()
    events = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        if start < end:
            events += reader.feed(data[start:end])
    return reader, events


@given(st.lists(st.integers(1, 30), max_size=8), st.lists(st.integers(0, 10_000), max_size=20))
def test_chunked_streams(sizes, cuts):
    data = respond(chunk(BODY, sizes), b"Transfer-Encoding: Chunked")
    reader, events = read(data, cuts)
    assert events == LINES
    assert reader.status == 200
    assert reader.is_complete


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_streams_of_a_known_length(cuts):
    header = b"content-length: %d" % len(BODY)
    reader, events = read(respond(BODY, header), cuts)
    assert events == LINES
    assert reader.is_complete


def test_streams_that_end_with_the_connection():
    reader, events = read(respond(BODY, b"Connection: close"), [50, 60])
    assert events == LINES
    assert not reader.is_complete
    reader.end()
    assert reader.is_complete


def test_a_chunked_stream_that_is_cut_is_not_complete():
    whole = respond(chunk(BODY, [10]), b"Transfer-Encoding: chunked")
    reader, _ = read(whole[:-8], [])
    reader.end()
    assert not reader.is_complete


def test_an_error_body_is_kept_for_the_message():
    body = b'{"error": "no"}'
    reader, events = read(respond(body, b"Content-Length: 15", b"400 Bad Request"), [70])
    assert (reader.status, reader.body, events) == (400, body, [])


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        respond(b"xyz\r\n", b"Transfer-Encoding: chunked"),
    ],
)
def test_what_is_no_http_is_refused(data):
    with pytest.raises(ProtocolError):
        ResponseReader().feed(data)
