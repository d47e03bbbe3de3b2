"""From settings to an engine that is ready: plugins, model, programs, then the KV cache."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hexllm.core.errors import CheckpointError, ConfigError
from hexllm.engine.blocks import BlockManager
from hexllm.engine.buckets import Buckets
from hexllm.engine.loop import Engine
from hexllm.engine.messages import EngineInfo, StartProgress
from hexllm.engine.overrides import configure, end_tokens
from hexllm.engine.prefix_cache import make_prefix_cache
from hexllm.engine.programs import Programs
from hexllm.engine.runner import Runner
from hexllm.engine.scheduler import Scheduler
from hexllm.model.loading import init_dummy_params, load_params
from hexllm.model.sharding import make_mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from hexllm.core.checkpoint import Checkpoint
    from hexllm.core.plugins import Plugins
    from hexllm.core.settings import Settings
    from hexllm.engine.buckets import StepShape

logger = logging.getLogger(__name__)

GIB = 1 << 30


def build_engine(
    settings: Settings, plugins: Plugins, report: Callable[[StartProgress], None]
) -> Engine:
    """Load the model, compile its programs and size the KV cache.

    Args:
        settings: What to serve, and how.
        plugins: This process's plugins.
        report: Told how far the start is.

    Raises:
        HexllmError: The model, the settings and the machine do not fit one another.
    """
    _use_compilation_cache(settings.compilation_cache_dir)
    policy = plugins.policies.get(settings.scheduling_policy)
    policy_options = settings.options.get(policy.component.name)
    checkpoint = plugins.open_checkpoint(settings.model, settings.revision, settings.options)
    data = read_config(checkpoint)
    family_entry = plugins.resolve_model_family(data)
    family = family_entry.build(settings.options.get(family_entry.component.name))
    cfg = configure(family, data, checkpoint.uri, settings)
    dtype = _dtype(settings.dtype)
    mesh = make_mesh(settings.tensor_parallel_size)
    # Before the weights are read: it refuses what does not fit together.
    programs = Programs(
        family,
        cfg,
        mesh,
        dtype,
        block_size=settings.block_size,
        num_slots=settings.max_decode_seqs,
        attention_backend=settings.attention_backend,
    )

    if settings.load_format == "dummy":
        params = init_dummy_params(family, cfg, dtype=dtype, mesh=mesh, seed=settings.seed)
    else:
        params = load_params(
            family,
            cfg,
            checkpoint,
            dtype=dtype,
            mesh=mesh,
            progress=lambda done, total, name: report(
                StartProgress("loading weights", done, total, name)
            ),
        )
    jax.block_until_ready(params)
    programs.arrange(params)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    max_model_len = cfg.max_position_embeddings
    buckets = Buckets(settings, max_model_len, settings.block_size)
    shapes = buckets.shapes()
    runner = Runner(programs, params, use_jit=settings.enable_jit)
    num_blocks = settings.num_blocks or _affordable_blocks(settings, runner, shapes, report)
    _check_capacity(settings, num_blocks, max_model_len)
    runner.allocate(num_blocks)
    if settings.warmup:
        runner.warm_up(
            shapes,
            lambda done, total, shape: report(StartProgress("compiling", done, total, shape)),
        )
    blocks = BlockManager(num_blocks, settings.block_size, make_prefix_cache(settings))
    scheduler = Scheduler(
        policy.build(policy_options),
        policy.component.name,
        blocks,
        max_prefill_seqs=buckets.max_prefill_seqs,
        max_prefill_tokens=buckets.max_prefill_tokens,
        max_running_seqs=settings.max_decode_seqs,
        is_chunked=settings.enable_chunked_prefill,
    )
    kv_bytes = num_blocks * runner.bytes_per_block() * mesh.size
    logger.info(
        "Engine ready: %s in %s on %d %s device%s, weights %.2f GiB, KV cache %.2f GiB (%d blocks "
        "of %d tokens, %.1f KiB a token).",
        family_entry.component.name,
        jnp.dtype(dtype).name,
        mesh.size,
        jax.default_backend(),
        "" if mesh.size == 1 else "s",
        weight_bytes / GIB,
        kv_bytes / GIB,
        num_blocks,
        settings.block_size,
        runner.bytes_per_block() * mesh.size / settings.block_size / 1024,
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_running_seqs=settings.max_decode_seqs,
        vocab_size=cfg.vocab_size,
        eos_token_ids=end_tokens(data, _optional_json(checkpoint, "generation_config.json")),
        dtype=jnp.dtype(dtype).name,
        platform=jax.default_backend(),
        family=family_entry.component.name,
        device_memory={"weights": weight_bytes, "kv": kv_bytes},
        manifest=plugins.manifest(),
    )
    return Engine(info, scheduler, blocks, buckets, runner)


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's ``config.json``.

    Raises:
        CheckpointError: It is absent or not a JSON object.
    """
    data = _optional_json(checkpoint, "config.json")
    if data is None:
        raise CheckpointError(
            f"{checkpoint.uri} has no config.json, so it is not a model in Hugging Face's format. "
            f"Give --model a directory, repository or file that holds one."
        )
    return data


