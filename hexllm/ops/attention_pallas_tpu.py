"""Ragged paged attention for TPUs, in Pallas, over a :class:`~hexllm.ops.kv_cache.TiledKV`.

Two kernels. ``decode`` takes one token a sequence: a grid step is a sequence, whose blocks are
copied from HBM while the ones before are multiplied. ``ragged`` takes any mix of prefill and
decode: a grid step is a tile of queries of one KV head, which walks the sequences that it holds;
a sequence with a row or a few in the tile is computed for those 16 rows alone. Both keep a running
softmax (Milakov and Gimelshein 2018), start the copies of the next piece, of the next sequence or
tile if need be, before they compute the present one, and read no block that no query sees.

Tokens of the present step are in the cache already: XLA's scatter writes them in place before.

Rules that the kernels keep: shapes of values and not of references are changed, so that they run
in Pallas's interpreter of TPUs; what lies behind a sequence's end in a copied block is masked in
values too, since it may be anything; a sequence has its own sums, so that nothing of a neighbour,
an infinity least of all, reaches it. How long they take and how that was found out is in
docs/design/kernels.md.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hexllm.ops.kv_cache import LANES, head_lanes, value_lane

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.typing import DTypeLike

    from hexllm.ops.kv_cache import TiledKV
    from hexllm.ops.step import Step

MIB = 1 << 20
_MASKED = -1e30  # finite, so that a row that sees nothing of a piece stays a number
_MOST_PAGE_TOKENS = 256
_SMALL_ROWS = 16  # a tile of bfloat16 has so many sublanes

#: Block tables live in scalar memory, a megabyte on every chip, with the lengths beside them.
MAX_TABLE_ENTRIES = 160 * 1024
#: A small limit leaves VMEM to the weights that XLA fetches ahead while attention runs.
DECODE_VMEM_BYTES = 16 * MIB
RAGGED_VMEM_BYTES = 32 * MIB
#: What the two buffers of keys and values may take.
_BUFFER_BYTES = 4 * MIB
#: Chips whose one device is two cores.
_TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
_WITHOUT_FLOAT8 = ("TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p")


@dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    Attributes:
        pages: Blocks of the cache that are copied and multiplied together.
        rows: Queries a tile (``ragged``).
        heads: KV heads a grid step (``decode``).
        cores: Cores that share the grid.
    """

    pages: int
    rows: int
    heads: int
    cores: int


