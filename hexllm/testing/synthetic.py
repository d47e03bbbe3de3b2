"""Checkpoints made up from a family's specs and rules, under a real checkpoint's names."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from hexllm.model.loading import param_specs
from hexllm.model.rules import undo_rules
from hexllm.model.specs import flatten
from hexllm.testing.checkpoints import FilesCheckpoint, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from hexllm.model.config import ModelConfig
    from hexllm.model.family import DecoderFamily
    from hexllm.model.specs import ParamSpec

#: Spread of norms about their neutral weight, and of biases: enough to be missed if left out.
SPREAD = 0.3


def make_value(path: str, spec: ParamSpec) -> np.ndarray:
    """Return a parameter's made-up float32 values.

    They depend on the path and shape only, and on a generator that numpy has frozen, so that a
    stored golden holds on any machine. Matrices keep the spread of what they multiply.
    """
    rng = np.random.RandomState(zlib.crc32(path.encode()))
    values = rng.standard_normal(spec.shape)
    if spec.init == "ones":
        values = 1.0 + SPREAD * values
    elif len(spec.shape) == 1:
        values *= SPREAD
    elif not path.endswith("embed_tokens.weight"):
        values *= 1.5 / np.sqrt(spec.shape[-1])
    return values.astype(np.float32)


def make_tensors(family: DecoderFamily, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Return a whole checkpoint's made-up tensors, by the checkpoint's names."""
    specs = {p: s for p, s in flatten(param_specs(family, cfg)).items() if s.is_loaded}
    arrays = {path: make_value(path, spec) for path, spec in specs.items()}
    return undo_rules(family.all_weight_rules(cfg), arrays)


def write_model(
    family: DecoderFamily, cfg: ModelConfig, config: dict[str, Any], directory: Path
) -> FilesCheckpoint:
    """Write ``config.json`` and made-up weights into ``directory`` and open it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return write_checkpoint(directory, make_tensors(family, cfg))
