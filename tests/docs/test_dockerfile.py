"""What an operator relies on in the image, checked where no engine can build it."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading

import pytest

from tests.docs.dockerfile import ROOT, read_dockerfile

INSTRUCTIONS = read_dockerfile((ROOT / "Dockerfile").read_text())
FINAL = [i for i in INSTRUCTIONS if i.stage == INSTRUCTIONS[-1].stage]


def only(name):
    (instruction,) = [i for i in FINAL if i.name == name]
    return instruction


def test_every_stage_is_on_slim_python():
    assert {i.words[0] for i in INSTRUCTIONS if i.name == "FROM"} == {"python:3.12-slim"}


def test_it_serves_as_an_ordinary_user():
    user = only("USER").value
    assert int(user) > 0
    assert FINAL.index(only("USER")) < FINAL.index(only("ENTRYPOINT"))
    (create,) = [i.value for i in FINAL if i.name == "RUN"]
    assert f"useradd --create-home --uid {user} " in create


def test_it_exposes_hex_llms_port():
    assert only("EXPOSE").value == "7080"


def test_it_starts_with_the_retired_containers_command():
    assert only("ENTRYPOINT").exec_form == ["python", "-m", "hex_llm.server.api_server"]
    assert [i for i in FINAL if i.name == "CMD"] == [], "arguments are the operator's own"
    assert (ROOT / "hex_llm" / "server" / "api_server.py").is_file()


def test_the_sources_it_copies_exist_and_are_not_ignored():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copies = [i for i in INSTRUCTIONS if i.name in {"COPY", "ADD"} and "--from" not in i.value]
    sources = {source for i in copies for source in i.words[:-1]}
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    assert sources <= kept


def test_it_installs_the_tpu_extra_and_the_plugins_asked_for():
    runs = [i.value for i in INSTRUCTIONS if i.name == "RUN"]
    assert any('pip install ".[tpu]"' in run for run in runs)
    (argument,) = [i for i in INSTRUCTIONS if i.name == "ARG"]
    assert argument.value == 'PLUGINS=""'
    (install,) = [run for run in runs if "${PLUGINS}" in run]
    script = install.replace("pip install", "echo").replace("hexllm plugins", "true")
    for plugins, expected in (("", ""), ("one two==2", "one two==2\n")):
        shell = subprocess.run(
            ["sh", "-c", script],
            env=os.environ | {"PLUGINS": plugins},
            capture_output=True,
            text=True,
        )
        assert (shell.returncode, shell.stdout) == (0, expected)


def test_the_metadata_server_is_asked_in_the_image():
    assert not any("TPU_SKIP_MDS_QUERY" in i.value for i in INSTRUCTIONS)


class Ping(http.server.BaseHTTPRequestHandler):
    status = 200
    paths: list[str]

    def do_GET(self):
        type(self).paths.append(self.path)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
@pytest.mark.parametrize("route", [None, "/v1/endpoints/1/deployedModels/2"])
def test_the_health_check_follows_ping(status, exit_status, route):
    command = only("HEALTHCHECK").exec_form
    assert command[0] == "python"
    handler = type("Handler", (Ping,), {"status": status, "paths": []})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        environment = os.environ | {"AIP_HTTP_PORT": str(server.server_port)}
        environment["http_proxy"] = "http://127.0.0.1:9"
        if route is not None:
            environment["AIP_HEALTH_ROUTE"] = route
        check = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True)
        server.shutdown()
    assert check.returncode == exit_status
    assert handler.paths == [route or "/ping"]
