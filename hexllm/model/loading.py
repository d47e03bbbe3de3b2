"""Fills a tree of specs: from a checkpoint, one tensor at a time, or at random.

Loading must not need more host memory than the parameters themselves and one tensor: on a CPU the
parameters *are* in host memory, and on a TPU host the checkpoint may be larger than it.
"""

from __future__ import annotations

import functools
import logging
import math
import zlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (numpy and safetensors learn bfloat16 from it)
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from hexllm.core.errors import CheckpointError
from hexllm.model.matching import match_tensors
from hexllm.model.reading import PieceReader
from hexllm.model.rules import Drop, DropCopy, Piece
from hexllm.model.sharding import check_divides, shard_config, spec_format, spec_sharding
from hexllm.model.specs import ParamSpec, flatten, is_spec, map_linears, path_of
from hexllm.model.widening import find_widening

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax.sharding import Mesh, NamedSharding
    from jax.typing import DTypeLike

    from hexllm.core.checkpoint import Checkpoint, TensorInfo
    from hexllm.model.config import ModelConfig
    from hexllm.model.family import DecoderFamily
    from hexllm.model.rules import Rule
    from hexllm.model.specs import LinearSpec
    from hexllm.model.widening import Widening

    #: Called after each parameter with (bytes done, bytes in all, the parameter's name).
    Progress = Callable[[int, int, str], None]

logger = logging.getLogger(__name__)

#: Spread of dummy weights: small enough that activations stay finite through any depth.
DUMMY_STD = 0.02

#: Bytes of a tensor compared at a time with what it should be a copy of.
COMPARED_BYTES = 16 << 20


def param_specs(
    family: DecoderFamily,
    cfg: ModelConfig,
    build: Callable[[str, LinearSpec], Any] | None = None,
) -> Any:
    """Return the tree of ParamSpec that a model's parameters are loaded into.

    Args:
        family: The model's family.
        cfg: The model; as ``shard_config`` has it, for the parameters on several devices.
        build: Gives each linear's leaf of specs (a quantizer); ``Dense`` by default.
    """
    return map_linears(family.specs(cfg), build or family.linear)


def load_params(
    family: DecoderFamily,
    cfg: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike,
    mesh: Mesh,
    progress: Progress | None = None,
) -> Any:
    """Load a checkpoint's weights onto the devices, one parameter at a time.

    Each device's slice is read, cast on the host, sent, and freed before the next is read, so
    that no more than one tensor is in flight.

    Args:
        family: The model's family.
        cfg: The model.
        checkpoint: Where the weights are.
        dtype: Of parameters whose spec does not say.
        mesh: The devices.
        progress: Told of each parameter once it is on the devices.

    Returns:
        The family's parameters: nested dicts under Hugging Face's names, of arrays and leaves.

    Raises:
        CheckpointError: The checkpoint does not fit the family, or cannot be read.
        ConfigError: The mesh does not fit the model.
    """
    specs = param_specs(family, shard_config(cfg, mesh))
    by_path = flatten(specs)
    stored = flatten(param_specs(family, cfg))
    check_divides(cfg, stored, mesh)
    reader = PieceReader(checkpoint)
    tensors = reader.tensors
    rules = family.all_weight_rules(cfg)
    sources = match_tensors(
        rules,
        tensors,
        {path: spec for path, spec in stored.items() if spec.is_loaded},
        uri=checkpoint.uri,
        family=family.name,
    )
    _check_copies(checkpoint.uri, reader, rules, sources)
    used = {piece.tensor for pieces in sources.values() for piece in pieces}
    unused = {name: info for name, info in tensors.items() if name not in used}
    _log_dropped(checkpoint.uri, unused, rules)
    # In the files' order, so that each file is read once and from its start to its end.
    place = {name: i for i, name in enumerate(tensors)}
    order = sorted(sources, key=lambda path: place[sources[path][0].tensor])
    total = sum(_nbytes(tensors, sources[path]) for path in order)
    done = 0
    arrays: dict[str, jax.Array] = {}
    for path in order:
        spec = by_path[path]
        target = np.dtype(spec.dtype or dtype)
        where = spec_format(path, spec, mesh)
        widening = find_widening(path, stored[path], spec, cfg)
        arrays[path] = _load_array(reader, sources[path], spec.shape, target, where, widening)
        done += _nbytes(tensors, sources[path])
        if progress is not None:
            progress(done, total, path)
    for path, spec in by_path.items():
        if not spec.is_loaded:
            arrays[path] = _make_array(path, spec, dtype, mesh, None, seed=0)
    return _unflatten(specs, arrays)


def init_dummy_params(
    family: DecoderFamily, cfg: ModelConfig, *, dtype: DTypeLike, mesh: Mesh, seed: int
) -> Any:
    """Make random parameters on the devices: the tree of :func:`load_params`, without a file.

    Args:
        family: The model's family.
        cfg: The model.
        dtype: Of parameters whose spec does not say.
        mesh: The devices.
        seed: Equal seeds give equal parameters.

    Raises:
        ConfigError: The mesh does not fit the model.
    """
    specs = param_specs(family, shard_config(cfg, mesh))
    stored = flatten(param_specs(family, cfg))
    check_divides(cfg, stored, mesh)
    arrays = {}
    for path, spec in flatten(specs).items():
        widening = find_widening(path, stored[path], spec, cfg)
        arrays[path] = _make_array(path, spec, dtype, mesh, widening, seed=seed)
    return _unflatten(specs, arrays)


