"""A stand-in for an OpenAI-compatible server, whose every delay and failure is chosen by flags.

Run by path, with the standard library alone. ``--not_ready=N`` answers ``/ping`` with 503 N times;
``--fail=…`` chooses how the N-th completion (``--fail_at``) goes wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", options.port), Handler)
        self.options = options
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.running = 0
        self.most_running = 0
        self.pings = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        options = self.server.options
        if self.path == "/ping":
            self.server.pings += 1
            if self.server.pings <= options.not_ready:
                progress = {"phase": "compiling", "done": self.server.pings, "total": 4}
                self.answer(503, {"status": "starting", "progress": progress})
            else:
                self.answer(200, {"status": "ready"})
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": "fake"}]})
        else:
            self.answer(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            number = len(self.server.bodies)
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        try:
            self.complete(body, number)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def complete(self, body: dict[str, Any], number: int) -> None:
        options = self.server.options
        failure = options.fail if number == options.fail_at else None
        if failure == "status":
            self.answer(400, {"error": {"message": "ignore_eos is not known here"}})
            return
        if failure == "exit":
            print("the fake server breaks down", flush=True)
            os._exit(5)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if options.framing == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        chat = "messages" in body
        count = body["max_tokens"] - (options.short if number == options.fail_at else 0)
        time.sleep(options.first_delay)
        if chat:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for start in range(0, count, options.tokens_a_chunk):
            if start:
                time.sleep(options.delay)
            if failure == "cut" and start >= count // 2:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if failure == "error" and start >= count // 2:
                self.event({"error": {"message": "the engine is gone"}})
                return
            text = " word" * min(options.tokens_a_chunk, count - start)
            piece = {"delta": {"content": text}} if chat else {"text": text}
            self.event({"choices": [{"index": 0, **piece, "finish_reason": None}], "usage": None})
        last = {"delta": {}} if chat else {"text": ""}
        self.event({"choices": [{"index": 0, **last, "finish_reason": "length"}]})
        if options.usage:
            usage = {"prompt_tokens": self.prompt_tokens(body), "completion_tokens": count}
            self.event({"choices": [], "usage": usage})
        self.write(b"data: [DONE]\n\n")
        if options.framing == "chunked":
            self.wfile.write(b"0\r\n\r\n")

    @staticmethod
    def prompt_tokens(body: dict[str, Any]) -> int:
        return len(body["prompt"].split()) if isinstance(body.get("prompt"), str) else 7

    def event(self, value: object) -> None:
        self.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def write(self, data: bytes) -> None:
        if self.server.options.framing == "chunked":
            data = f"{len(data):x}\r\n".encode() + data + b"\r\n"
        self.wfile.write(data)
        self.wfile.flush()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host")
    parser.add_argument("--model")
    parser.add_argument("--max_model_len")
    parser.add_argument("--max_running_seqs")
    parser.add_argument("--first_delay", type=float, default=0.0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--tokens_a_chunk", type=int, default=1)
    parser.add_argument("--framing", choices=["chunked", "close"], default="chunked")
    parser.add_argument("--no-usage", dest="usage", action="store_false")
    parser.add_argument("--not_ready", type=int, default=0)
    parser.add_argument("--fail", choices=["status", "cut", "error", "exit", "start"])
    parser.add_argument("--fail_at", type=int, default=1)
    parser.add_argument("--short", type=int, default=0, help="tokens missing at --fail_at")
    return parser.parse_args(argv)


def main() -> int:
    options = parse()
    if options.fail == "start":
        print("CheckpointError: no such model")
        return 3
    print(f"listening for {options.model}", flush=True)
    with FakeServer(options) as server:
        server.serve_forever(poll_interval=0.05)
    return 4


if __name__ == "__main__":
    sys.exit(main())
