from __future__ import annotations

import json
from pathlib import Path

import pytest

from hexllm.cli import main
from hexllm.core.errors import ConfigError
from hexllm.plan.command import FLAGS, HELP, split_flags

REAL = Path(__file__).parents[1] / "plugins" / "models" / "real_configs"
LLAMA_8B = str(REAL / "Meta-Llama-3-8B-Instruct.json")


def test_own_flags_and_those_of_serve_are_told_apart():
    own, rest = split_flags(
        ["org/name", "--topology", "v5e:2x2", "--max_model_len", "4096", "--json", "--seqs=8"]
    )
    assert own == {"topology": "v5e:2x2", "json": "", "seqs": "8"}
    assert rest == ["--model=org/name", "--max_model_len", "4096"]


def test_flags_may_be_written_with_dashes_and_the_model_as_a_flag():
    own, rest = split_flags(["--model=m", "--chip-price=1.2", "--all-buckets"])
    assert own == {"chip_price": "1.2", "all_buckets": ""}
    assert rest == ["--model=m"]


@pytest.mark.parametrize("words", ["m --topology", "m --seqs --json", "m --json=1"])
def test_values_where_they_belong(words):
    with pytest.raises(ConfigError):
        split_flags(words.split())


def test_help_names_every_flag(capsys):
    assert main(["plan", "--help"]) == 0
    assert capsys.readouterr().out == HELP
    assert all(f"--{name}" in HELP for name in FLAGS)


def test_nothing_asked_is_a_mistake(capsys):
    assert main(["plan"]) == 2
    assert "usage: hexllm plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([LLAMA_8B], "No topology is named. Give --topology=v5e:2x2"),
        ([LLAMA_8B, "--topology=v5e:3x3"], "'v5e:3x3' does not exist. Choose v5e:1x1, v5e:2x2"),
        ([LLAMA_8B, "--topology=h100:2"], "'h100' is none of"),
        ([LLAMA_8B, "--topology=v5e:2x2", "--seqs=none"], "--seqs=none is not usable"),
        ([LLAMA_8B, "--topology=v5e:2x2", "--chip_price=cheap"], "it takes US dollars"),
        ([LLAMA_8B, "--topology=v5e:2x2", "--topolgy=v5e:1x1"], "--topolgy"),
        (["--topology=v5e:2x2"], "No model is named"),
        (["/nowhere", "--topology=v5e:2x2"], "Model '/nowhere' was not found"),
    ],
)
def test_mistakes_are_sentences_and_end_with_2(words, said, capsys, monkeypatch):
    monkeypatch.delenv("AIP_STORAGE_URI", raising=False)
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_a_configuration_that_nobody_knows(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"]}))
    assert main(["plan", str(tmp_path), "--topology=v5e:2x2"]) == 2
    assert "NobodyForCausalLM" in capsys.readouterr().err


def test_a_configuration_that_is_no_object(tmp_path, capsys):
    (tmp_path / "config.json").write_text("[]")
    assert main(["plan", str(tmp_path / "config.json"), "--topology=v5e:2x2"]) == 2
    assert "not a JSON object" in capsys.readouterr().err
