"""Hex-LLM's command line (COMPATIBILITY 1.1, 1.2, 1.9), as hexllm takes it."""

import pickle
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hexllm.core.errors import ConfigError
from hexllm.core.settings import Settings, load_settings
from hexllm.core.settings.not_yet import NOT_YET

# name, default, another value as written, that value as read
ROWS = [
    ("model", "org/name", "gs://b/m", "gs://b/m"),
    ("tokenizer", "org/name", "org/other", "org/other"),
    ("tokenizer_mode", "auto", "slow", "slow"),
    ("trust_remote_code", False, "true", True),
    ("load_format", "auto", "dummy", "dummy"),
    ("max_model_len", None, "4096", 4096),
    ("sliding_window", None, "2048", 2048),
    ("seed", 0, "7", 7),
    ("num_hosts", 1, "4", 4),
    ("disagg_topo", None, "3,1", "3,1"),
    ("data_parallel_size", 1, "2", 2),
    ("tensor_parallel_size", 1, "4", 4),
    ("worker_distributed_method", "mp", "ray", "ray"),
    ("enable_jit", True, "false", False),
    ("warmup", True, "false", False),
    ("max_prefill_seqs", 1, "4", 4),
    ("prefill_seqs_padding", 8, "2", 2),
    ("prefill_len_padding", 512, "128", 128),
    ("max_decode_seqs", 256, "512", 512),
    ("decode_seqs_padding", 8, "128", 128),
    ("decode_blocks_padding", 128, "16", 16),
    ("enable_prefix_cache_hbm", False, "true", True),
    ("prefix_cache_unit", "padding", "block", "block"),
    ("enable_chunked_prefill", False, "true", True),
    ("max_num_batched_tokens", None, None, None),
    ("hbm_utilization_factor", 0.9, "0.45", 0.45),
    ("cpu_kv_cache_gib", 4.0, "1.5", 1.5),
    ("num_blocks", None, "1000", 1000),
    ("block_size", 32, "2048", 2048),
    ("enable_lora", False, "true", True),
    ("max_lora_rank", 16, "64", 64),
    ("enable_lora_cache", True, "false", False),
    ("max_num_mem_cached_lora", 16, "4", 4),
    ("host", "0.0.0.0", "127.0.0.1", "127.0.0.1"),
    ("port", 7080, "8080", 8080),
    ("log_level", "INFO", "DEBUG", "DEBUG"),
    ("verbose_log", False, "true", True),
    ("health_route", "/ping", "/health", "/health"),
    ("predict_route", "/generate", "/predict", "/predict"),
    ("served_model_name", "org/name", "mine", "mine"),
    ("max_request_bytes", 10 * 1024 * 1024, "1000", 1000),
    ("max_queued_requests", 1024, "0", 0),
    ("request_timeout_seconds", 3600.0, "1.5", 1.5),
    ("drain_seconds", 25.0, "0", 0.0),
    ("hung_engine_seconds", 120.0, "30", 30.0),
    ("config", None, None, None),
    ("scheduling_policy", "fcfs", "fair@hexllm-fair", "fair@hexllm-fair"),
    ("dtype", "auto", "float32", "float32"),
    ("attention_backend", "auto", "xla", "xla"),
    ("revision", None, "main", "main"),
    ("compilation_cache_dir", None, "/tmp/x", Path("/tmp/x")),
]
SWITCHES = [name for name, default, *_ in ROWS if isinstance(default, bool)]


def load(*argv: str, **environ: str) -> Settings:
    named = any(word.startswith("--model") for word in argv)
    return load_settings([*argv] if named else ["--model=org/name", *argv], environ)


def works_today(name: str, value: object) -> bool:
    return name not in NOT_YET or value in NOT_YET[name][0]


def test_the_table_above_is_complete():
    assert {name for name, *_ in ROWS} == set(Settings.model_fields) - {"plugins", "options"}
    assert set(NOT_YET) <= set(Settings.model_fields)


