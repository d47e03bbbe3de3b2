"""`hexllm demo` against a stand-in server: what it prints, how it fails, what it leaves behind."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hexllm.server import demo

FAKE = Path(__file__).parents[1] / "benchmarks" / "fake_server.py"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "SERVE_COMMAND", (sys.executable, str(FAKE)))
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    started = []
    popen = subprocess.Popen

    def remember(*args, **kwargs):
        process = popen(*args, **kwargs)
        started.append(process)
        return process

    monkeypatch.setattr(demo.subprocess, "Popen", remember)
    yield started
    assert all(process.poll() is not None for process in started), "a server was left running"
    assert list(tmp_path.iterdir()) == [], "a log was left behind"


def test_prints_the_streamed_answer_and_its_speed(fake, capsys):
    assert demo.main(["--max_tokens=5", "--prompt=Say words"]) == 0
    out = capsys.readouterr().out
    assert "> Say words\n word word word word word\n" in out
    assert re.search(r"\[5 tokens, [\d.]+ tok/s, first token after [\d.]+ s\]", out)
    assert len(fake) == 1


def test_shows_each_phase_once_off_a_terminal(fake, capsys):
    assert demo.main(["--not_ready=3"]) == 0
    assert capsys.readouterr().err.count("compiling") == 1


def test_other_flags_reach_the_server(fake, capsys):
    assert demo.main(["--no_such_flag=1"]) == 1
    err = capsys.readouterr().err
    assert "The server ended with status 2 while starting." in err
    assert "unrecognized arguments: --no_such_flag=1" in err


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("start", "CheckpointError: no such model"),
        ("status", "The server answered 400: "),
        ("error", "the engine is gone"),
        ("cut", "The answer broke off"),
        ("exit", "the fake server breaks down"),
    ],
)
def test_every_failure_exits_1_and_shows_the_servers_last_lines(fake, capsys, failure, told):
    assert demo.main([f"--fail={failure}", "--framing=chunked"]) == 1
    err = capsys.readouterr().err
    assert told in err
    assert "The end of the server's log:" in err


def test_a_stream_that_ends_without_done_is_a_failure(fake, capsys):
    assert demo.main(["--fail=cut", "--framing=close"]) == 1
    assert "broke off" in capsys.readouterr().err


def test_gives_up_when_it_is_never_ready(fake, capsys):
    assert demo.main(["--not_ready=1000000", "--timeout=0.5"]) == 1
    assert "not ready after 0 s" in capsys.readouterr().err


def test_a_taken_port_is_refused_before_anything_starts(fake, capsys):
    with socket.socket() as taken:
        taken.bind((demo.HOST, 0))
        taken.listen()
        assert demo.main([f"--port={taken.getsockname()[1]}"]) == 1
    assert "cannot be used" in capsys.readouterr().err
    assert fake == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_keep_serves_on_until_it_is_interrupted(number, tmp_path):
    code = (
        f"import sys; from hexllm.server import demo\n"
        f"demo.SERVE_COMMAND = (sys.executable, {str(FAKE)!r})\n"
        f"sys.exit(demo.main(['--keep', '--max_tokens=2']))"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines = []
        while "Ctrl-C" not in (line := process.stdout.readline()):
            assert line, "it ended before it served"
            lines.append(line)
        text = "".join(lines)
        pid = int(re.search(r"pid (\d+)", text)[1])
        port = int(re.search(r"http://127.0.0.1:(\d+)", text)[1])
        assert demo.request_json(port, "GET", "/ping", timeout_s=5)[0] == 200
        assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in text
        process.send_signal(number)
        assert process.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_one_line_that_is_written_over():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    line = demo.StatusLine(screen)
    line.show("loading 1 %", "loading")
    line.show("loading 2 %", "loading")
    line.close()
    assert screen.getvalue() == "\r\x1b[2Kloading 1 %\r\x1b[2Kloading 2 %\r\x1b[2K"


def test_progress_is_read_from_a_ping_of_either_form():
    flat = {"phase": "loading weights", "done": 1, "total": 3, "detail": "lm_head"}
    expected = ("loading weights 33 %, lm_head", "loading weights")
    assert demo.describe_progress(flat) == expected
    assert demo.describe_progress({"status": "starting", "progress": flat}) == expected
    assert demo.describe_progress({"status": "starting", "progress": None}) == ("starting",) * 2
    assert demo.describe_progress(None) == ("starting", "starting")


def test_the_users_sizes_replace_the_modest_ones():
    modest = ["--max_model_len=2048", "--max_running_seqs=8"]
    assert demo.add_modest_sizes(["--seed=1"]) == [*modest, "--seed=1"]
    assert demo.add_modest_sizes(["--max-model-len", "9"]) == [modest[1], "--max-model-len", "9"]
    assert demo.add_modest_sizes(["--max_decode_seqs=2"]) == [modest[0], "--max_decode_seqs=2"]


def test_one_token_has_no_rate():
    assert demo.Answer(1, 0.5, 0.0).tokens_per_second is None
    assert demo.Answer(5, 0.5, 2.0).tokens_per_second == 2.0
