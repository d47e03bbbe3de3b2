"""Every setting of hexllm, once: its name, default, range, group and meaning.

Flags, environment variables, configuration files, ``--help`` and ``docs/flags.md`` all come from
here. The names and defaults of the first four groups are those of Hex-LLM's command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from hexllm.core.settings.checks import check_together
from hexllm.core.settings.declare import cache_directory, count, flag, respelt, switch
from hexllm.core.settings.not_yet import NOT_YET
from hexllm.core.settings.plugin_table import PluginSettings

#: Spellings that mean another setting.
ALIASES = {"max_running_seqs": "max_decode_seqs"}


def _model(values: dict[str, Any]) -> Any:
    # Older pydantic asks even where the model is missing, which is then the error that counts.
    return values.get("model")


class Settings(BaseSettings):
    """What a server runs with. Frozen, and pickled to the engine process.

    ``Settings(model=…)`` takes its arguments alone; :func:`hexllm.core.settings.load_settings`
    reads the command line, the environment and the configuration file.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    model: str = flag(
        ...,
        "Model",
        "The model to serve: a local directory or file, a Hugging Face id, or a URI whose scheme "
        "a weight loader provides. AIP_STORAGE_URI where it is not given.",
        "a path, a Hugging Face id or a URI",
        min_length=1,
    )
    tokenizer: str = flag(
        _model,
        "Model",
        "The tokenizer to load, named as a model is.",
        "a path, a Hugging Face id or a URI",
        shown_default="the value of --model",
        min_length=1,
    )
    tokenizer_mode: Literal["auto", "slow"] = flag(
        "auto",
        "Model",
        "auto takes the fast tokenizer where there is one; slow the one written in Python.",
        "auto or slow",
    )
    trust_remote_code: bool = switch(
        False, "Model", "Run a tokenizer's Python code from the model's repository."
    )
    load_format: Literal["auto", "dummy"] = flag(
        "auto",
        "Model",
        "auto reads the checkpoint's weights; dummy draws them at random, for tests.",
        "auto or dummy",
    )
    max_model_len: int | None = flag(
        None,
        "Model",
        "The most tokens of prompt and output together; more needs more memory.",
        "a whole number from 2 up",
        shown_default="from config.json",
        ge=2,
    )
    sliding_window: int | None = flag(
        None,
        "Model",
        "Overrides the window of the layers that have one, in tokens; for experiments, since the "
        "model was trained with its own.",
        "a whole number from 1 up",
        shown_default="from config.json",
        ge=1,
    )
    seed: int = flag(
        0,
        "Model",
        "Seed of every random number generator; a request may bring its own.",
        "a whole number from 0 to 4294967295",
        ge=0,
        lt=2**32,
    )

    num_hosts: int = count(1, "Inference engine", "Hosts to run on.")
    disagg_topo: str | None = flag(
        None,
        "Inference engine",
        "Prefill and decode on workers of their own: 'P,D' is P prefill and D decode workers.",
        "two whole numbers from 1 up with a comma between them, such as 3,1",
        pattern=r"^[1-9][0-9]*,[1-9][0-9]*$",
    )
    data_parallel_size: int = count(
        1, "Inference engine", "Replicas of the model: N serve N times the requests."
    )
    tensor_parallel_size: int = count(
        1, "Inference engine", "Chips that one replica is spread over: more lower the latency."
    )
    worker_distributed_method: Literal["mp", "ray"] = flag(
        "mp",
        "Inference engine",
        "How workers are started: mp (Python's multiprocessing) or ray.",
        "mp or ray",
    )
    enable_jit: bool = switch(
        True, "Inference engine", "Compile the model; without it a start is quick, a token slow."
    )
    warmup: bool = switch(
        True, "Inference engine", "Compile every program before the first request is taken."
    )
    max_prefill_seqs: int = count(
        1, "Inference engine", "The most sequences whose prompts are computed in one step."
    )
    prefill_seqs_padding: int = count(
        8,
        "Inference engine",
        "Prompts in a step are padded to 1, or to this doubled as often as needed.",
    )
    prefill_len_padding: int = count(
        512,
        "Inference engine",
        "Prompt tokens in a step are padded to this doubled as often as needed; the few of short "
        "prompts to a half, a quarter or an eighth of it.",
    )
    max_decode_seqs: int = count(
        256, "Inference engine", "The most sequences that are decoded in one step."
    )
    decode_seqs_padding: int = count(
        8,
        "Inference engine",
        "Decoded sequences in a step are padded to 1, or to this doubled as often as needed.",
    )
    decode_blocks_padding: int = count(
        128,
        "Inference engine",
        "KV blocks of a decoded sequence are padded to this doubled as often as needed.",
    )
    enable_prefix_cache_hbm: bool = switch(
        False,
        "Inference engine",
        "Keep the KV of what has been computed, for prompts that begin alike.",
    )
    prefix_cache_unit: Literal["padding", "block"] = flag(
        "padding",
        "Inference engine",
        "What of a prompt the prefix cache finds: whole multiples of --prefill_len_padding, as in "
        "Hex-LLM, or whole blocks, which is more of it.",
        "padding or block",
    )
    enable_chunked_prefill: bool = switch(
        False, "Inference engine", "Cut long prompts and compute the pieces beside decoding."
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "Inference engine",
        "With --enable_chunked_prefill, the most tokens of a step; more make prompts faster and "
        "gaps between tokens longer.",
        "a whole number above --max_decode_seqs",
        shown_default="768, or --max_decode_seqs and 256 where that is more",
        ge=2,
    )

    hbm_utilization_factor: float = flag(
        0.9,
        "Memory",
        "Share of the memory left after the weights that the KV cache takes.",
        "a number above 0 and up to 1",
        gt=0,
        le=1,
    )
    num_blocks: int | None = flag(
        None,
        "Memory",
        "KV blocks to allocate; when it is given, --hbm_utilization_factor does not matter.",
        "a whole number from 1 up",
        shown_default="from the memory that is left",
        ge=1,
    )
    cpu_kv_cache_gib: float = flag(
        4.0,
        "Memory",
        "On a CPU, the most memory that counts as left for the KV cache, in GiB: it is shared with "
        "everything else on the machine.",
        "a number above 0",
        gt=0,
    )
    block_size: Literal[8, 16, 32, 64, 128, 256, 2048, 8192] = flag(
        32, "Memory", "Tokens in a KV block.", "8, 16, 32, 64, 128, 256, 2048 or 8192"
    )

    enable_lora: bool = switch(False, "Dynamic LoRA", "Load the LoRA adapters that requests name.")
    max_lora_rank: int = count(16, "Dynamic LoRA", "The highest rank an adapter may have.")
    enable_lora_cache: bool = switch(True, "Dynamic LoRA", "Keep fetched adapter files on disk.")
    max_num_mem_cached_lora: int = count(
        16, "Dynamic LoRA", "The most adapters that are kept in device memory."
    )

    host: str = flag(
        "0.0.0.0", "Server", "Address to listen on.", "a host name or an address", min_length=1
    )
    port: int = flag(
        7080,
        "Server",
        "Port to listen on; 0 takes a free one. AIP_HTTP_PORT sets it too.",
        "a whole number from 0 to 65535",
        ge=0,
        le=65535,
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = flag(
        "INFO",
        "Server",
        "The least severe messages to log. HEX_LLM_LOG_LEVEL sets it too.",
        "DEBUG, INFO, WARNING, ERROR or CRITICAL, in either case",
    )
    verbose_log: bool = switch(
        False,
        "Server",
        "Log where each message comes from. HEX_LLM_VERBOSE_LOG sets it too.",
    )
    health_route: str = flag(
        "/ping",
        "Server",
        "Path that answers 200 once requests are served. AIP_HEALTH_ROUTE sets it too.",
        "a path that starts with '/'",
        pattern=r"^/[^\s?#]*$",
    )
    predict_route: str = flag(
        "/generate",
        "Server",
        "Path of Vertex AI's predictions. AIP_PREDICT_ROUTE sets it too.",
        "a path that starts with '/'",
        pattern=r"^/[^\s?#]*$",
    )
    served_model_name: str = flag(
        _model,
        "Server",
        "The model's name in /v1/models and in answers.",
        "a name",
        shown_default="the value of --model",
        min_length=1,
    )
    max_request_bytes: int = flag(
        10 * 1024 * 1024,
        "Server",
        "The largest request body, in bytes; a larger one is answered 413.",
        "a whole number from 1 up",
        ge=1,
    )

    max_queued_requests: int | None = flag(
        1024,
        "Server",
        "The most sequences that wait beside the --max_decode_seqs that run; a request beyond them "
        "is answered 429. 'none' sets no bound.",
        "a whole number from 0 up, or none",
        ge=0,
    )
    request_timeout_seconds: float | None = flag(
        3600.0,
        "Server",
        "The longest a request may take from its arrival to its last token, else it ends with an "
        "error; the default is Vertex AI's limit. 'none' sets no bound.",
        "a number of seconds above 0, or none",
        gt=0,
        allow_inf_nan=False,
    )
    drain_seconds: float = flag(
        25.0,
        "Server",
        "How long running requests may go on after SIGTERM; what is left then ends with an error.",
        "a number of seconds from 0 up",
        ge=0,
        allow_inf_nan=False,
    )
    hung_engine_seconds: float | None = flag(
        120.0,
        "Server",
        "How long an engine with work may end no step before /health and /ping are 503; more than "
        "a compile takes under --no-warmup. 'none' sets no bound.",
        "a number of seconds above 0, or none",
        gt=0,
        allow_inf_nan=False,
    )

    config: Path | None = flag(
        None, "hexllm", "A TOML or YAML file that holds settings by these names.", "a path"
    )
    scheduling_policy: str = flag(
        "fcfs",
        "hexllm",
        "Who is served next; 'hexllm plugins' lists the choices, plugins add more.",
        "the name of a scheduling policy",
        min_length=1,
    )
    dtype: Literal["auto", "bfloat16", "float32"] = flag(
        "auto",
        "hexllm",
        "Number format of weights and KV; auto is bfloat16, or float32 on a CPU that does not "
        "multiply bfloat16; float16 is served as bfloat16, as Hex-LLM did.",
        "auto, bfloat16 or float32",
    )
    attention_backend: Literal["auto", "pallas", "xla"] = flag(
        "auto",
        "hexllm",
        "What computes attention: auto is pallas on a TPU, xla elsewhere; pallas without a TPU is "
        "interpreted, which is right and very slow; xla runs everywhere.",
        "auto, pallas or xla",
    )
    revision: str | None = flag(
        None,
        "hexllm",
        "Branch, tag or commit of --model.",
        "a branch, a tag or a commit",
        shown_default="the default branch",
        min_length=1,
    )
    compilation_cache_dir: Path | None = flag(
        cache_directory,
        "hexllm",
        "Where compiled programs are kept for the next start; 'none' keeps none.",
        "a directory, or none",
        shown_default="~/.cache/hexllm/xla",
    )
    plugins: PluginSettings = PluginSettings()
    options: dict[str, dict[str, Any]] = {}

    @property
    def max_running_seqs(self) -> int:
        """The other name of ``max_decode_seqs``."""
        return self.max_decode_seqs

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read nothing but the arguments: ``load_settings`` brings the other sources."""
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Take the spellings that people use, and no truth value where a number belongs."""
        name = str(info.field_name)
        if isinstance(value, bool) and not isinstance(cls.model_fields[name].default, bool):
            raise PydanticCustomError("truth_value", "not a truth value")
        if not isinstance(value, str):
            return value
        value = value.strip()
        if value.lower() == "none" and is_optional(name):
            return None
        if name in ("compilation_cache_dir", "config"):
            return Path(value).expanduser() if value else None
        return respelt(name, value)

    @field_validator("*", mode="after")
    @classmethod
    def _exists(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what is not built yet: a flag is honoured or refused, never ignored."""
        allowed, _ = NOT_YET.get(str(info.field_name), ((value,), ""))
        if value not in allowed:
            raise PydanticCustomError("not_yet", "not built yet")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        check_together(self)
        return self


def is_optional(name: str) -> bool:
    """Return whether a setting can be unset, which ``none`` does."""
    return type(None) in getattr(Settings.model_fields[name].annotation, "__args__", ())


def is_switch(name: str) -> bool:
    """Return whether a setting is true or false, so that ``--no-<name>`` exists."""
    return Settings.model_fields[name].annotation is bool


def plain(value: Any) -> str:
    """Return a value as a user would write it."""
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
