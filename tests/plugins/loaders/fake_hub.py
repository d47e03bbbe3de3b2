"""A hub on loopback: the few routes that huggingface_hub asks for, and its ways to refuse."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves ``repos[org/name][file] = bytes`` until :meth:`close`.

    Attributes:
        repos: Files by repository.
        refusals: By repository (or repository/file), the status and X-Error-Code to answer with.
        cut: Files whose connection breaks in the middle of the body.
        requests: What was asked: (method, path, authorization).
    """

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.refusals: dict[str, tuple[int, str]] = {}
        self.cut: set[str] = set()
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def downloads(self) -> set[str]:
        """Names of the files whose bytes were asked for."""
        found = (re.fullmatch(r".+/resolve/[^/]+/(.+)", path) for _, path, _ in self.requests)
        methods = [method for method, _, _ in self.requests]
        return {
            match[1]
            for match, method in zip(found, methods, strict=True)
            if match and method == "GET"
        }

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((handler.command, path, handler.headers.get("Authorization")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or resolve
        if match is None:
            return self._send(handler, 404, b"")
        repo = match[1]
        refusal = self.refusals.get(repo)
        if resolve:
            refusal = refusal or self.refusals.get(f"{repo}/{resolve[3]}")
        if refusal:
            return self._refuse(handler, *refusal)
        if repo not in self.repos:
            return self._refuse(handler, 401 if "private" in repo else 404, "RepoNotFound")
        if (resolve[2] if resolve else match[3] or "main") not in ("main", "v1", COMMIT):
            return self._refuse(handler, 404, "RevisionNotFound")
        files = self.repos[repo]
        if resolve:
            if resolve[3] not in files:
                return self._refuse(handler, 404, "EntryNotFound")
            return self._send_file(handler, resolve[3], files[resolve[3]])
        if api and api[2] == "tree":
            listing: Any = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
        else:
            siblings = [{"rfilename": name} for name in files]
            listing = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
        headers = {"Content-Type": "application/json"}
        return self._send(handler, 200, json.dumps(listing).encode(), headers)

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self._send(handler, status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, data: bytes) -> None:
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        status = 200
        if asked:
            begin = int(asked[1])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            data, status = data[begin:], 206
        cut = len(data) // 2 if name in self.cut and handler.command == "GET" else None
        self._send(handler, status, data, headers, cut)

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        handler.send_response(status)
        for key, value in (headers or {}).items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data[:cut])
        if cut is not None:
            handler.close_connection = True


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