def _check_copies(
    uri: str,
    reader: PieceReader,
    rules: Sequence[Rule],
    sources: Mapping[str, tuple[Piece, ...]],
) -> None:
    """Refuse a tensor that is dropped as a copy and is not one; compared a few rows at a time."""
    for rule in rules:
        if not isinstance(rule, DropCopy) or rule.tensor not in reader.tensors:
            continue
        info, (piece,) = reader.tensors[rule.tensor], sources[rule.of]
        other = Piece.whole(rule.tensor, info.shape)
        is_copy = info.shape == piece.shape
        rows = max(1, COMPARED_BYTES * info.shape[0] // max(info.nbytes, 1))
        for start in range(0, info.shape[0] if is_copy else 0, rows):
            stop = min(start + rows, info.shape[0])
            bounds = ((start, stop), *((0, size) for size in info.shape[1:]))
            copy, original = (reader.read_piece(each, bounds) for each in (other, piece))
            is_copy = is_copy and np.array_equal(copy, original)
        if not is_copy:
            raise CheckpointError(
                f"Checkpoint {uri}: {rule.tensor} in {info.file} differs from "
                f"{rule.of}, though config.json ties the two. Set tie_word_embeddings to false "
                f"to serve the model with its own head, or remove {rule.tensor}."
            )


def _log_dropped(uri: str, unused: Mapping[str, TensorInfo], rules: Sequence[Rule]) -> None:
    """Say what of the tensors that came to nothing was left out, a line for each reason."""
    dropped: dict[str, list[int]] = {}
    for name, info in unused.items():
        pieces: tuple[Piece, ...] = (Piece.whole(name, info.shape),)
        for rule in rules:
            after = tuple(out for piece in pieces for out in rule.apply(piece))
            if isinstance(rule, Drop) and rule.reason and len(after) < len(pieces):
                dropped.setdefault(rule.reason, []).append(info.nbytes)
            pieces = after
    for reason, sizes in dropped.items():
        logger.info(
            "Checkpoint %s: %d tensors of %.1f MB in all are left out: %s.",
            uri,
            len(sizes),
            sum(sizes) / 1e6,
            reason,
        )


def _load_array(
    reader: PieceReader,
    pieces: tuple[Piece, ...],
    shape: tuple[int, ...],
    dtype: np.dtype,
    place: NamedSharding | Format,
    widening: Widening | None,
) -> jax.Array:
    """Return one parameter; each device gets its own slice, equal slices are read once."""
    sharding: Any = place.sharding if isinstance(place, Format) else place
    by_index: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True))
        by_index.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in by_index.items():
        block = reader.read_block(pieces, bounds, dtype, widening)
        shards += [_put(block, device, place) for device in devices]
        for shard in shards:
            shard.block_until_ready()
        del block
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _put(block: np.ndarray, device: jax.Device, place: NamedSharding | Format) -> jax.Array:
    """Return a slice on a device, its values in the order that ``place`` says."""
    if isinstance(place, Format):
        return jax.device_put(block, Format(place.layout, SingleDeviceSharding(device)))
    return jax.device_put(block, device)


def _nbytes(tensors: Mapping[str, TensorInfo], pieces: tuple[Piece, ...]) -> int:
    total = 0
    for piece in pieces:
        info = tensors[piece.tensor]
        total += info.nbytes * math.prod(piece.shape) // max(math.prod(info.shape), 1)
    return total


@functools.lru_cache(maxsize=64)
def _normal(
    shape: tuple[int, ...],
    dtype: np.dtype,
    place: NamedSharding | Format,
    widening: Widening | None,
) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled maker, so that layers of equal shapes share one program."""
    drawn = shape if widening is None else (widening.stored, *shape[1:])

    def make(key: jax.Array) -> jax.Array:
        values: jax.Array = DUMMY_STD * jax.random.normal(key, drawn, jnp.float32)
        values = values if widening is None else widening.apply(values)
        return values.astype(dtype)

    compiled: Callable[[jax.Array], jax.Array] = jax.jit(make, out_shardings=place)
    return compiled


def _make_array(
    path: str,
    spec: ParamSpec,
    dtype: DTypeLike,
    mesh: Mesh,
    widening: Widening | None,
    *,
    seed: int,
) -> jax.Array:
    target = np.dtype(spec.dtype or dtype)
    place = spec_format(path, spec, mesh)
    if spec.init != "normal" or not jnp.issubdtype(target, jnp.floating):
        fill = 1 if spec.init == "ones" else 0
        filled = jnp.full(spec.shape, fill, target, device=spec_sharding(path, spec, mesh))
        return jax.device_put(filled, place)
    # Folded from the name, so that a parameter's values do not depend on the others.
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    return _normal(spec.shape, target, place, widening)(key)


def _unflatten(specs: Any, arrays: dict[str, jax.Array]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: arrays[path_of(keys)], specs, is_leaf=is_spec
    )
