"""Writes ``docs/models.md`` from the registry: which models are served, and the chips each needs.

``python -m docs.models_page docs/models.md`` writes the page. Everything is computed from the specs
of each model's family; nothing is allocated.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.real_models import MODELS, RealModel
from hexllm.core.plugins import load_plugins
from hexllm.core.settings import PluginSettings
from hexllm.model.hf_config import HfConfig
from hexllm.plan import memory
from hexllm.plan.memory import GIB

if TYPE_CHECKING:
    from hexllm.core.plugins import Plugins

#: Usable memory of a chip, in bytes: its HBM, less a tenth and 1 GiB for programs and activations.
CHIPS = {"v5e": 16, "v6e": 32, "v5p": 95}
COUNTS = (1, 4, 8, 16, 32, 64, 128)
#: The load that fits beside the weights.
SEQS, LENGTH = 8, 8192

HEAD = """\
# Models

<!-- Written by `python -m docs.models_page docs/models.md`; do not edit. -->

## Families

A checkpoint is served by the family that claims the architecture in its `config.json`. Every
family reads plain safetensors, and refuses a configuration or tensor that it does not implement.
More can be installed: [plugins.md](plugins.md).

| family | architectures | models |
|---|---|---|
"""

CHIPS_HEAD = """
## Chips

How many chips a model needs, by memory: weights and the KV cache of 8 sequences of 8,192 tokens
(or the model's own limit, if that is less) in nine tenths of each chip's HBM less 1 GiB. Each
cell is v5e / v6e / v5p (16, 32 and 95 GiB a chip), out of 1, 4, 8, 16, 32, 64 or 128 chips that
divide the query heads; where they do not divide the KV heads, each of these is kept as often as
makes it so, which is how Hex-LLM served Phi-3 medium's 10 heads on 4 chips. Windows are not
counted (every layer keeps all tokens), nor is padding. A dash: no such number of chips holds it.

**These figures are computed from the models' shapes; they were not run on a TPU**, and hexllm
serves bfloat16 on the devices of one host so far (`--tensor_parallel_size`): int8, int4 and more
hosts are what to plan with, not what works today. `hexllm plan` compiles a model's real step for a
topology and says more. int8 has a scale for each row, int4 (AWQ) a scale and zero point for 128
values; embeddings, heads, norms and routers stay in bfloat16, and so does the KV cache. Of
multimodal models the language model counts.

| model | parameters | bf16 GiB | KV GiB | bf16 | int8 | int4 |
|---|---|---|---|---|---|---|
"""


@functools.cache
def _plugins() -> Plugins:
    return load_plugins(PluginSettings())


def family_and_config(model: RealModel) -> tuple[Any, Any]:
    """Return a model's family, from the registry, and its configuration, as the family reads it."""
    family = _plugins().resolve_model_family(model.config).build({})
    return family, family.config(HfConfig(model.config, model.name))


def count_parameters(model: RealModel) -> int:
    """Return how many numbers a model's checkpoint holds."""
    return memory.count_parameters(*family_and_config(model))


def weight_bytes(model: RealModel, kind: str) -> float:
    """Return the bytes of a model's weights, stored as ``bf16``, ``int8`` or ``int4``."""
    return memory.weight_bytes(*family_and_config(model), kind)


def kv_bytes(model: RealModel) -> int:
    """Return the bytes of the KV cache of the load, in bfloat16."""
    family, cfg = family_and_config(model)
    return memory.kv_bytes(family, cfg, SEQS, min(LENGTH, cfg.max_position_embeddings))


def chips(model: RealModel, kind: str, hbm_gib: int) -> int | None:
    """Return the fewest chips that hold weights and cache; None when no count in COUNTS does."""
    _, cfg = family_and_config(model)
    room = (0.9 * hbm_gib - 1) * GIB
    for count in COUNTS:
        copies = memory.kv_copies(cfg.num_attention_heads, cfg.num_key_value_heads, count)
        if copies is None:
            continue
        if (weight_bytes(model, kind) + copies * kv_bytes(model)) / count <= room:
            return count
    return None


def page() -> str:
    """Return ``docs/models.md``."""
    families = [
        f"| `{entry.component.name}` | {', '.join(f'`{a}`' for a in entry.component.provides)} "
        f"| {entry.component.summary} |\n"
        for entry in sorted(_plugins().families, key=lambda entry: entry.component.name)
    ]
    rows = []
    for model in MODELS:
        cells = [
            " / ".join(str(chips(model, kind, hbm) or "–") for hbm in CHIPS.values())
            for kind in ("bf16", "int8", "int4")
        ]
        count = f"{count_parameters(model) / 1e9:.3g} B"
        sizes = [f"{n / GIB:.1f}" for n in (weight_bytes(model, "bf16"), kv_bytes(model))]
        rows.append(f"| {' | '.join([model.name, count, *sizes, *cells])} |\n")
    return HEAD + "".join(families) + CHIPS_HEAD + "".join(rows)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