def tiling(kv: TiledKV, num_tokens: int, num_heads: int, table_width: int, chip: str) -> Tiling:
    """Return how to cut attention for these shapes.

    Pieces of 512 tokens pay for a copy's start and a product's latency on every chip tried; they
    shrink where the buffers would grow past their share of VMEM. Tiles of 512 queries, for up to
    eight query heads a KV head, halve what smaller ones cost on v6e; on v5e both are bound by the
    matrix units.

    Args:
        kv: The cache.
        num_tokens: T.
        num_heads: N.
        table_width: B.
        chip: JAX's name of the chip.
    """
    P, K = kv.block_size, kv.num_kv_heads
    heads = next(n for n in range(min(8, K), 0, -1) if K % n == 0)
    row_bytes = heads * head_lanes(kv.head_dim) * kv.pool.dtype.itemsize
    tokens = 512
    while tokens > LANES and 2 * tokens * row_bytes > _BUFFER_BYTES:
        tokens //= 2
    width = -(-table_width * P // LANES) * LANES
    pages = max(1, min(tokens, width) // P)
    rows = 512
    tiles_a_row = num_heads // K * max(1, value_lane(kv.head_dim) // LANES)
    while rows > _SMALL_ROWS and (rows * tiles_a_row > 4096 or rows >= 2 * num_tokens):
        rows //= 2
    return Tiling(pages, rows, heads, 2 if chip in _TWO_CORES else 1)


def check_cache(block_size: int, head_dim: int, dtype: DTypeLike, chip: str) -> None:
    """Say why the kernels do not take such a cache.

    Raises:
        NotImplementedError: With the reason.
    """
    P, stored = block_size, jnp.dtype(dtype)
    if P < 8 or P & (P - 1):
        raise NotImplementedError(f"block_size={P} is not a power of 2 from 8 up")
    if stored.itemsize == 1 and P < 32:
        raise NotImplementedError(f"block_size={P} is under 32, with a cache of {stored.name}")
    if head_dim > 2 * LANES:
        raise NotImplementedError(f"head_dim={head_dim} is over {2 * LANES}")
    if stored.name.startswith("float8") and chip in _WITHOUT_FLOAT8:
        raise NotImplementedError(f"{chip} has no {stored.name}")


def check(kv: TiledKV, q_shape: tuple[int, ...], step: Step, chip: str) -> None:
    """Say why the kernels do not take these shapes.

    Raises:
        NotImplementedError: With the reason.
    """
    check_cache(kv.block_size, kv.head_dim, kv.pool.dtype, chip)
    S, B = step.block_tables.shape
    B *= _pages_a_block(kv)
    if step.max_query_len > 1 and S * B > MAX_TABLE_ENTRIES:
        raise NotImplementedError(
            f"{S} sequences of {B} blocks have more table entries than the "
            f"{MAX_TABLE_ENTRIES} that scalar memory holds"
        )


@dataclass(frozen=True)
class _Mask:
    """What a query sees, and how scores become weights: ``2 ** ((score - peak) * factor)``.

    Attributes:
        scale: On the scores.
        window: See ``attend``.
        chunk: See ``attend``.
        softcap: See ``attend``.
    """

    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None

    def first_seen(self, position: jax.Array) -> jax.Array:
        """Return the first position that the scalar ``position`` sees."""
        first = jnp.int32(0)
        if self.window is not None:
            first = jnp.maximum(first, position - self.window + 1)
        if self.chunk is not None:
            first = jnp.maximum(first, lax.div(position, self.chunk) * self.chunk)
        return first

    def rows_first_seen(self, lowest: jax.Array, positions: jax.Array) -> jax.Array | None:
        """Return the same for a vector of positions from ``lowest`` on; None is all of them.

        There is no division of integer vectors: chunks are counted from that of ``lowest``, where
        a float32 is exact enough.
        """
        first: jax.Array | None = None
        if self.window is not None:
            first = positions - (self.window - 1)
        if self.chunk is not None:
            start = lax.div(jnp.maximum(lowest, 0), self.chunk) * self.chunk
            chunks = (positions - start).astype(jnp.float32) + 0.5
            crossed = jnp.floor(chunks * (1.0 / self.chunk)).astype(jnp.int32)
            begun = start + crossed * self.chunk
            first = begun if first is None else jnp.maximum(first, begun)
        return first

    def capped(self, scores: jax.Array, k_scale: jax.Array | None) -> jax.Array:
        """Return raw products as the scores that ``weight`` takes."""
        if k_scale is not None:
            scores = scores * k_scale
        if self.softcap is not None:
            scores = jnp.tanh(scores * (self.scale / self.softcap))
        return scores

    def weight(self, below_peak: jax.Array) -> jax.Array:
        """Return a softmax weight from a score less its row's largest."""
        factor = self.scale if self.softcap is None else self.softcap
        return jnp.exp2(below_peak * (factor * math.log2(math.e)))


def _product(a: jax.Array, b: jax.Array, *, is_transposed: bool = False) -> jax.Array:
    """Return a @ b, or a @ b.T, in float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if is_transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


@dataclass(frozen=True)
class _Copies:
    """Brings pieces of up to ``pages`` blocks into one of two buffers."""

    tables: Any
    pool: Any
    buffer: Any
    semaphore: Any
    pages: int
    lanes: int
    is_whole_row: bool

    def _page(self, entry: jax.Array, lane: jax.Array, slot: jax.Array, p: Any) -> Any:
        page = self.pool.at[self.tables[entry + p]]
        if not self.is_whole_row:
            page = page.at[:, pl.ds(pl.multiple_of(lane, LANES), self.lanes)]
        return pltpu.make_async_copy(page, self.buffer.at[slot, p], self.semaphore.at[slot])

    def start_first(self, entry: jax.Array, count: jax.Array, lane: jax.Array) -> None:
        """Do as ``start`` for the very first piece: in few instructions, not in little time."""
        slot = jnp.int32(0)
        count = jnp.minimum(count, self.pages)
        _repeat(count, lambda p: self._page(entry, lane, slot, p).start())

    def start(self, entry: jax.Array, count: jax.Array, lane: jax.Array, slot: jax.Array) -> None:
        """Start the copies of blocks ``tables[entry:entry + count]``, at most ``pages``."""

        @pl.when(count >= self.pages)
        def _() -> None:
            for p in range(self.pages):
                self._page(entry, lane, slot, p).start()

        @pl.when(count < self.pages)
        def _() -> None:
            _repeat(count, lambda p: self._page(entry, lane, slot, p).start())

    def wait(self, count: jax.Array, slot: jax.Array) -> None:
        """Wait for as many."""

        @pl.when(count >= self.pages)
        def _() -> None:
            # One wait for the bytes of all: a semaphore counts bytes.
            all_pages = self.buffer.at[slot]
            pltpu.make_async_copy(all_pages, all_pages, self.semaphore.at[slot]).wait()

        @pl.when(count < self.pages)
        def _() -> None:
            page = self.buffer.at[slot, 0]
            one = pltpu.make_async_copy(page, page, self.semaphore.at[slot])
            _repeat(count, lambda p: one.wait())


def _repeat(count: jax.Array, do: Callable[[jax.Array], None]) -> None:
    def body(p: jax.Array, carry: int) -> int:
        do(p)
        return carry

    lax.fori_loop(0, count, body, 0)


def _keys_and_values(
    piece: jax.Array, head: int, head_dim: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Return a head's keys and values [C, W] of a piece [pages, P, lanes].

    Heads that share a tile of lanes give the whole tile twice: zeros of the query blot out the
    value's lanes, and the key's lanes of the result are cut off afterwards.
    """
    pages, P, _ = piece.shape
    at, lanes = value_lane(head_dim), head_lanes(head_dim)
    rows = piece[:, :, head * lanes : (head + 1) * lanes].reshape(pages * P, lanes).astype(dtype)
    if at % LANES:
        return rows, rows
    return rows[:, :at], rows[:, at:]


def _decode_kernel(
    lens: Any,
    num_seqs: Any,
    tables: Any,
    scales: Any,
    q_ref: Any,
    pool: Any,
    o_ref: Any,
    buffer: Any,
    semaphore: Any,
    state: Any,
    *,
    mask: _Mask,
    tile: Tiling,
    table_width: int,
    head_dim: int,
    num_groups: int,
    is_scaled: bool,
) -> None:
    """Attend one sequence's token with ``tile.heads`` KV heads; see ``decode``."""
    core, i, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    seqs_a_core = pl.num_programs(1)
    seq = core * seqs_a_core + i
    end_seq = jnp.minimum(num_seqs[0], (core + 1) * seqs_a_core)
    pages, P = tile.pages, buffer.shape[2]
    C, lanes = pages * P, tile.heads * head_lanes(head_dim)
    copies = _Copies(tables, pool, buffer, semaphore, pages, lanes, num_groups == 1)

    def first_page(s: jax.Array) -> jax.Array:
        return lax.div(mask.first_seen(lens[s] - 1), P)

    def count(s: jax.Array, piece: jax.Array) -> jax.Array:
        return lax.div(lens[s] + (P - 1), P) - first_page(s) - piece * pages

    def where(
        s: jax.Array, g: jax.Array, piece: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return a piece's entry in the tables, its number of blocks, and its first lane."""
        return s * table_width + first_page(s) + piece * pages, count(s, piece), g * lanes

    @pl.when((i == 0) & (group == 0))
    def _() -> None:
        state[0] = 0

        @pl.when(seq < end_seq)
        def _() -> None:
            copies.start_first(*where(seq, group, jnp.int32(0)))

    @pl.when(seq >= end_seq)
    def _() -> None:
        o_ref[...] = jnp.zeros_like(o_ref)

    @pl.when(seq < end_seq)
    def _() -> None:
        length, base = lens[seq], first_page(seq) * P
        num_pieces = lax.div(length - base + (C - 1), C)
        q = q_ref[0]
        G, W = q.shape[1:]

        def body(piece: jax.Array, carry: Any) -> Any:
            slot = state[0]
            is_last = piece == num_pieces - 1
            is_next_seq = is_last & (group == num_groups - 1)
            next_seq = jnp.where(is_next_seq, seq + 1, seq)
            next_group = jnp.where(is_last, jnp.where(is_next_seq, 0, group + 1), group)

            @pl.when(next_seq < end_seq)
            def _() -> None:
                next_piece = jnp.where(is_last, 0, piece + 1)
                copies.start(*where(next_seq, next_group, next_piece), 1 - slot)

            copies.wait(count(seq, piece), slot)
            state[0] = 1 - slot
            at = base + piece * C
            column = at + lax.broadcasted_iota(jnp.int32, (1, C), 1)
            seen = column < length
            if mask.window is not None or mask.chunk is not None:
                seen &= column >= mask.first_seen(length - 1)
            exists = lax.broadcasted_iota(jnp.int32, (C, 1), 0) < length - at
            sums = []
            for h in range(tile.heads):
                peak, total, out = carry[h]
                k, v = _keys_and_values(buffer[slot], h, head_dim, q.dtype)
                v = jnp.where(exists, v, 0)
                k_scale = scales[group * tile.heads + h] if is_scaled else None
                scores = mask.capped(_product(q[h], k, is_transposed=True), k_scale)
                scores = jnp.where(seen, scores, _MASKED)
                new_peak = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
                weights = mask.weight(scores - new_peak)
                shrink = mask.weight(peak - new_peak)
                total = shrink * total + weights.sum(axis=1, keepdims=True)
                out = shrink * out + _product(weights.astype(q.dtype), v)
                sums.append((new_peak, total, out))
            return tuple(sums)

        column = jnp.full((G, 1), _MASKED, jnp.float32), jnp.zeros((G, 1), jnp.float32)
        empty = (*column, jnp.zeros((G, W), jnp.float32))
        sums = lax.fori_loop(0, num_pieces, body, (empty,) * tile.heads)
        for h, (_, total, out) in enumerate(sums):
            if is_scaled:
                out = out * scales[num_groups * tile.heads + group * tile.heads + h]
            o_ref[0, h] = (out / total).astype(o_ref.dtype)


def _pages_a_block(kv: TiledKV) -> int:
    """Return in how many pages of the kernels a block is cut."""
    return max(1, kv.block_size // _MOST_PAGE_TOKENS)


def _paged(kv: TiledKV, tables: jax.Array) -> tuple[TiledKV, jax.Array]:
    """Return the cache and the tables with blocks cut into pages that the buffers hold."""
    pages = _pages_a_block(kv)
    if pages == 1:
        return kv, tables
    pool = kv.pool.reshape(-1, _MOST_PAGE_TOKENS, kv.pool.shape[2])
    entries = tables[:, :, None] * pages + jnp.arange(pages, dtype=tables.dtype)
    paged: TiledKV = kv.replace(pool=pool)  # type: ignore[attr-defined]
    return paged, entries.reshape(tables.shape[0], -1)


def _compute_dtype(q: jax.Array, kv: TiledKV) -> Any:
    """Return what products are made in: float32 only if neither side is less."""
    both = q.dtype == jnp.float32 and kv.pool.dtype == jnp.float32
    return jnp.float32 if both else jnp.bfloat16


def _scalars(kv: TiledKV) -> jax.Array:
    """Return the scales as scalar memory takes them, [2 K]; a placeholder without any."""
    return jnp.zeros(1, jnp.float32) if kv.scales is None else kv.scales.reshape(-1)


def _padded_lanes(q: jax.Array, head_dim: int) -> jax.Array:
    """Return q [..., H] padded with zeros to W lanes."""
    width = max(value_lane(head_dim), LANES)
    return jnp.pad(q, ((0, 0),) * (q.ndim - 1) + ((0, width - q.shape[-1]),))


def _value_lanes(out: jax.Array, head_dim: int) -> jax.Array:
    """Return the H lanes of the kernels' output [..., W] that hold the result."""
    at = value_lane(head_dim) % LANES
    return out[..., at : at + head_dim]


def decode(
    q: jax.Array,
    kv: TiledKV,
    step: Step,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
    chip: str,
    interpret: Any = False,
) -> jax.Array:
    """Attend one token a sequence; arguments and result as ``attend_reference``.

    Args:
        q: [S, N, H].
        kv: The cache.
        step: The batch.
        scale: As there.
        window: As there.
        softcap: As there.
        chunk: As there.
        chip: JAX's name of the chip.
        interpret: False, or ``pltpu.InterpretParams`` to run without a TPU.
    """
    S, N, H = q.shape
    kv, tables = _paged(kv, step.block_tables)
    K, B = kv.num_kv_heads, tables.shape[1]
    tile = tiling(kv, S, N, B, chip)
    G, num_groups = N // K, K // tile.heads
    dtype = _compute_dtype(q, kv)
    grouped = _padded_lanes(q.astype(dtype), H).reshape(S, K, G, -1)
    W = grouped.shape[-1]
    kernel = functools.partial(
        _decode_kernel,
        mask=_Mask(scale, window, chunk, softcap),
        tile=tile,
        table_width=B,
        head_dim=H,
        num_groups=num_groups,
        is_scaled=kv.scales is not None,
    )
    # Scalar memory holds the tables of so many sequences at a time.
    most = max(tile.cores, MAX_TABLE_ENTRIES // B // tile.cores * tile.cores)
    outs = []
    for begin in range(0, S, most):
        part = slice(begin, min(begin + most, S))
        seqs = part.stop - begin
        a_core = -(-seqs // tile.cores)
        spare = a_core * tile.cores - seqs  # so that cores have as many each

        def at(c: Any, i: Any, g: Any, *_: Any, a_core: int = a_core) -> Any:
            return c * a_core + i, g, 0, 0

        block = pl.BlockSpec((1, tile.heads, G, W), at)
        outs.append(
            pl.pallas_call(
                kernel,
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=4,
                    grid=(tile.cores, a_core, num_groups),
                    in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
                    out_specs=block,
                    scratch_shapes=[
                        pltpu.VMEM(
                            (2, tile.pages, kv.block_size, tile.heads * head_lanes(H)),
                            kv.pool.dtype,
                        ),
                        pltpu.SemaphoreType.DMA((2,)),
                        pltpu.SMEM((1,), jnp.int32),
                    ],
                ),
                out_shape=jax.ShapeDtypeStruct((seqs + spare, K, G, W), q.dtype),
                interpret=interpret,
                name="hexllm_decode_attention",
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "arbitrary", "arbitrary"),
                    vmem_limit_bytes=DECODE_VMEM_BYTES,
                    disable_bounds_checks=True,
                ),
            )(
                jnp.pad(step.seq_lens[part], (0, spare)),
                jnp.clip(step.num_seqs - begin, 0, seqs).reshape(1),
                tables[part].reshape(-1),
                _scalars(kv),
                jnp.pad(grouped[part], ((0, spare), (0, 0), (0, 0), (0, 0))),
                kv.pool,
            )[:seqs]
        )
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs)
    return _value_lanes(out.reshape(S, N, W), H)


def _ragged_kernel(
    lens: Any,
    starts: Any,
    first_seq: Any,
    last_seq: Any,
    num_tiles: Any,
    tables: Any,
    scales: Any,
    q_ref: Any,
    pool: Any,
    o_ref: Any,
    buffer: Any,
    out_sums: Any,
    peaks: Any,
    totals: Any,
    semaphore: Any,
    state: Any,
    *,
    mask: _Mask,
    tile: Tiling,
    table_width: int,
    head_dim: int,
    num_kv_heads: int,
    is_scaled: bool,
) -> None:
    """Attend a tile of queries with one KV head; see ``ragged``."""
    core, i, head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tiles_a_core = pl.num_programs(1)
    t = core * tiles_a_core + i
    end_tile = jnp.minimum(num_tiles[0], (core + 1) * tiles_a_core)
    Q, pages, P = q_ref.shape[0], tile.pages, buffer.shape[2]
    C, lanes = pages * P, head_lanes(head_dim)
    W = out_sums.shape[1]
    G = out_sums.shape[0] // Q
    copies = _Copies(tables, pool, buffer, semaphore, pages, lanes, num_kv_heads == 1)
    has_low_edge = mask.window is not None or mask.chunk is not None

    def span(t: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return of s's rows in tile t: first row, first page seen, first position, the end."""
        row, end = jnp.maximum(t * Q, starts[s]), jnp.minimum(t * Q + Q, starts[s + 1])
        context = lens[s] - starts[s + 1]
        return row, lax.div(mask.first_seen(context + row), P), context + row, context + end

    def where(
        t: jax.Array, h: jax.Array, s: jax.Array, piece: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return a piece's entry in the tables, its number of blocks, and its first lane."""
        _, page, _, end = span(t, s)
        page = page + piece * pages
        return s * table_width + page, lax.div(end + (P - 1), P) - page, h * lanes

    @pl.when((i == 0) & (head == 0))
    def _() -> None:
        state[0] = 0

        @pl.when(t < end_tile)
        def _() -> None:
            copies.start_first(*where(t, head, first_seq[t], jnp.int32(0)))

    o_ref[...] = jnp.zeros_like(o_ref)

    def sequence(s: jax.Array, carry: int) -> int:
        row, first_page, begin, end = span(t, s)
        base = first_page * P
        num_pieces = lax.div(end - base + (C - 1), C)
        row_in_tile = row - t * Q
        low = lax.div(row_in_tile, _SMALL_ROWS) * _SMALL_ROWS
        is_small = row_in_tile + (end - begin) <= low + _SMALL_ROWS

        def walk(rows: int, low: Any) -> None:
            """Walk the sequence's pieces for ``rows`` rows of the tile from ``low`` on."""
            if rows < Q:
                low = pl.multiple_of(low, _SMALL_ROWS)
            at = [pl.ds(g * Q + low, rows) for g in range(G)]
            for a in at:
                out_sums[a, :] = jnp.zeros((rows, W), jnp.float32)
                peaks[a, :] = jnp.full((rows, LANES), _MASKED, jnp.float32)
                totals[a, :] = jnp.zeros((rows, LANES), jnp.float32)
            position = begin - row_in_tile + low  # of the first row; the others follow

            def compute(piece: jax.Array, slot: jax.Array, *, is_masked: bool) -> None:
                k, v = _keys_and_values(buffer[slot], 0, head_dim, q_ref.dtype)
                k_scale = scales[head] if is_scaled else None
                if is_masked:
                    left = base + piece * C
                    column = left + lax.broadcasted_iota(jnp.int32, (rows, C), 1)
                    ours = position + lax.broadcasted_iota(jnp.int32, (rows, C), 0)
                    seen = column <= ours
                    first = mask.rows_first_seen(position, ours)
                    if first is not None:
                        seen &= column >= first
                    exists = lax.broadcasted_iota(jnp.int32, (C, 1), 0) < end - left
                    v = jnp.where(exists, v, 0)
                for g, a in enumerate(at):
                    q = q_ref[pl.ds(low, rows), g * W : (g + 1) * W]
                    scores = mask.capped(_product(q, k, is_transposed=True), k_scale)
                    if is_masked:
                        scores = jnp.where(seen, scores, _MASKED)
                    peak = peaks[a, :]  # alike in all lanes, as is the new one
                    new_peak = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
                    shrink = mask.weight(peak - new_peak)
                    parts = [
                        mask.weight(scores[:, c : c + LANES] - new_peak) for c in range(0, C, LANES)
                    ]
                    # Totals stay a lane each: they are added up once, at the end.
                    totals[a, :] = totals[a, :] * shrink + functools.reduce(jnp.add, parts)
                    peaks[a, :] = new_peak
                    weights = jnp.concatenate(parts, axis=1).astype(q.dtype)
                    shrink = shrink if W == LANES else jnp.concatenate([shrink, shrink], axis=1)
                    out_sums[a, :] = out_sums[a, :] * shrink + _product(weights, v)

            def body(piece: jax.Array, carry: int) -> int:
                slot = state[0]
                is_last = piece == num_pieces - 1
                is_next_step = is_last & (s == last_seq[t])
                is_next_tile = is_next_step & (head == num_kv_heads - 1)
                next_tile = jnp.where(is_next_tile, t + 1, t)
                next_head = jnp.where(is_next_step, jnp.where(is_next_tile, 0, head + 1), head)
                following = first_seq[jnp.minimum(next_tile, end_tile - 1)]
                next_seq = jnp.where(is_next_step, following, jnp.where(is_last, s + 1, s))

                @pl.when(next_tile < end_tile)
                def _() -> None:
                    next_piece = jnp.where(is_last, 0, piece + 1)
                    copies.start(*where(next_tile, next_head, next_seq, next_piece), 1 - slot)

                copies.wait(lax.div(end + (P - 1), P) - first_page - piece * pages, slot)
                state[0] = 1 - slot
                left = base + piece * C
                needs_mask = left + C > begin + 1
                if has_low_edge:
                    needs_mask |= left < mask.first_seen(end - 1)

                @pl.when(needs_mask)
                def _() -> None:
                    compute(piece, slot, is_masked=True)

                @pl.when(jnp.logical_not(needs_mask))
                def _() -> None:
                    compute(piece, slot, is_masked=False)

                return carry

            lax.fori_loop(0, num_pieces, body, 0)
            ours = position + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
            is_ours = (ours >= begin) & (ours < end)
            for g, a in enumerate(at):
                out = out_sums[a, :] / totals[a, :].sum(axis=1, keepdims=True)
                if is_scaled:
                    out = out * scales[num_kv_heads + head]
                there = pl.ds(low, rows), slice(g * W, (g + 1) * W)
                o_ref[there] = jnp.where(is_ours, out.astype(o_ref.dtype), o_ref[there])

        if Q > _SMALL_ROWS:
            pl.when(is_small)(lambda: walk(_SMALL_ROWS, low))
            pl.when(jnp.logical_not(is_small))(lambda: walk(Q, 0))
        else:
            walk(Q, 0)
        return carry

    @pl.when(t < end_tile)
    def _() -> None:
        lax.fori_loop(first_seq[t], last_seq[t] + 1, sequence, 0)


def ragged(
    q: jax.Array,
    kv: TiledKV,
    step: Step,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
    chip: str,
    interpret: Any = False,
) -> jax.Array:
    """Attend any mix of query lengths; arguments as ``decode``, with q [T, N, H].

    Returns:
        [T, N, H] in q's dtype; padding tokens hold zeros.
    """
    T, N, H = q.shape
    kv, tables = _paged(kv, step.block_tables)
    K, (S, B) = kv.num_kv_heads, tables.shape
    tile = tiling(kv, T, N, B, chip)
    Q, G = tile.rows, N // K
    dtype = _compute_dtype(q, kv)
    flat = _padded_lanes(q.astype(dtype), H)
    W = flat.shape[-1]
    a_core = -(-T // (Q * tile.cores))
    padded = a_core * tile.cores * Q
    flat = jnp.pad(flat.reshape(T, N * W), ((0, padded - T), (0, 0)))
    # Which sequences each tile holds; sequences end where the next one starts.
    total = step.query_start_loc[-1]
    rows = jnp.arange(0, padded, Q, dtype=jnp.int32)
    ends = step.query_start_loc[1:]

    def holder(row: jax.Array) -> jax.Array:
        before = jnp.sum(ends[None] <= row[:, None], axis=1, dtype=jnp.int32)
        return jnp.minimum(before, S - 1)

    block = pl.BlockSpec((Q, G * W), lambda c, i, h, *_: (c * a_core + i, h))
    kernel = functools.partial(
        _ragged_kernel,
        mask=_Mask(scale, window, chunk, softcap),
        tile=tile,
        table_width=B,
        head_dim=H,
        num_kv_heads=K,
        is_scaled=kv.scales is not None,
    )
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(tile.cores, a_core, K),
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((2, tile.pages, kv.block_size, head_lanes(H)), kv.pool.dtype),
                pltpu.VMEM((G * Q, W), jnp.float32),
                pltpu.VMEM((G * Q, LANES), jnp.float32),
                pltpu.VMEM((G * Q, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((padded, N * W), q.dtype),
        interpret=interpret,
        name="hexllm_ragged_attention",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=RAGGED_VMEM_BYTES,
            disable_bounds_checks=True,
        ),
    )(
        step.seq_lens,
        step.query_start_loc,
        holder(rows),
        holder(jnp.minimum(rows + Q, total) - 1),
        (lax.div(total + (Q - 1), Q)).reshape(1),
        tables.reshape(-1),
        _scalars(kv),
        flat,
        kv.pool,
    )
    return _value_lanes(out[:T].reshape(T, N, W), H)
