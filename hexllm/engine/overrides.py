"""The model's configuration as its files and the flags that override them say."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import ConfigError
from hexllm.model.hf_config import HfConfig

if TYPE_CHECKING:
    from hexllm.core.settings import Settings
    from hexllm.model.config import ModelConfig
    from hexllm.model.family import DecoderFamily

logger = logging.getLogger(__name__)


def configure(
    family: DecoderFamily, data: Mapping[str, Any], source: str, settings: Settings
) -> ModelConfig:
    """Return the model's configuration under ``--sliding_window`` and ``--max_model_len``.

    Args:
        family: The model's family.
        data: Its ``config.json``.
        source: Where that came from, for messages.
        settings: The flags.

    Raises:
        UnsupportedConfigError: The family cannot honour the file.
        ConfigError: A flag does not fit the model.
    """
    cfg = family.config(HfConfig(data, source))
    if settings.sliding_window is not None:
        cfg = _with_window(family, cfg, data, settings.sliding_window)
    if settings.max_model_len is not None:
        cfg = _with_length(cfg, settings.max_model_len)
    return cfg


def end_tokens(*configs: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the union of ``eos_token_id`` (a number or a list) of several configurations.

    A multimodal model's language model has a configuration of its own under ``text_config``.
    """
    found: set[int] = set()
    for config in configs:
        for part in (config or {}, (config or {}).get("text_config") or {}):
            value = part.get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def _with_window(
    family: DecoderFamily, cfg: ModelConfig, data: Mapping[str, Any], window: int
) -> ModelConfig:
    """Read the configuration again with another window, and check that it came to nothing else."""
    flag = f"sliding_window={window}"
    before = _windows(family, cfg)
    if not any(before):
        raise ConfigError(
            f"{flag} has nothing to override: by its config.json no layer of {cfg.source} "
            f"(family {family.name!r}) has a sliding window. Leave --sliding_window out."
        )
    text = data.get("text_config")
    if isinstance(text, Mapping) and text:
        changed = {**data, "text_config": {**text, "sliding_window": window}}
    else:
        changed = {**data, "sliding_window": window}
    cfg = family.config(HfConfig(changed, cfg.source))
    if _windows(family, cfg) != [old and window for old in before]:
        raise ConfigError(
            f"{flag} cannot be honoured: family {family.name!r} does not take its windows from "
            f"the key sliding_window of {cfg.source}. Leave --sliding_window out."
        )
    return cfg


def _windows(family: DecoderFamily, cfg: ModelConfig) -> list[int | None]:
    return [family.kv_spec(cfg, i).window for i in range(cfg.num_hidden_layers)]


def _with_length(cfg: ModelConfig, max_model_len: int) -> ModelConfig:
    """Serve another length than the file's.

    The rotary embedding stays what the file says: those whose scaling is defined by the model's
    length would become another model with the key in the file changed.
    """
    rope = cfg.rope
    trained = cfg.max_position_embeddings
    reach = max(trained, int(rope.factor * rope.original_max_position_embeddings))
    if max_model_len > reach:
        logger.warning(
            "max_model_len=%d is over what %s is made for (max_position_embeddings=%d): answers "
            "may get worse past %d tokens.",
            max_model_len,
            cfg.source,
            trained,
            reach,
        )
    return dataclasses.replace(cfg, max_position_embeddings=max_model_len)
