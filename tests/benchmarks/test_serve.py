"""benchmarks/serve.py against a stand-in server. Counts are asserted, never times."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks import processes, serve
from benchmarks.load import parse_loopback
from tests.benchmarks import fake_server

FAKE = Path(fake_server.__file__)
SMALL = ["--requests=6", "--concurrency=3", "--input_len=20", "--output_len=8", "--nice=0"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A token a word, as the stand-in server counts them; the point is part of the word."""
    from benchmarks import prompts

    words = [*prompts.NOUNS.split(), *prompts.VERBS.split(), *prompts.ADJECTIVES.split()]
    words += [f"{noun}s" for noun in prompts.NOUNS.split()]
    words += [f"{noun}." for noun in prompts.NOUNS.split()]
    words += ["The", "near", "the", "one", "two", "seven", "forty", "a", "hundred", "no"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["?", *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def start():
    """Start stand-in servers with the given flags; ended afterwards."""
    servers = []

    def start_one(*flags):
        server = fake_server.FakeServer(fake_server.parse(list(flags)))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return server

    yield start_one
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def run(server, tokenizer, *flags):
    url = f"http://127.0.0.1:{server.server_port}"
    return serve.main([f"--url={url}", f"--tokenizer={tokenizer}", *SMALL, *flags])


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_rounds_lengths_and_concurrency(start, tokenizer, capsys, framing):
    server = start("--delay=0.005", f"--framing={framing}")
    assert run(server, tokenizer, "--rounds=2", "--json", f"--pid={os.getpid()}") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert len(server.bodies) == 6 * 3  # a round to warm up and two that count
    assert server.most_running == 3
    assert len(report["rounds"]) == 2
    for figures in report["rounds"]:
        assert figures["requests"] == 6
        assert figures["failed"] == 0
        assert figures["chunks"] == 6 * 8
        assert figures["prompt_tokens_min"] == figures["prompt_tokens_max"] == 20
        assert figures["output_tokens_min"] == figures["output_tokens_max"] == 8
        assert figures["peak_rss_mib"] > 1
        # A lower bound holds on the slowest machine: 8 tokens take seven delays at least.
        assert figures["tpot_ms_p50"] >= 5
        assert figures["output_tok_s"] <= 3 * 8 / (7 * 0.005)
    prompts = [body["prompt"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts), "a prompt came twice"
    assert report["model"] == "fake"
    assert "output tokens/s" in err
    assert "round 2" in err


def test_what_each_request_asks_for(start, tokenizer, capsys):
    server = start()
    extra = '{"cache_prompt": true, "temperature": 0.5}'
    assert run(server, tokenizer, "--rounds=1", "--warmup_rounds=0", f"--extra={extra}") == 0
    body = server.bodies[0]
    assert body.pop("prompt")
    assert body == {
        "model": "fake",
        "max_tokens": 8,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": True,
    }
    assert "Workload A: 6 requests, 3 at once, 20 tokens in, 8 out" in capsys.readouterr().out


def test_a_shared_prefix_is_new_in_each_round(start, tokenizer):
    server = start()
    flags = ["--workload=D", "--shared_prefix_len=30", "--rounds=2", "--warmup_rounds=0"]
    assert run(server, tokenizer, *flags) == 0
    prefixes = [tuple(body["prompt"].split()[:30]) for body in server.bodies]
    assert len(set(prefixes[:6])) == len(set(prefixes[6:])) == 1
    assert prefixes[0] != prefixes[6]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--fail=status"], "HTTP 400: "),
        (["--fail=cut"], "the connection broke"),
        (["--fail=cut", "--framing=close"], "without [DONE]"),
        (["--fail=error"], "the engine is gone"),
    ],
)
def test_a_request_that_fails_is_told_and_exits_1(start, tokenizer, capsys, flags, told):
    server = start(*flags, "--fail_at=2")
    assert run(server, tokenizer, "--rounds=1", "--warmup_rounds=0") == 1
    out = capsys.readouterr().out
    assert "! 1 of 6 requests failed: " in out
    assert told in out


def test_other_lengths_than_asked_are_told(start, tokenizer, capsys):
    server = start("--fail_at=2", "--short=3")
    assert run(server, tokenizer, "--rounds=1", "--warmup_rounds=0") == 0
    assert "! output tokens were 5 to 8, 8 were asked for" in capsys.readouterr().out


def test_a_round_ends_at_its_time_limit(start, tokenizer, capsys):
    server = start("--first_delay=3")
    flags = ["--rounds=1", "--warmup_rounds=0", "--max_seconds=0.3"]
    assert run(server, tokenizer, *flags) == 1
    assert "6 of 6 requests failed: unfinished" in capsys.readouterr().out


def test_json_lines_are_appended_to_a_file(start, tokenizer, tmp_path, capsys):
    server = start()
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        flags = ["--workload", "A", "B", "--rounds=1", f"--json={path}"]
        assert run(server, tokenizer, *flags) == 0
    names = [json.loads(line)["name"] for line in path.read_text().splitlines()]
    assert names == ["A", "B", "A", "B"]
    assert capsys.readouterr().out == ""


def find_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_launch_starts_measures_and_ends_the_server(tokenizer, capsys):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    command = f"{sys.executable} {FAKE} --not_ready=2 --port={find_port()} --model={tokenizer}"
    assert serve.main(["--launch", command, *SMALL, "--rounds=1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ready_s"] > 0
    assert report["median"]["peak_rss_mib"] > 1
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def test_launch_tells_why_a_server_did_not_start(tokenizer, capsys):
    command = f"{sys.executable} {FAKE} --fail=start --port={find_port()} --model={tokenizer}"
    assert serve.main(["--launch", command, *SMALL]) == 2
    err = capsys.readouterr().err
    assert "The server ended with status 3." in err
    assert "CheckpointError: no such model" in err


def test_launch_gives_up_in_time_and_refuses_a_taken_port(start, tokenizer, capsys):
    command = f"{sys.executable} {FAKE} --not_ready=1000000 --port={find_port()}"
    arguments = [f"--tokenizer={tokenizer}", *SMALL, "--ready_seconds=1"]
    assert serve.main(["--launch", command, *arguments]) == 2
    assert "Not ready after 1 s" in capsys.readouterr().err
    taken = start().server_port
    command = f"{sys.executable} {FAKE} --port {taken}"
    assert serve.main(["--launch", command, *arguments]) == 2
    assert f"port {taken} already" in capsys.readouterr().err
    assert serve.main(["--launch", "/no/such/server", *arguments, "--url=http://127.0.0.1:9"]) == 2
    assert "cannot be started" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(tokenizer, capsys):
    url = f"http://127.0.0.1:{find_port()}"
    assert serve.main([f"--url={url}", f"--tokenizer={tokenizer}", *SMALL]) == 2
    assert "Is it running?" in capsys.readouterr().err


def test_readiness_of_a_server_without_a_health_route(monkeypatch):
    answers = {"/ping": 404, "/health": 404, "/v1/models": 200}
    monkeypatch.setattr(processes, "_get_status", lambda _host, _port, path: answers[path])
    assert processes.is_ready("127.0.0.1", 1)
    answers["/health"] = 503  # llama.cpp lists its models while it loads them
    assert not processes.is_ready("127.0.0.1", 1)


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:80", "http://example.org", "https://127.0.0.1", "127.0.0.1:7080"]
)
def test_only_this_machine_is_measured(url, capsys):
    with pytest.raises(SystemExit):
        serve.main([f"--url={url}", "--tokenizer=x"])
    assert "127.0.0.1" in capsys.readouterr().err


def test_loopback_addresses():
    assert parse_loopback("http://localhost:7080/") == ("127.0.0.1", 7080)
    assert parse_loopback("http://[::1]:1") == ("::1", 1)
    assert parse_loopback("http://127.0.0.2") == ("127.0.0.2", 80)


def test_it_runs_as_a_script():
    script = Path(serve.__file__)
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "--launch" in shown.stdout
