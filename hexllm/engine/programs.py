"""What the programs of a step are, from shapes alone.

The runner compiles them for the devices that it has, and ``hexllm plan`` for ones that it has not:
nothing here needs weights, or devices that can be run on.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hexllm.core.errors import ConfigError
from hexllm.engine.scheduler import Plan
from hexllm.engine.step import StepInputs, build
from hexllm.model.fuse import fuse_projections
from hexllm.model.loading import param_specs
from hexllm.model.sharding import check_divides, shard_config, spec_format
from hexllm.model.specs import flatten, is_spec, path_of
from hexllm.ops import attention, kv_cache
from hexllm.ops.platform import TENSOR_AXIS, traced_for
from hexllm.ops.sampling import Sampled, SamplingRows, rows_from_params, sample

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from hexllm.engine.buckets import StepShape
    from hexllm.model.config import KVSpec, ModelConfig
    from hexllm.model.family import DecoderFamily
    from hexllm.ops.kv_cache import LayerKV
    from hexllm.ops.step import Step


class Programs:
    """The step and the sampler of one model on one mesh.

    Weights and KV heads are dealt out over the mesh, and so are the logits, over the vocabulary;
    whatever else goes in or out lies on every device.

    Attributes:
        family: The model's pure functions.
        cfg: The model as it is computed on the mesh (``shard_config``).
        vocab_size: V of the model; the logits' columns past it stand for no token.
        mesh: The devices.
        dtype: Of activations and KV.
        block_size: P.
        num_slots: Rows of the table of last tokens.
        has_pallas: Whether Pallas's kernels compute attention, rather than XLA.
    """

    def __init__(
        self,
        family: DecoderFamily,
        cfg: ModelConfig,
        mesh: Mesh,
        dtype: DTypeLike,
        *,
        block_size: int,
        num_slots: int,
        attention_backend: str = "auto",
    ) -> None:
        """Take the model ``cfg`` as its files have it.

        Raises:
            ConfigError: The mesh does not fit the model, or the attention that is asked for does
                not take it.
        """
        check_divides(cfg, flatten(param_specs(family, cfg)), mesh)
        self.family = family
        self.cfg = shard_config(cfg, mesh)
        self.vocab_size = cfg.vocab_size
        self.mesh = mesh
        self.dtype = dtype
        self.block_size = block_size
        self.num_slots = num_slots
        self.has_pallas = self._has_pallas(attention_backend)
        self.replicated = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self._of_logits = NamedSharding(mesh, PartitionSpec(None, TENSOR_AXIS))  # type: ignore[no-untyped-call]

    def step(
        self,
        params: Any,
        kv: tuple[LayerKV, ...],
        last_tokens: jax.Array,
        tokens: jax.Array,
        step: Step,
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Compute one step: embed, layers, and logits [S, V] where they are needed.

        Args:
            params: The model's, as ``param_shapes`` has them.
            kv: Each layer's cache; donated.
            last_tokens: [slots] int32, the token sampled last for each slot.
            tokens: [T] int32, as ``StepInputs`` has them.
            step: The batch.

        Returns:
            Logits [S, V] float32 of the padded vocabulary, and the new caches.
        """
        with traced_for(self.mesh):
            tokens = jnp.where(tokens < 0, last_tokens[-1 - tokens], tokens)
            hidden, kv = self.family.forward(self.cfg, params, tokens, kv, step)
            return self.family.logits(self.cfg, params, hidden[step.logits_indices]), kv

    def sample(
        self, logits: jax.Array, rows: SamplingRows, last_tokens: jax.Array, slots: jax.Array
    ) -> tuple[Sampled, jax.Array]:
        """Sample S rows; return that and the table [slots] with the tokens where they belong."""
        with traced_for(self.mesh):
            sampled = sample(logits, rows, self.vocab_size)
            return sampled, last_tokens.at[slots].set(sampled.tokens, mode="drop")

    def param_shapes(self) -> Any:
        """Return the parameters' shapes, with shardings, in the tree that the step takes."""

        def shape(keys: Any, spec: Any) -> jax.ShapeDtypeStruct:
            place = spec_format(path_of(keys), spec, self.mesh)
            dtype = jnp.dtype(spec.dtype or self.dtype)
            return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=place)

        specs = param_specs(self.family, self.cfg)
        shapes = jax.tree_util.tree_map_with_path(shape, specs, is_leaf=is_spec)
        self.arrange(shapes)
        return shapes

    def arrange(self, params: Any) -> None:
        """Put a model's parameters, or their shapes, as loaded, into the tree of the step's."""
        if self.mesh.size == 1:
            fuse_projections(params)

    def allocate_kv(self, num_blocks: int) -> tuple[LayerKV, ...]:
        """Return each layer's cache of ``num_blocks`` blocks, zeroed, on the devices."""
        shardings = jax.tree.map(lambda shape: shape.sharding, self.kv_shapes(num_blocks))
        make = jax.jit(lambda: self._make_kv(num_blocks), out_shardings=shardings)
        made: tuple[LayerKV, ...] = make()
        return made

    def kv_shapes(self, num_blocks: int) -> tuple[LayerKV, ...]:
        """Return the shapes, with shardings, of each layer's cache of ``num_blocks`` blocks."""
        shapes = jax.eval_shape(lambda: self._make_kv(num_blocks))
        shardings = tuple(kv_cache.shardings(layer, self.mesh) for layer in shapes)
        return jax.tree.map(_with_sharding, shapes, shardings)

    def bytes_per_block(self) -> int:
        """Return the bytes that one KV block takes of each device, over all layers."""
        return _device_bytes(self.kv_shapes(2)) - _device_bytes(self.kv_shapes(1))

    def param_bytes(self) -> int:
        """Return the bytes that the parameters take of each device."""
        return _device_bytes(self.param_shapes())

    def lower_step(self, shape: StepShape, params: Any, kv: Any) -> jax.stages.Lowered:
        """Lower the step of one shape.

        Args:
            shape: The step's.
            params: The parameters, or ``param_shapes()``.
            kv: The cache, or ``kv_shapes(…)`` of as many blocks.
        """
        inputs = self._inputs(shape)
        program = self._jitted_step(tuple(kv))
        return program.lower(params, kv, self._last_tokens(), inputs.tokens, inputs.step)

    def lower_sample(self, seqs: int) -> jax.stages.Lowered:
        """Lower the sampler of ``seqs`` sequences."""
        logits = jax.ShapeDtypeStruct(
            (seqs, self.cfg.vocab_size), jnp.float32, sharding=self._of_logits
        )
        rows = self._shapes(rows_from_params([], [], seqs))
        slots = self._shapes(np.zeros(seqs, np.int32))
        return self._jitted_sample.lower(logits, rows, self._last_tokens(), slots)

    @functools.cached_property
    def _jitted_sample(self) -> Any:
        return jax.jit(self.sample, out_shardings=self.replicated)

    def _jitted_step(self, kv: tuple[LayerKV, ...]) -> Any:
        shardings = tuple(kv_cache.shardings(layer, self.mesh) for layer in kv)
        return jax.jit(self.step, donate_argnums=1, out_shardings=(self._of_logits, shardings))

    def _make_kv(self, num_blocks: int) -> tuple[LayerKV, ...]:
        with traced_for(self.mesh):
            return tuple(
                kv_cache.allocate(
                    num_blocks,
                    self.block_size,
                    spec.num_kv_heads,
                    spec.head_dim,
                    self.dtype,
                    is_tiled=self.has_pallas,
                )
                for spec in self._kv_specs()
            )

    def _kv_specs(self) -> list[KVSpec]:
        return [self.family.kv_spec(self.cfg, i) for i in range(self.cfg.num_hidden_layers)]

    def _has_pallas(self, backend: str) -> bool:
        head_dims = {spec.head_dim for spec in self._kv_specs()}
        try:
            with traced_for(self.mesh):
                return attention.is_tiled(
                    backend, block_size=self.block_size, head_dims=head_dims, dtype=self.dtype
                )
        except NotImplementedError as why:
            raise ConfigError(
                f"attention_backend={backend} does not take {self.cfg.source}: {why}. "
                f"Write --attention_backend=xla, or leave it out."
            ) from why

    def _inputs(self, shape: StepShape) -> StepInputs:
        """Return the shapes of a step's small inputs."""
        sizes = {"block_size": self.block_size, "num_blocks": 1, "num_slots": self.num_slots}
        inputs: StepInputs = self._shapes(build(Plan("prefill", ()), shape, **sizes))
        return inputs

    def _last_tokens(self) -> Any:
        return self._shapes(np.zeros(self.num_slots, np.int32))

    def _shapes(self, arrays: Any) -> Any:
        """Return the shapes of numpy arrays that go to every device."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=self.replicated), arrays
        )


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _device_bytes(shapes: Any) -> int:
    """Return what arrays of these shapes take of each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )
