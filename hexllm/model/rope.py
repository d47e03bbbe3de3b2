"""Rotary position embeddings. Frequencies are computed in float64, phases and turns in float32.

Phases must never be computed in bfloat16: at position 1,000 its spacing is 4, more than a full
turn of half the dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hexllm.ops.step import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexllm.model.rope_config import RopeConfig


@struct.dataclass
class RotaryStep(Step):
    """A step that carries the rotary tables which its layers share.

    Attributes:
        ropes: Static. The rotary embeddings that there are tables of.
        tables: ``rope_tables`` of each.
    """

    ropes: tuple[RopeConfig, ...] = struct.field(pytree_node=False)  # type: ignore[no-untyped-call]
    tables: tuple[tuple[jax.Array, jax.Array], ...]


def base_inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Return the frequencies before any scaling: [rotary_dim / 2] float64."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    return np.asarray(rope.rope_theta**-exponents)


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Return the frequencies of a type that does not depend on the sequence's length.

    Args:
        rope: Of type default, linear, llama3 or yarn.

    Returns:
        [rotary_dim / 2] float64, in radians a position.
    """
    inv_freq = base_inverse_frequencies(rope)
    if rope.rope_type == "default":
        return inv_freq
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        # Rotations within the original context decide: many stay, few are slowed, a ramp between.
        turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
        width = rope.high_freq_factor - rope.low_freq_factor
        if width == 0:  # Llama-4 Scout's: a step
            return np.where(turns < rope.low_freq_factor, inv_freq / rope.factor, inv_freq)
        ramp = (turns - rope.low_freq_factor) / width
        return _blend(inv_freq / rope.factor, inv_freq, np.clip(ramp, 0, 1))
    if rope.rope_type == "yarn":
        low, high = (_yarn_dim(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.rotary_dim - 1)
        if low == high:
            high += 0.001  # as the reference does, where the ramp would have no width
        slowed = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
        return _blend(inv_freq, inv_freq / rope.factor, slowed)
    raise ValueError(f"The frequencies of rope_type {rope.rope_type!r} depend on the length.")


def _blend(a: np.ndarray, b: np.ndarray, weight_of_b: np.ndarray) -> np.ndarray:
    return np.asarray(a * (1 - weight_of_b) + b * weight_of_b)


def _yarn_dim(rope: RopeConfig, turns: float) -> float:
    """Return the dimension pair that makes ``turns`` rotations in the original context."""
    length = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(length) / (2 * math.log(rope.rope_theta))


def token_seq_lens(step: Step) -> jax.Array:
    """Return the length of each token's own sequence after this step: [T] int32."""
    T = step.positions.shape[0]
    S = step.seq_lens.shape[0]
    seq = jnp.searchsorted(step.query_start_loc[1:], jnp.arange(T), side="right")
    return step.seq_lens[jnp.minimum(seq, S - 1)]


def rope_tables(rope: RopeConfig, step: Step) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines to turn each token by, attention factor included.

    ``dynamic`` and ``longrope`` use the length of the token's own sequence at this step, so that
    what else is in the batch cannot matter.

    Args:
        rope: The rotary embedding.
        step: The batch.

    Returns:
        Two arrays of [T, rotary_dim / 2] float32.
    """
    inv_freq: jax.Array
    if rope.rope_type == "longrope":
        unscaled = base_inverse_frequencies(rope)
        short, long = (
            jnp.asarray(unscaled / np.asarray(factor), jnp.float32)
            for factor in (rope.short_factor, rope.long_factor)
        )
        is_long = token_seq_lens(step) > rope.original_max_position_embeddings
        inv_freq = jnp.where(is_long[:, None], long, short)  # [T, rotary_dim / 2]
    elif rope.rope_type == "dynamic":
        limit = rope.max_position_embeddings
        length = jnp.maximum(token_seq_lens(step), limit).astype(jnp.float32)
        growth = rope.factor * length / limit - (rope.factor - 1)  # [T], 1 up to the limit
        # theta grows by growth ** (dim / (dim - 2)); a power of growth alone keeps float32 exact
        # where nothing is stretched.
        exponents = np.arange(0, rope.rotary_dim, 2) / (rope.rotary_dim - 2)
        base = jnp.asarray(base_inverse_frequencies(rope), jnp.float32)
        inv_freq = base * growth[:, None] ** jnp.asarray(-exponents, jnp.float32)
    else:
        inv_freq = jnp.asarray(inverse_frequencies(rope), jnp.float32)
    phases = step.positions.astype(jnp.float32)[:, None] * inv_freq  # [T, rotary_dim / 2]
    return jnp.cos(phases) * rope.attention_factor, jnp.sin(phases) * rope.attention_factor


def share_tables(ropes: Sequence[RopeConfig], step: Step) -> RotaryStep:
    """Compute the tables of ``ropes`` once, for all the layers of a step.

    Left to itself XLA's CPU back end fuses cosines and sines into each place that uses them and
    computes them again for every head of every layer: a prefill of 256 tokens through 30 layers
    spent 64 ms on it, and 7 ms this way. It ignores optimization_barrier; a conditional it cannot
    see through is the boundary that holds.

    Args:
        ropes: The rotary embeddings of the model's layers; doubles are computed once.
        step: The batch.
    """
    ropes = tuple(dict.fromkeys(ropes))

    def compute(step: Step) -> Any:
        return tuple(rope_tables(rope, step) for rope in ropes)

    def zeros(step: Step) -> Any:
        return jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), jax.eval_shape(compute, step))

    tables = jax.lax.cond(step.num_seqs >= 0, compute, zeros, step)
    fields = {f.name: getattr(step, f.name) for f in dataclasses.fields(Step)}
    return RotaryStep(**fields, ropes=ropes, tables=tables)


def shared_tables(rope: RopeConfig, step: Step) -> tuple[jax.Array, jax.Array]:
    """Return the tables that the step carries, computed here when it carries none of ``rope``."""
    if isinstance(step, RotaryStep) and rope in step.ropes:
        return step.tables[step.ropes.index(rope)]
    return rope_tables(rope, step)


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, is_interleaved: bool = False
) -> jax.Array:
    """Turn each head by its token's position, in float32.

    Args:
        x: [T, heads, H]; the first rotary_dim of H are turned, dimension i with
            i + rotary_dim / 2, as Hugging Face lays them out.
        cos: [T, rotary_dim / 2].
        sin: [T, rotary_dim / 2].
        is_interleaved: Whether dimension 2i is turned with 2i + 1 instead; all of H, then.

    Returns:
        [T, heads, H] in x's dtype.
    """
    if is_interleaved:
        pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]  # [T, heads, H / 2]
        cos, sin = cos[:, None], sin[:, None]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return turned.reshape(x.shape).astype(x.dtype)
    half = cos.shape[-1]
    a = x[..., :half].astype(jnp.float32)
    b = x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, rotary_dim / 2]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
