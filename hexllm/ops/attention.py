"""Ragged paged attention: the public front and the plain reference.

The form of the cache says what attends to it (``is_tiled``): Pallas's kernels for TPUs, or XLA.
Over a mesh, each device writes and attends to its own heads.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from hexllm.ops import attention_pallas_tpu, attention_xla, platform
from hexllm.ops.kv_cache import TiledKV

if TYPE_CHECKING:
    from collections.abc import Collection

    from jax.typing import DTypeLike

    from hexllm.ops.kv_cache import LayerKV
    from hexllm.ops.step import Step

logger = logging.getLogger(__name__)


def attend_reference(
    q: jax.Array,
    kv: LayerKV,
    step: Step,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
) -> jax.Array:
    """Attend each token to its own sequence's cache, in the plainest form; the oracle.

    Args:
        q: [T, N, H].
        kv: The cache with this step's keys and values written.
        step: The batch.
        scale: Factor on the scores.
        window: A token sees itself and the ``window - 1`` tokens before it; None sees all.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        chunk: Positions are cut into chunks of so many tokens, and a token sees its own only.

    Returns:
        [T, N, H] in q's dtype; padding tokens hold zeros.
    """
    T, N, H = q.shape
    P, K = kv.block_size, kv.num_kv_heads
    B = step.block_tables.shape[1]
    token = jnp.arange(T)
    seq = jnp.searchsorted(step.query_start_loc[1:], token, side="right")  # [T]
    valid = token < step.query_start_loc[-1]
    tables = step.block_tables[jnp.minimum(seq, step.block_tables.shape[0] - 1)]  # [T, B]
    k, v = (x.reshape(K, T, B * P, H).astype(jnp.float32) for x in kv.gather(tables))
    grouped = q.reshape(T, K, N // K, H).astype(jnp.float32)
    scores = jnp.einsum("tkgh,ktch->tkgc", grouped, k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    at = jnp.arange(B * P)
    seen = at[None] <= step.positions[:, None]  # [T, B * P]
    if window is not None:
        seen &= at[None] > step.positions[:, None] - window
    if chunk is not None:
        seen &= at[None] // chunk == step.positions[:, None] // chunk
    scores = jnp.where(seen[:, None, None], scores, -math.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("tkgc,ktch->tkgh", weights, v, precision="highest").reshape(T, N, H)
    return jnp.where(valid[:, None, None], out, 0).astype(q.dtype)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: LayerKV,
    step: Step,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, LayerKV]:
    """Write the step's keys and values into the cache and attend to it.

    Args:
        q: [T, N, H].
        k: [T, K, H].
        v: [T, K, H].
        kv: This layer's cache.
        step: The batch.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.
        window: A token sees itself and the ``window - 1`` tokens before it; None sees all.
        softcap: Gemma-2's cap on the scores; None for none.
        chunk: Llama-4's local attention: positions are cut into chunks of so many tokens, and a
            token sees those of its own up to itself; None for none.

    Returns:
        [T, N, H] in q's dtype (what padding tokens hold is not specified), and the new cache.
    """
    options = {"scale": scale, "window": window, "softcap": softcap, "chunk": chunk}
    mesh = platform.mesh()
    if mesh is None or platform.tensor_shards() == 1:
        return _write_and_attend(q, k, v, kv, step, **options)
    heads, caches = PartitionSpec(None, platform.TENSOR_AXIS), kv.partition()  # type: ignore[no-untyped-call]
    spread = jax.shard_map(
        lambda q, k, v, kv, step: _write_and_attend(q, k, v, kv, step, **options),
        mesh=mesh,
        in_specs=(heads, heads, heads, caches, PartitionSpec()),  # type: ignore[no-untyped-call]
        out_specs=(heads, caches),
        check_vma=False,  # Pallas calls do not say over which axes their results vary
    )
    out, kv = spread(q, k, v, kv, step)
    return out, kv


def _write_and_attend(
    q: jax.Array, k: jax.Array, v: jax.Array, kv: LayerKV, step: Step, **options: Any
) -> tuple[jax.Array, LayerKV]:
    """Do what ``attend`` does with the heads of one shard."""
    kv = kv.write(k, v, step.slot_mapping)
    if isinstance(kv, TiledKV):
        chip = platform.device_kind()
        try:
            attention_pallas_tpu.check(kv, q.shape, step, chip)
        except NotImplementedError as why:
            logger.warning("Attention falls back to plain XLA: %s.", why)
        else:
            form = attention_pallas_tpu.ragged
            if step.max_query_len == 1:
                form = attention_pallas_tpu.decode
            interpret = platform.platform() != "tpu" and pltpu.InterpretParams()
            return form(q, kv, step, chip=chip, interpret=interpret, **options), kv
    plain = attention_xla.decode if step.max_query_len == 1 else attention_xla.ragged
    return plain(q, kv, step, **options), kv


#: Values of ``--attention_backend``.
BACKENDS = ("auto", "pallas", "xla")


def is_tiled(
    backend: str, *, block_size: int, head_dims: Collection[int], dtype: DTypeLike
) -> bool:
    """Return whether caches take the Pallas kernels' form, which decides what attends to them.

    Args:
        backend: One of ``BACKENDS``. ``auto`` is the Pallas kernels on a TPU where they take the
            model, plain XLA elsewhere; ``pallas`` without a TPU interprets them, slowly.
        block_size: P.
        head_dims: H of every layer.
        dtype: Of the cache.

    Raises:
        NotImplementedError: ``pallas`` is asked for and does not take the model; with the reason.
    """
    if backend == "xla" or (backend == "auto" and platform.platform() != "tpu"):
        return False
    try:
        for head_dim in head_dims:
            attention_pallas_tpu.check_cache(block_size, head_dim, dtype, platform.device_kind())
    except NotImplementedError as why:
        if backend == "pallas":
            raise
        logger.warning("Attention is plain XLA's, not Pallas's: %s.", why)
        return False
    return True