@pytest.mark.parametrize(("name", "default"), [row[:2] for row in ROWS])
def test_default(name, default, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("HEXLLM_CACHE", raising=False)
    if name == "compilation_cache_dir":
        default = Path("/cache/hexllm/xla")
    assert getattr(load(), name) == default


@pytest.mark.parametrize(
    ("name", "written", "value", "form"),
    [
        (name, written, value, form)
        for name, _, written, value in ROWS
        for form in ("equals", "space", "dashes")
        # A switch's value is joined by '='.
        if written is not None and not (form == "space" and name in SWITCHES)
    ],
)
def test_a_value_is_taken_or_refused_as_not_built_yet(name, written, value, form):
    flag = name.replace("_", "-") if form == "dashes" else name
    argv = [f"--{flag}", written] if form == "space" else [f"--{flag}={written}"]
    if works_today(name, value):
        assert getattr(load(*argv), name) == value
    else:
        with pytest.raises(ConfigError, match=f"^--{flag}={written} .* is not possible yet: "):
            load(*argv)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_has_its_forms(name):
    dashed = name.replace("_", "-")
    for value, forms in {
        True: [f"--{name}", f"--{dashed}", f"--{name}=true", f"--{name}=True", f"--{name}=1"],
        False: [f"--no-{name}", f"--no_{name}", f"--no-{dashed}", f"--{name}=false"],
    }.items():
        for form in forms:
            if works_today(name, value):
                assert getattr(load(form), name) is value, form
            else:
                with pytest.raises(ConfigError, match="is not possible yet"):
                    load(form)


def test_both_spellings_of_max_decode_seqs():
    for flag in ("max_decode_seqs", "max_running_seqs", "max-running-seqs"):
        settings = load(f"--{flag}=12")
        assert settings.max_decode_seqs == settings.max_running_seqs == 12
    assert load("--max_decode_seqs=1", "--max_running_seqs=2").max_decode_seqs == 2


def test_a_repeated_flag_counts_the_last_time_and_a_list_grows():
    assert load("--port=1", "--port=2").port == 2
    settings = load("--plugins.load=a,b", "--plugins.load=c")
    assert settings.plugins.load == ("a", "b", "c")


def test_values_that_look_like_flags_or_hold_an_equals_sign():
    assert load("--model=gs://b/m=1").model == "gs://b/m=1"
    assert load("--model", "-x").model == "-x"


@pytest.mark.parametrize("written", ["info", "Info", "INFO"])
def test_log_level_in_any_case(written):
    assert load(f"--log_level={written}").log_level == "INFO"


def test_log_level_synonyms_of_the_logging_module():
    assert load("--log_level=warn").log_level == "WARNING"
    assert load("--log_level=fatal").log_level == "CRITICAL"
    assert load("--log_level=notset").log_level == "DEBUG"


def test_float16_is_bfloat16_and_said(caplog):
    assert load("--dtype=float16").dtype == "bfloat16"
    assert "dtype=float16 is served as bfloat16" in caplog.text
    caplog.clear()
    assert load("--dtype=bfloat16").dtype == "bfloat16"
    assert not caplog.text


def test_none_unsets_what_can_be_unset():
    for word in ("none", "None"):
        assert load(f"--max_model_len={word}", f"--disagg_topo={word}").max_model_len is None
        assert load(f"--compilation_cache_dir={word}").compilation_cache_dir is None
    assert load("--compilation_cache_dir=").compilation_cache_dir is None
    with pytest.raises(ConfigError, match="--port=none"):
        load("--port=none")


def test_a_cache_directory_in_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HEXLLM_CACHE", raising=False)
    assert load().compilation_cache_dir == Path("/home/me/.cache/hexllm/xla")
    assert load("--compilation_cache_dir=~/x").compilation_cache_dir == Path("/home/me/x")
    monkeypatch.setenv("HEXLLM_CACHE", "~/own")
    assert load().compilation_cache_dir == Path("/home/me/own/xla")


LLAMA_NOTEBOOK = "--host=0.0.0.0 --port=7080 --model={} --data_parallel_size=1"
# Source -> the command line's words, and the settings that hexllm refuses so far.
NOTEBOOKS = {
    "page: multi-host": (
        LLAMA_NOTEBOOK.format("meta-llama/Meta-Llama-3.1-70B")
        + " --tensor_parallel_size=16 --num_hosts=4 --hbm_utilization_factor=0.9",
        {"num_hosts"},
    ),
    "page: disaggregated": (
        LLAMA_NOTEBOOK.format("meta-llama/Llama-3.1-8B")
        + " --tensor_parallel_size=2 --disagg_topo=3,1 --hbm_utilization_factor=0.9",
        {"disagg_topo"},
    ),
    "page: prefix cache": (
        LLAMA_NOTEBOOK.format("meta-llama/Llama-3.1-8B")
        + " --tensor_parallel_size=4 --hbm_utilization_factor=0.9 --enable_prefix_cache_hbm",
        {"enable_prefix_cache_hbm"},
    ),
    "page: chunked prefill": (
        LLAMA_NOTEBOOK.format("meta-llama/Llama-3.1-8B")
        + " --tensor_parallel_size=4 --hbm_utilization_factor=0.9 --enable_chunked_prefill",
        {"enable_chunked_prefill"},
    ),
    "page: Gemma 2": (
        "--model=google/gemma-2-9b-it --tensor_parallel_size=4 --hbm_utilization_factor=0.8 "
        "--max_running_seqs=512",
        set(),
    ),
    "page: tuning": (
        "--model=meta-llama/Llama-3.1-8B-Instruct --tensor_parallel_size=4 --max_model_len=4096 "
        "--hbm_utilization_factor=0.95",
        set(),
    ),
    "page: tuning, as its missing backslash leaves it": (
        "--model=meta-llama/Llama-3.1-8B-Instruct --tensor_parallel_size=4 --max_model_len=4096",
        set(),
    ),
    "page: 70B AWQ": (
        "--model=hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4 --tensor_parallel_size=4 "
        "--max_model_len=4096 --hbm_utilization_factor=0.45",
        set(),
    ),
    "Llama 3.2 1B": (
        LLAMA_NOTEBOOK.format("gs://vertex-model-garden/llama3.2/Llama-3.2-1B")
        + " --tensor_parallel_size=1 --num_hosts=1 --hbm_utilization_factor=0.8 "
        "--max_running_seqs=256 --max_model_len=4096",
        set(),
    ),
    "Llama 3.2 1B, prefix cache": (
        LLAMA_NOTEBOOK.format("meta-llama/Llama-3.2-1B")
        + " --tensor_parallel_size=1 --num_hosts=1 --hbm_utilization_factor=0.8 "
        "--max_running_seqs=256 --max_model_len=4096 --enable_prefix_cache_hbm",
        {"enable_prefix_cache_hbm"},
    ),
    "Gemma 2B": (
        LLAMA_NOTEBOOK.format("google/gemma-1.1-2b-it")
        + " --tensor_parallel_size=1 --num_hosts=1 --hbm_utilization_factor=0.6 "
        "--max_running_seqs=256 --max_model_len=4096",
        set(),
    ),
    "Gemma 2, June 2024": (
        "--host=0.0.0.0 --port=7080 --log_level=INFO --enable_jit --model=google/gemma-2-2b "
        "--load_format=auto --tensor_parallel_size=1 --hbm_utilization_factor=0.6",
        set(),
    ),
    "CodeGemma 2B on 4 chips": (
        "--host=0.0.0.0 --port=7080 --model=google/codegemma-2b --data_parallel_size=2 "
        "--tensor_parallel_size=2 --num_hosts=1 --hbm_utilization_factor=0.6 "
        "--max_running_seqs=256 --max_model_len=4096 --enable_prefix_cache_hbm",
        {"data_parallel_size", "enable_prefix_cache_hbm"},
    ),
    "Llama 3.1 70B": (
        LLAMA_NOTEBOOK.format("meta-llama/Meta-Llama-3.1-70B-Instruct")
        + " --tensor_parallel_size=16 --num_hosts=4 --hbm_utilization_factor=0.8 "
        "--max_running_seqs=256 --max_model_len=4096",
        {"num_hosts"},
    ),
    "Llama 4 Scout": (
        LLAMA_NOTEBOOK.format("meta-llama/Llama-4-Scout-17B-16E-Instruct")
        + " --tensor_parallel_size=16 --num_hosts=4 --hbm_utilization_factor=0.85 "
        "--max_running_seqs=256 --max_model_len=8192 --decode_seqs_padding=128",
        {"num_hosts"},
    ),
    "Phi-3 mini-4k": (
        LLAMA_NOTEBOOK.format("microsoft/Phi-3-mini-4k-instruct")
        + " --tensor_parallel_size=1 --num_hosts=1 --hbm_utilization_factor=0.8 "
        "--max_running_seqs=256 --max_model_len=4096",
        set(),
    ),
    "Phi-3 medium-128k, with the notebook's slip": (
        LLAMA_NOTEBOOK.format("microsoft/Phi-3-medium-128k-instruct")
        + " --tensor_parallel_size=4 --num_hosts=4 --hbm_utilization_factor=0.8 "
        "--max_running_seqs=256 --max_model_len=131072",
        {"num_hosts"},
    ),
    "Phi-4": (
        LLAMA_NOTEBOOK.format("microsoft/phi-4")
        + " --tensor_parallel_size=4 --num_hosts=1 --hbm_utilization_factor=0.85 "
        "--max_running_seqs=256 --max_model_len=16384",
        set(),
    ),
    "Qwen2.5 1.5B": (
        LLAMA_NOTEBOOK.format("Qwen/Qwen2.5-1.5B")
        + " --tensor_parallel_size=1 --num_hosts=1 --hbm_utilization_factor=0.8 "
        "--max_running_seqs=256 --max_model_len=8192",
        set(),
    ),
    "Qwen2.5 32B AWQ": (
        LLAMA_NOTEBOOK.format("Qwen/Qwen2.5-32B-Instruct-AWQ")
        + " --tensor_parallel_size=4 --num_hosts=4 --hbm_utilization_factor=0.8 "
        "--max_running_seqs=256 --max_model_len=131072",
        {"num_hosts"},
    ),
    "a benchmark's local server": (
        "--model=org/name --prefill-len-padding 512 --max-decode-seqs 64 --no-warmup",
        set(),
    ),
}
VERTEX = {
    "PJRT_DEVICE": "TPU",
    "MODEL_ID": "google/gemma-2-9b-it",
    "DEPLOY_SOURCE": "notebook",
    "HEX_LLM_LOG_LEVEL": "info",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "AIP_HTTP_PORT": "7080",
    "AIP_HEALTH_ROUTE": "/ping",
    "AIP_PREDICT_ROUTE": "/generate",
    "AIP_STORAGE_URI": "",
    "AIP_MODE": "PREDICTION",
}


@pytest.mark.parametrize("source", NOTEBOOKS)
def test_documented_command_line(source):
    line, refused = NOTEBOOKS[source]
    # Deleting a row of NOT_YET opens these command lines without an edit here.
    refused = refused & set(NOT_YET)
    if not refused:
        settings = load_settings(line.split(), VERTEX)
        assert f"--model={settings.model}" in line
        assert (settings.port, settings.health_route) == (7080, "/ping")
        return
    with pytest.raises(ConfigError) as error:
        load_settings(line.split(), VERTEX)
    sentences = [part for part in str(error.value).split("\n") if "settings cannot" not in part]
    assert {s.lstrip("- ").removeprefix("-").split("=")[0].split()[0] for s in sentences} == refused
    assert all("is not possible yet" in sentence for sentence in sentences)


def test_the_first_generation_command_line_is_refused_with_its_successors():
    line = (
        "--host=0.0.0.0 --port=7080 --model=llama2 --tensor_parallel_size=1 --log_level=INFO "
        "--num_nodes=1 --use_ray --batch_mode=continuous --max_num_batched_tokens=11264 "
        "--tokens_pad_multiple=1024 --seqs_pad_multiple 32 --load_format=pt"
    )
    with pytest.raises(ConfigError) as error:
        load_settings(line.split(), {})
    lines = str(error.value).split("\n")
    assert lines[0] == "6 settings cannot be used:"
    for flag, advice in {
        "num_nodes": "--num_hosts",
        "use_ray": "Leave it out",
        "batch_mode": "always continuous",
        "tokens_pad_multiple": "--prefill_len_padding",
        "seqs_pad_multiple": "--decode_seqs_padding",
        "load_format=pt": "Convert the checkpoint",
    }.items():
        assert [line for line in lines if line.startswith(f"- --{flag} ") and advice in line], flag


def test_a_step_budget_belongs_to_chunked_prefill_and_leaves_room_for_prompts():
    chunked = "--enable_chunked_prefill"
    assert load(chunked).max_num_batched_tokens is None
    assert load(chunked, "--max_num_batched_tokens=257").max_num_batched_tokens == 257
    with pytest.raises(ConfigError, match=r"=11264 bounds .* Add --enable_chunked_prefill"):
        load("--max_num_batched_tokens=11264")
    with pytest.raises(ConfigError, match=r"=256 leaves no room .* max_decode_seqs=256"):
        load(chunked, "--max_num_batched_tokens=256")


def test_settings_are_frozen_and_pickle():
    settings = load("--plugins.disable=a", "--options.fair.weight=3", "--port=1")
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.options == {"fair": {"weight": "3"}}
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 2
    with pytest.raises(ValueError, match="frozen"):
        settings.plugins.strict = True


def test_the_constructor_reads_nothing_but_its_arguments(monkeypatch):
    monkeypatch.setenv("HEXLLM_PORT", "1")
    monkeypatch.setenv("PORT", "2")
    monkeypatch.setenv("AIP_HTTP_PORT", "3")
    assert Settings(model="x").port == 7080


def test_the_process_s_own_words_and_environment_are_the_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hexllm", "--model=x"])
    monkeypatch.setenv("HEXLLM_PORT", "1")
    settings = load_settings()
    assert (settings.model, settings.port) == ("x", 1)


def test_help_names_every_flag_and_exits_with_0(capsys):
    for word in ("--help", "-h"):
        with pytest.raises(SystemExit) as end:
            load_settings([word], {})
        assert end.value.code == 0
        text = capsys.readouterr().out
        words = text.replace("=", " ").replace(",", " ").split()
        for name in Settings.model_fields:
            if name not in ("plugins", "options"):
                assert f"--{name}" in words
        for name in SWITCHES:
            assert f"--no-{name}" in words
        assert "--max_running_seqs" in words
        assert "--plugins.strict" in words
        assert " ".join(text.split()).count("[not yet]") == len(NOT_YET) + 1
        assert max(map(len, text.splitlines())) <= 100


def test_import_is_light():
    code = (
        "import sys, hexllm.core.settings as s\n"
        "s.load_settings(['--model=x'], {})\n"
        "heavy = 'jax numpy flax transformers fastapi uvicorn yaml tomllib difflib torch'.split()\n"
        "print(*(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")


@pytest.fixture
def server_main(monkeypatch):
    calls = []

    def main(argv):
        calls.append(argv)
        return 3

    module = types.ModuleType("hexllm.server.main")
    module.main = main
    monkeypatch.setitem(sys.modules, "hexllm.server.main", module)
    return calls


def test_the_retired_container_s_command_starts_the_server(server_main, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["api_server.py", "--model=x"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("hex_llm.server.api_server", run_name="__main__")
    assert end.value.code == 3
    assert server_main == [["--model=x"]]


def test_a_spawned_engine_process_does_not_start_the_server_again(server_main):
    runpy.run_module("hex_llm.server.api_server", run_name="__mp_main__")
    assert server_main == []


def test_serve_help_needs_neither_the_server_nor_jax():
    code = (
        "import sys\n"
        "from hexllm.cli import main\n"
        "try:\n"
        "    status = main(['serve', '--help'])\n"
        "except SystemExit as end:\n"
        "    status = end.code\n"
        "heavy = [name for name in ('jax', 'fastapi', 'transformers') if name in sys.modules]\n"
        "print(status, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("usage: hexllm serve --model=MODEL")
    assert (done.stdout.splitlines()[-1], done.stderr) == ("0 []", "")
