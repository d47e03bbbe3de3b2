"""Next tokens from logits: one graph for every mix of greedy, masked and seeded rows.

What no row of a batch needs is skipped inside the graph (``lax.cond``), so a batch of greedy
requests pays for an argmax only, and nothing is ever compiled for a new mix.

A draw depends on its own row's logits, settings, seed and position, and on nothing else: not on
the other rows, nor on the batch's size. Replays and preempted requests repeat themselves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from hexllm.ops import platform
from hexllm.ops.gumbel import gumbel_noise, row_keys
from hexllm.ops.sampling_candidates import find_candidates, likeliest_tokens
from hexllm.ops.sampling_mask import MaskRows, below_max, keeps
from hexllm.ops.sampling_search import thresholds_by_bisection
from hexllm.ops.sampling_shards import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = jax.Array | np.ndarray

#: How many of the likeliest tokens are reported at a position (OpenAI's limit).
NUM_TOP_LOGPROBS = 20


class RowParams(Protocol):
    """What sampling reads of a request (``hexllm.engine.messages.SamplingParams`` has it)."""

    @property
    def temperature(self) -> float:
        """0 is greedy."""

    @property
    def top_k(self) -> int:
        """0 keeps all, 1 is greedy."""

    @property
    def top_p(self) -> float:
        """1 keeps all."""

    @property
    def min_p(self) -> float:
        """0 keeps all."""

    @property
    def seed(self) -> int:
        """32 bits count."""

    @property
    def mask_unscaled(self) -> bool:
        """Whether masks look at the logits before the temperature divides them."""

    @property
    def logprobs(self) -> int | None:
        """None reports nothing."""


@struct.dataclass
class SamplingRows:
    """How each of S rows is sampled.

    Attributes:
        temperature: [S] float32; 0 is greedy.
        top_k: [S] int32. Keep the k likeliest tokens, and those as likely as the k-th; 0 keeps
            all; 1 is greedy.
        top_p: [S] float32. Of what top-k leaves, keep the smallest set of likeliest tokens that
            holds this share of the probability, and those as likely as its last; 1 keeps all.
        min_p: [S] float32. Keep tokens at least this likely relative to the likeliest; 0 keeps
            all.
        seed: [S] uint32.
        position: [S] int32, of the token being sampled in its sequence.
        mask_unscaled: [S] bool. Hex-LLM's order: the masks look at the logits before the
            temperature divides them; OpenAI's (False) is after.
        wants_logprobs: [S] bool.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    position: Array
    mask_unscaled: Array
    wants_logprobs: Array


