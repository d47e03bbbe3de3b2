"""Reads the many spellings of a rotary embedding in ``config.json`` into one frozen record.

transformers 4 wrote ``rope_scaling`` beside ``rope_theta``; transformers 5 writes
``rope_parameters`` with everything inside. Files of both kinds, and mixtures, are served.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hexllm.model.hf_config import HfConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding, every default resolved.

    Attributes:
        rope_type: One of ROPE_TYPES.
        rope_theta: The base.
        rotary_dim: How many of a head's dimensions are rotated (the first ones); even.
        max_position_embeddings: Where ``dynamic`` begins to stretch.
        factor: Stretch of the context; 1 for ``default``.
        original_max_position_embeddings: Context of the first training (llama3, yarn, longrope).
        attention_factor: Factor on cos and sin (yarn, longrope), so squared on the scores.
        low_freq_factor: llama3.
        high_freq_factor: llama3.
        beta_fast: yarn.
        beta_slow: yarn.
        truncate: yarn; whether the ramp's ends are rounded to whole dimensions.
        short_factor: longrope, [rotary_dim / 2]; for sequences within the original context.
        long_factor: longrope, [rotary_dim / 2]; for longer ones.
        is_interleaved: Whether neighbouring dimensions are turned together (``rotate``).
    """

    rope_type: str
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_interleaved: bool = False


def read_rope(
    hf: HfConfig,
    *,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float = 10_000.0,
    is_partial: bool = False,
    layer_type: str | None = None,
    theta_key: str = "rope_theta",
    is_scaled: bool = True,
    aliases: Mapping[str, str] | None = None,
) -> RopeConfig:
    """Read a model's rotary embedding as transformers 5 would.

    Args:
        hf: The model's ``config.json``.
        head_dim: H.
        max_position_embeddings: As read from the file.
        default_theta: The family's ``rope_theta`` when the file has none.
        is_partial: Whether the family implements a ``partial_rotary_factor`` other than 1.
        layer_type: Of a model whose layers differ: ``rope_parameters`` may have a mapping of this
            name for each kind of layer.
        theta_key: The key of ``rope_theta`` for these layers in files of transformers 4.
        is_scaled: Whether ``rope_scaling`` of such files holds for these layers.
        aliases: The family's own names of rotary types.

    Raises:
        UnsupportedConfigError: An unknown ``rope_type``, a missing or wrong parameter, or two
            spellings that contradict each other.
    """
    where, rope = _section(hf, layer_type, is_scaled)
    rope_type = "default" if rope is None else _rope_type(rope, aliases or {})
    outer_theta = hf.number(theta_key, None, above=1.0)
    inner_theta = None if rope is None else rope.number("rope_theta", None, above=1.0)
    rope_theta = inner_theta or outer_theta or default_theta

    partial = hf.number("partial_rotary_factor", None)
    at = hf
    if rope is not None and (own := rope.number("partial_rotary_factor", None)) is not None:
        partial, at = own, rope
    partial = 1.0 if partial is None else partial
    if partial != 1.0 and not is_partial:
        at.refuse("partial_rotary_factor", "this family rotates whole heads.")
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        at.refuse("partial_rotary_factor", f"of head_dim={head_dim} it leaves {rotary_dim}.")

    config: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": rope_theta,
        "rotary_dim": rotary_dim,
        "max_position_embeddings": max_position_embeddings,
    }
    if rope is None or rope_type == "default":
        return RopeConfig(**config)
    if rope_type in ("llama3", "yarn", "longrope"):
        # transformers lets the outer spelling (Phi-3's) win.
        inner = rope.integer("original_max_position_embeddings", None)
        outer = hf.integer("original_max_position_embeddings", None)
        config["original_max_position_embeddings"] = outer or inner or max_position_embeddings
    if rope_type in ("linear", "dynamic", "llama3"):
        config["factor"] = rope.number("factor")
        if rope_type == "dynamic" and rotary_dim == 2:
            hf.refuse(where, "dynamic scaling needs at least 4 rotated dimensions.")
    if rope_type == "llama3":
        low = config["low_freq_factor"] = rope.number("low_freq_factor")
        config["high_freq_factor"] = rope.number("high_freq_factor")
        if config["high_freq_factor"] < low:
            rope.refuse("high_freq_factor", f"it must not be under low_freq_factor={low:g}.")
    if rope_type == "yarn":
        config |= _yarn(rope, config)
    if rope_type == "longrope":
        config |= _longrope(rope, config)
    return RopeConfig(**config)


def _section(hf: HfConfig, layer_type: str | None, is_scaled: bool) -> tuple[str, HfConfig | None]:
    old, new = hf.section("rope_scaling"), hf.section("rope_parameters")
    if new is not None and layer_type is not None and layer_type in new:
        new = new.section(layer_type)
    if old is not None and new is not None and is_scaled and old.raw() != new.raw():
        hf.refuse("rope_scaling", "rope_parameters says otherwise; keep one of the two.")
    if old is not None and new is not None:
        for key in old.raw():  # the same values: reading one spelling reads both
            old.get(key)
    if new is not None or not is_scaled:
        return "rope_parameters", new
    return "rope_scaling", old


def _rope_type(rope: HfConfig, aliases: Mapping[str, str]) -> str:
    key = "rope_type" if "rope_type" in rope else "type"
    rope_type = rope.text(key, "default")
    if rope.text("type", rope_type) != rope_type:
        rope.refuse("type", f"rope_type={rope_type!r} says otherwise; keep one of the two.")
    known = aliases.get(rope_type, rope_type)
    if known not in ROPE_TYPES:
        rope.refuse(key, f"known types are {', '.join(ROPE_TYPES)}.")
    return str(known)


def _yarn(rope: HfConfig, config: dict[str, Any]) -> dict[str, Any]:
    original = config["original_max_position_embeddings"]
    factor = rope.number("factor", None) or config["max_position_embeddings"] / original
    rope.get("finetuned")  # a note on how the first YaRN checkpoints were trained

    def magnitude(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    # null and 0 mean "not given" in transformers, where both weights must be given to count.
    weight = rope.number("mscale", None, above=-1.0)
    weight_all = rope.number("mscale_all_dim", None, above=-1.0)
    attention_factor = rope.number("attention_factor", None)
    if attention_factor is None:
        attention_factor = magnitude()
        if weight and weight_all:
            attention_factor = magnitude(weight) / magnitude(weight_all)
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": rope.number("beta_fast", None) or 32.0,
        "beta_slow": rope.number("beta_slow", None) or 1.0,
        "truncate": rope.boolean("truncate", True),
    }


def _longrope(rope: HfConfig, config: dict[str, Any]) -> dict[str, Any]:
    original = config["original_max_position_embeddings"]
    factor = rope.number("factor", None) or config["max_position_embeddings"] / original
    attention_factor = rope.number("attention_factor", None)
    if attention_factor is None:
        attention_factor = 1.0
        if factor > 1:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {key: rope.numbers(key) for key in ("short_factor", "long_factor")}
    for key, values in factors.items():
        if len(values) != config["rotary_dim"] // 2:
            rope.refuse(key, f"{config['rotary_dim'] // 2} numbers are needed.")
    return {"factor": factor, "attention_factor": attention_factor, **factors}
