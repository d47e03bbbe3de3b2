"""Where settings come from, and which place wins."""

import pytest

from hexllm.core.errors import ConfigError
from hexllm.core.settings import load_settings

TOML = """
model = "file/model"
port = 1
log_level = "error"
max_running_seqs = 5
warmup = false

[plugins]
files = ["./policy.py", "/abs/other.py"]
disable = "a, b"
required = ["c"]

[options.fair]
weight = 2
limits = [1, 2]

[options."dotted.name".deep]
x = 1
"""

YAML = """
model: file/model
port: 1
log_level: error
max_running_seqs: 5
warmup: no
plugins:
  files: [./policy.py, /abs/other.py]
  disable: a, b
  required: [c]
options:
  fair: {weight: 2, limits: [1, 2]}
  dotted.name:
    deep: {x: 1}
"""


@pytest.fixture(params=["server.toml", "server.yaml", "server.yml"])
def config(request, tmp_path):
    path = tmp_path / request.param
    path.write_text(TOML if request.param.endswith("toml") else YAML)
    return path


def test_file(config, monkeypatch, tmp_path):
    monkeypatch.chdir("/")
    settings = load_settings([f"--config={config}"], {})
    assert settings.config == config
    assert settings.model == settings.tokenizer == settings.served_model_name == "file/model"
    assert (settings.port, settings.log_level, settings.max_decode_seqs) == (1, "ERROR", 5)
    assert settings.warmup is False
    assert settings.plugins.files == (str(tmp_path / "policy.py"), "/abs/other.py")
    assert settings.plugins.disable == ("a", "b")
    assert settings.plugins.required == ("c",)
    assert settings.options == {
        "fair": {"weight": 2, "limits": [1, 2]},
        "dotted.name": {"deep": {"x": 1}},
    }


def test_command_line_over_environment_over_file_over_default(config):
    argv, environ = [f"--config={config}"], {}
    assert load_settings(argv, environ).port == 1
    environ["AIP_HTTP_PORT"] = "2"
    assert load_settings(argv, environ).port == 2
    environ["HEXLLM_PORT"] = "3"
    assert load_settings(argv, environ).port == 3
    assert load_settings([*argv, "--port=4"], environ).port == 4
    assert load_settings(["--model=x"], {}).port == 7080


def test_tables_merge_key_by_key(config):
    settings = load_settings(
        [f"--config={config}", "--options.fair.weight=9", "--plugins.strict"],
        {"HEXLLM_PLUGINS__REQUIRED": "d,e", "HEXLLM_OPTIONS__OTHER__LIMITS": "[3]"},
    )
    assert settings.options["fair"] == {"weight": "9", "limits": [1, 2]}
    assert settings.options["other"] == {"limits": [3]}
    assert settings.plugins.strict is True
    assert settings.plugins.required == ("d", "e")
    assert settings.plugins.disable == ("a", "b")


def test_a_switch_of_the_file_is_turned_on_again(config):
    assert load_settings([f"--config={config}", "--warmup"], {}).warmup is True


def test_the_file_is_named_in_the_environment(config):
    assert load_settings([], {"HEXLLM_CONFIG": str(config)}).port == 1
    assert (
        load_settings(["--config=none", "--model=x"], {"HEXLLM_CONFIG": str(config)}).port == 7080
    )


def test_plugin_files_of_the_command_line_are_from_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(["--model=x", "--plugins.files=a.py,/b.py"], {})
    assert settings.plugins.files == (str(tmp_path / "a.py"), "/b.py")


@pytest.mark.parametrize(
    ("variable", "name", "written", "value", "flag", "other"),
    [
        ("HEX_LLM_LOG_LEVEL", "log_level", "debug", "DEBUG", "--log_level=error", "ERROR"),
        ("HEX_LLM_VERBOSE_LOG", "verbose_log", "true", True, "--no-verbose_log", False),
        ("AIP_HTTP_PORT", "port", "8080", 8080, "--port=7080", 7080),
        ("AIP_HEALTH_ROUTE", "health_route", "/h", "/h", "--health_route=/ping", "/ping"),
        (
            "AIP_PREDICT_ROUTE",
            "predict_route",
            "/v1/endpoints/1/deployedModels/2:predict",
            "/v1/endpoints/1/deployedModels/2:predict",
            "--predict_route=/p",
            "/p",
        ),
    ],
)
def test_variables_of_hex_llm_and_vertex(variable, name, written, value, flag, other):
    environ = {variable: written}
    assert getattr(load_settings(["--model=x"], environ), name) == value
    assert getattr(load_settings(["--model=x", flag], environ), name) == other
    environ["HEXLLM_" + name.upper()] = str(other)
    assert getattr(load_settings(["--model=x"], environ), name) == other


def test_storage_uri_is_the_model_only_when_nothing_else_names_one(config):
    environ = {"AIP_STORAGE_URI": "gs://bucket/model"}
    settings = load_settings([], environ)
    assert settings.model == settings.tokenizer == "gs://bucket/model"
    assert load_settings(["--model=x"], environ).model == "x"
    assert load_settings([], environ | {"HEXLLM_MODEL": "y"}).model == "y"
    assert load_settings([f"--config={config}"], environ).model == "file/model"


def test_an_empty_variable_counts_as_unset():
    environ = {"HEXLLM_PORT": "", "AIP_HTTP_PORT": "", "HEXLLM_NO_SUCH": "", "HEXLLM_MODEL": "m"}
    settings = load_settings([], environ)
    assert (settings.port, settings.model) == (7080, "m")


def test_the_alias_works_everywhere():
    environ = {"HEXLLM_MAX_RUNNING_SEQS": "6"}
    assert load_settings(["--model=x"], environ).max_decode_seqs == 6
    assert load_settings(["--model=x", "--max_decode_seqs=7"], environ).max_decode_seqs == 7


def test_an_empty_file_is_no_settings(tmp_path):
    for name in ("a.yaml", "a.toml"):
        (tmp_path / name).write_text("")
        assert load_settings([f"--config={tmp_path / name}", "--model=x"], {}).port == 7080


def test_null_in_yaml_unsets(tmp_path):
    (tmp_path / "a.yaml").write_text("model: x\nmax_model_len: null\nplugins:\n  strict: false\n")
    assert load_settings([f"--config={tmp_path / 'a.yaml'}"], {}).max_model_len is None


def test_other_variables_are_left_alone():
    environ = {"HEX_LLM_OTHER": "1", "PORT": "9", "MODEL_ID": "label", "HEXLLMX": "1"}
    environ["HEXLLM_CACHE"] = "/somewhere"  # read by loaders, no setting
    assert load_settings(["--model=x"], environ).port == 7080


def test_a_file_s_mistakes_come_together_with_the_rest(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('prot = 1\nport = "many"\n')
    with pytest.raises(ConfigError) as error:
        load_settings([f"--config={path}", "--mdel=x"], {"HEXLLM_SEEED": "1", "HEXLLM_SEED": "-1"})
    lines = str(error.value).split("\n")
    assert lines[0] == "6 settings cannot be used:"
    assert [line.split(" is ")[0] for line in lines[1:]] == [
        "- --mdel on the command line",
        "- HEXLLM_SEEED in the environment",
        f"- prot in {path}",
        "- No model",
        "- HEXLLM_SEED=-1 in the environment",
        f"- port = many in {path}",
    ]