@struct.dataclass
class Sampled:
    """What was sampled in S rows. Log-probabilities are zeros where no row asked for any.

    Attributes:
        tokens: [S] int32.
        logprobs: [S] float32, each token's under the raw logits (before temperature and masks).
        top_tokens: [S, 20] int32, the likeliest tokens, best first, of equals the lower id first.
        top_logprobs: [S, 20] float32, theirs; -inf past the end of a smaller vocabulary.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def rows_from_params(
    params: Sequence[RowParams], positions: Sequence[int], size: int
) -> SamplingRows:
    """Return the rows of a batch as numpy arrays; padding rows are greedy.

    Args:
        params: One a row.
        positions: Of the token that each row samples.
        size: S, at least ``len(params)``.

    Raises:
        ValueError: If there are more rows than ``size`` or not one position a row.
    """
    if len(params) > size or len(params) != len(positions):
        raise ValueError(f"{len(params)} rows and {len(positions)} positions for {size} rows")
    padding = size - len(params)

    def column(values: list[float], fill: float, dtype: type) -> np.ndarray:
        return np.array(values + [fill] * padding, dtype)

    return SamplingRows(
        temperature=column([p.temperature for p in params], 0, np.float32),
        top_k=column([p.top_k for p in params], 0, np.int32),
        top_p=column([p.top_p for p in params], 1, np.float32),
        min_p=column([p.min_p for p in params], 0, np.float32),
        seed=column([p.seed & 0xFFFFFFFF for p in params], 0, np.uint32),
        position=column(list(positions), 0, np.int32),
        mask_unscaled=column([p.mask_unscaled for p in params], 0, np.bool_),
        wants_logprobs=column([p.logprobs is not None for p in params], 0, np.bool_),
    )


def sample(logits: jax.Array, rows: SamplingRows, vocab_size: int | None = None) -> Sampled:
    """Choose each row's next token.

    On a mesh (``platform.traced_for``) the logits are taken as dealt out over the vocabulary, and
    stay where they are: the tokens are the same for every number of devices.

    Args:
        logits: [S, V] float32. A row may hold infinities; tokens at -inf are never drawn while
            another is left.
        rows: Of S rows.
        vocab_size: How many of the V columns are tokens, if not all are: those after them are
            padding, neither drawn nor reported.

    Returns:
        The tokens, and log-probabilities if any row wants them.
    """
    shards = platform.tensor_shards()
    width = -(-logits.shape[1] // shards)
    vocabulary = Vocabulary(vocab_size or logits.shape[1], width, shards, platform.TENSOR_AXIS)
    if shards == 1:
        return _sample_part(logits, rows, vocabulary)
    padding = width * shards - logits.shape[1]
    logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    sampled: Sampled = jax.shard_map(
        functools.partial(_sample_part, vocabulary=vocabulary),
        mesh=platform.mesh(),
        in_specs=(PartitionSpec(None, platform.TENSOR_AXIS), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,  # every part ends with the same: all exchanges are with all
    )(logits, jax.tree.map(jnp.asarray, rows))
    return sampled


def _sample_part(logits: jax.Array, rows: SamplingRows, vocabulary: Vocabulary) -> Sampled:
    """Choose each row's next token, given one device's part [S, W] of the logits."""
    if vocabulary.is_padded:
        logits = jnp.where(vocabulary.ids() < vocabulary.size, logits, -jnp.inf)
    likeliest, peak = vocabulary.best(logits, vocabulary.ids())
    is_drawn = drawn_rows(rows)
    tokens: jax.Array = _cond(
        "draw",
        jnp.any(is_drawn),
        lambda: jnp.where(
            is_drawn, _draw(logits, peak[:, None], is_drawn, rows, vocabulary), likeliest
        ),
        lambda: likeliest,
    )
    return _with_logprobs(logits, peak[:, None], tokens, rows, vocabulary)


def drawn_rows(rows: SamplingRows) -> jax.Array:
    """Return which rows are drawn at random, [S] bool; the others are greedy."""
    return jnp.asarray((rows.temperature > 0) & (rows.top_k != 1))


def mask_rows(rows: SamplingRows) -> MaskRows:
    """Return the masks of the rows, greedy rows without any."""
    is_drawn = drawn_rows(rows)
    return MaskRows(
        top_k=jnp.where(is_drawn, rows.top_k, 0),
        top_p=jnp.where(is_drawn, rows.top_p, 1.0),
        min_p=jnp.where(is_drawn, jnp.minimum(rows.min_p, 1.0), 0.0),
        temperature=jnp.where(is_drawn & ~rows.mask_unscaled, rows.temperature, 1.0),
    )


def _draw(
    logits: jax.Array,
    peak: jax.Array,
    is_drawn: jax.Array,
    rows: SamplingRows,
    vocabulary: Vocabulary,
) -> jax.Array:
    """Return a token drawn in each row, [S] int32; greedy rows hold nothing of use."""
    masks = mask_rows(rows)
    has_mask = masks.limits_count(vocabulary.size) | masks.limits_mass() | (masks.min_p > 0)
    keys = row_keys(jnp.asarray(rows.seed), jnp.asarray(rows.position))
    temperature = jnp.where(is_drawn, rows.temperature, 1.0)[:, None]

    def race(values: jax.Array, ids: jax.Array, threshold: jax.Array | None) -> jax.Array:
        """Draw among [S, M] tokens: the largest of logit / temperature + Gumbel noise."""
        scores = below_max(values, peak) / temperature + gumbel_noise(keys, ids)
        left = ids < vocabulary.size
        if threshold is not None:
            left &= keeps(values, peak, threshold, masks)
        return vocabulary.best(jnp.where(left, scores, -jnp.inf), ids)[0]

    def draw_masked() -> jax.Array:
        candidates, threshold, is_settled = find_candidates(logits, peak, masks, vocabulary)
        threshold = _cond(
            "search",
            jnp.any(has_mask & ~is_settled),
            lambda: jnp.where(
                is_settled, threshold, thresholds_by_bisection(logits, peak, masks, vocabulary)
            ),
            lambda: threshold,
        )
        drawn: jax.Array = _cond(
            "few",
            jnp.all(is_settled | ~is_drawn),
            lambda: race(candidates.values, candidates.ids, threshold),
            lambda: race(logits, vocabulary.ids(), threshold),
        )
        return drawn

    drawn: jax.Array = _cond(
        "masks",
        jnp.any(has_mask),
        draw_masked,
        lambda: race(logits, vocabulary.ids(), None),
    )
    return drawn


def _with_logprobs(
    logits: jax.Array,
    peak: jax.Array,
    tokens: jax.Array,
    rows: SamplingRows,
    vocabulary: Vocabulary,
) -> Sampled:
    """Return the tokens with their log-probabilities, if any row wants them."""
    S, _ = logits.shape

    def report() -> Sampled:
        # exp(-inf - -inf) is no number: a row without a finite peak is measured from 0.
        base = jnp.where(jnp.isfinite(peak), peak, 0.0)
        mass = vocabulary.summed(jnp.exp(logits - base).sum(axis=1, keepdims=True))
        norm = base + jnp.log(mass)
        own = vocabulary.at(logits, tokens)[:, None]
        values, ids = likeliest_tokens(logits, NUM_TOP_LOGPROBS, vocabulary)
        return Sampled(
            tokens=tokens,
            logprobs=(own - norm)[:, 0],
            top_tokens=ids,
            top_logprobs=jnp.where(jnp.isneginf(values), values, values - norm),
        )

    def nothing() -> Sampled:
        return Sampled(
            tokens=tokens,
            logprobs=jnp.zeros(S, jnp.float32),
            top_tokens=jnp.zeros((S, NUM_TOP_LOGPROBS), jnp.int32),
            top_logprobs=jnp.zeros((S, NUM_TOP_LOGPROBS), jnp.float32),
        )

    sampled: Sampled = _cond("report", jnp.any(rows.wants_logprobs), report, nothing)
    return sampled


def _cond(
    name: str, is_true: jax.Array, then: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    """Run one of two, under a name by which estimates find it in the compiled program."""
    with jax.named_scope(name):
        return jax.lax.cond(is_true, then, otherwise)