def _optional_json(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    path = checkpoint.file(name)
    if path is None:
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not readable as JSON: {error}. Fetch it again."
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__}, not a JSON object.")
    return data


def _dtype(name: str) -> Any:
    """Return the dtype to compute in; ``auto`` is bfloat16 wherever the hardware multiplies it."""
    if name == "auto":
        is_slow = jax.default_backend() == "cpu" and not _cpu_multiplies_bfloat16()
        name = "float32" if is_slow else "bfloat16"
    return jnp.dtype(name)


def _cpu_multiplies_bfloat16() -> bool:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="ascii")
    except OSError:
        return False
    flags = next((line for line in info.splitlines() if line.startswith("flags")), "")
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())


def _use_compilation_cache(directory: Path | None) -> None:
    """Keep compiled programs on disk, so that the next start is quick."""
    if directory is None:
        return
    # JAX's own key does not hold libtpu's version in every release, so the directory does.
    place = Path(directory) / _version_stamp()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            raise PermissionError("not writable")
    except OSError as error:
        logger.warning(
            "No compiled programs are kept: %s cannot be used (%s). Set --compilation_cache_dir.",
            place,
            error,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _version_stamp() -> str:
    from importlib import metadata

    parts = []
    for name in ("jax", "jaxlib", "libtpu"):
        try:
            parts.append(f"{name}-{metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return "_".join(parts)


def _affordable_blocks(
    settings: Settings,
    runner: Runner,
    shapes: list[StepShape],
    report: Callable[[StartProgress], None],
) -> int:
    """Return how many KV blocks the memory left after weights and programs holds."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats is None:  # a CPU: the memory is the whole machine's, so it is taken within a limit
        free = min(_available_host_bytes(), int(settings.cpu_kv_cache_gib * GIB))
        free //= settings.tensor_parallel_size  # CPU devices of one process share its memory
        what = f"--cpu_kv_cache_gib={settings.cpu_kv_cache_gib:g}"
    else:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        if settings.enable_jit:
            # The programs need their share before the cache takes the rest: measure the largest
            # prefill and the largest decode.
            largest = [
                next(s for s in shapes if s.max_query_len > 1),
                next(s for s in shapes if s.max_query_len == 1),
            ]
            needs = []
            for i, shape in enumerate(largest):
                report(StartProgress("measuring memory", i, len(largest), str(shape)))
                needs.append(runner.temporary_bytes(shape, num_blocks=shape.blocks))
            free -= max(needs)
        what = f"{stats['bytes_limit'] / GIB:.1f} GiB of device memory"
    usable = int(free * settings.hbm_utilization_factor)
    num_blocks = usable // runner.bytes_per_block()
    if num_blocks < 1:
        raise ConfigError(
            f"No memory is left for the KV cache: {what} leave {max(free, 0) / GIB:.2f} GiB, and "
            f"hbm_utilization_factor={settings.hbm_utilization_factor} of it holds no block of "
            f"{runner.bytes_per_block() / GIB:.3f} GiB. Use a smaller model, more chips, or a "
            f"smaller --max_model_len or --prefill_len_padding."
        )
    # More than every sequence at its longest can never be used.
    return min(num_blocks, max(shape.blocks for shape in shapes) * settings.max_decode_seqs)


def _available_host_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_capacity(settings: Settings, num_blocks: int, max_model_len: int) -> None:
    """Refuse a cache in which the longest request could never finish."""
    held = num_blocks * settings.block_size
    if held >= max_model_len:
        return
    needed = -(-max_model_len // settings.block_size)
    raise ConfigError(
        f"The KV cache of {num_blocks} blocks holds {held} tokens, fewer than "
        f"max_model_len={max_model_len}. Use --max_model_len={held} or less, or "
        f"--num_blocks={needed} or more"
        + (
            "."
            if settings.num_blocks
            else " (what memory allows; a larger --hbm_utilization_factor, more chips, or on a "
            "CPU --cpu_kv_cache_gib give more)."
        )
    )
