"""The ``hexllm`` command, run as users run it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import hexllm
from hexllm import cli
from hexllm.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("jax", "flax", "torch", "transformers", "fastapi")

GOOD = """
from hexllm import Component, hookimpl
HEXLLM_PLUGIN_API = 1
@hookimpl
def hexllm_scheduling_policies():
    yield Component("mine", f"{__name__}:absent", summary="of my own")
"""


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hexllm", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=60,
    )


def cpu_seconds(code: str) -> float:
    """Processor time of a fresh interpreter: unlike wall time, a busy machine does not raise it."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.parametrize(
    "code",
    ["import hexllm", "from hexllm.cli import main; assert main(['plugins', '--json']) == 0"],
)
def test_imports_nothing_heavy_and_takes_less_than_half_a_second(code: str) -> None:
    check = f"{code}\nimport sys\nassert not [n for n in {HEAVY!r} if n in sys.modules]"
    assert cpu_seconds(check) < 0.5


def test_plugins_as_json_lists_the_built_ins() -> None:
    result = run("plugins", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    listed = json.loads(result.stdout)
    assert (listed["hexllm"], listed["plugin_api"]) == (hexllm.__version__, 1)
    rows = {row["name"]: row for row in listed["plugins"]}
    schedulers = rows["hexllm.plugins.schedulers"]
    assert (schedulers["distribution"], schedulers["status"]) == ("hexllm", "ok")
    policies = {each["name"]: each for each in schedulers["components"]["scheduling_policies"]}
    assert set(policies) == {"fcfs", "priority", "fair", "sjf"}
    implementation = policies["fcfs"]["implementation"]
    assert implementation == "hexllm.plugins.schedulers.fcfs:FirstComeFirstServed"


def test_every_built_in_passes_the_check() -> None:
    result = run("plugins", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_configuration_file_and_flags_choose_the_plugins(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text("import nowhere_at_all")
    (tmp_path / "server.toml").write_text('[plugins]\nfiles = ["mine.py", "bad.py"]\n')
    listed = run("plugins", "--config", "server.toml", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "of my own" in listed.stdout
    assert "ModuleNotFoundError: No module named 'nowhere_at_all'" in listed.stdout
    checked = run("plugins", "--check", "--plugins.files=mine.py", cwd=tmp_path)
    assert checked.returncode == 1
    assert "'mine' of mine.py" in checked.stdout
    assert "has no 'absent'" in checked.stdout
    strict = run("plugins", "--config=server.toml", "--plugins.strict", cwd=tmp_path)
    assert strict.returncode == 1
    assert strict.stderr.startswith("hexllm: Plugin '")
    assert "plugins.strict is set" in strict.stderr
    assert "of my own" in strict.stdout
    disabled = run("plugins", "--json", "--plugins.disable=hexllm.plugins.quant")
    assert {row["status"] for row in json.loads(disabled.stdout)["plugins"]} == {"ok", "disabled"}


def test_an_unknown_flag_is_a_mistake_of_configuration() -> None:
    near = run("plugins", "--jsn")
    assert near.returncode == 2
    assert near.stderr == "hexllm: There is no flag '--jsn'. Did you mean '--json'?\n"
    unknown = run("plugins", "--plugins.disabel=x")
    assert unknown.returncode == 2
    assert "plugins.disable" in unknown.stderr


def test_options_of_a_component_that_does_not_exist_are_not_ignored() -> None:
    result = run("serve", "--model=absent/model", "--options.fcsf.weight=1")
    assert result.returncode == 2
    assert "options.fcsf is for no component of any plugin. Did you mean 'fcfs'?" in result.stderr


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hexllm {hexllm.__version__}\n"
    for flag in ("--help", "-h", "help"):
        assert cli.main([flag]) == 0
        help_text = capsys.readouterr().out
        assert all(command in help_text for command in cli.COMMANDS)
    assert cli.main(["plugins", "--help"]) == 0
    assert "--check" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert "usage: hexllm" in capsys.readouterr().err
    assert cli.main(["srve"]) == 2
    assert "no command 'srve'. Did you mean 'serve'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("set X"), 2), (CheckpointError("no file"), 1), (KeyboardInterrupt(), 130)],
)
def test_a_users_mistake_is_one_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
) -> None:
    def fail(argv: list[str]) -> int:
        assert argv == ["--port=1"]
        raise error

    monkeypatch.setattr(cli, "list_plugins", fail)
    assert cli.main(["plugins", "--port=1"]) == status
    assert capsys.readouterr().err == (f"hexllm: {error}\n" if str(error) else "")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "hexllm", "plugins"],
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    finally:
        os.close(write)
    assert result.stderr == b""
    assert result.returncode == 1


def test_every_command_names_a_function_that_exists() -> None:
    for target, _ in cli.COMMANDS.values():
        module, _, function = target.partition(":")
        path = hexllm.__path__[0].removesuffix("hexllm") + module.replace(".", "/") + ".py"
        with open(path, encoding="utf-8") as file:
            assert f"def {function}(" in file.read(), target
