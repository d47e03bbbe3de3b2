"""The plain linear leaves. All a family sees of any linear is ``y = p["q_proj"](x, step)``.

Of a stack of experts it is ``y = p["up_proj"](rows, group_sizes)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import struct

from hexllm.model.sharding import partition_spec
from hexllm.model.specs import LinearSpec, ParamSpec
from hexllm.ops.grouped_matmul import grouped_matmul
from hexllm.ops.matmul import linear
from hexllm.ops.platform import tensor_shards

if TYPE_CHECKING:
    import jax

    from hexllm.ops.step import Step


@struct.dataclass
class Dense:
    """A linear layer with full-precision weights. Its fields hold specs first, arrays later.

    Attributes:
        weight: [out, in], Hugging Face's layout.
        bias: [out], or None.
        out_dtype: Static. numpy's name of the result's dtype; None is the input's.
        axes: Static. The logical axis of each of the weight's dimensions.
    """

    weight: Any
    bias: Any = None
    out_dtype: str | None = struct.field(pytree_node=False, default=None)  # type: ignore[no-untyped-call]
    axes: tuple[str | None, ...] = struct.field(pytree_node=False, default=(None, None))  # type: ignore[no-untyped-call]

    @classmethod
    def from_spec(cls, path: str, spec: LinearSpec) -> Dense:
        """Return the leaf of specs for ``spec``; ``path`` is not needed by this kind."""
        del path
        out_axis, _ = spec.axes
        weight = ParamSpec((spec.out_features, spec.in_features), spec.axes)
        bias = ParamSpec((spec.out_features,), (out_axis,), init="zeros") if spec.bias else None
        return cls(weight=weight, bias=bias, out_dtype=spec.out_dtype, axes=spec.axes)

    def __call__(self, x: jax.Array, step: Step | None) -> jax.Array:
        """Return ``x @ weight.T + bias``, accumulated in float32.

        Args:
            x: [T, in].
            step: The batch; adapters choose each token's slot by it, this leaf does not need it.

        Returns:
            [T, out] in ``out_dtype``.
        """
        del step
        out_dtype = self.out_dtype or x.dtype
        if self.bias is None:
            return linear(x, self.weight, out_dtype=out_dtype)
        # What devices sum travels between them: at full precision it would be twice as much.
        sum_dtype = out_dtype if self._is_summed() else jnp.float32
        y: jax.Array = linear(x, self.weight, out_dtype=sum_dtype).astype(jnp.float32)
        y += self.bias.astype(jnp.float32)
        return y.astype(out_dtype)

    def _is_summed(self) -> bool:
        """Tell whether each device has a part of the inputs only, and the results are summed."""
        return tensor_shards() > 1 and partition_spec(self.axes)[1] is not None


@struct.dataclass
class DenseExperts:
    """A linear layer an expert, stacked, with full-precision weights.

    Attributes:
        weight: [E, out, in].
        axes: Static. The logical axis of each of the weight's dimensions.
    """

    weight: Any
    axes: tuple[str | None, ...] = struct.field(pytree_node=False, default=(None, None, None))  # type: ignore[no-untyped-call]

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.weight.shape[0])

    @classmethod
    def from_spec(cls, path: str, spec: LinearSpec) -> DenseExperts:
        """Return the leaf of specs for ``spec``.

        Raises:
            ValueError: The spec asks for a bias.
        """
        if spec.bias or spec.num_experts is None:
            raise ValueError(f"{path}: {spec} is not a stack of linears without biases.")
        shape = (spec.num_experts, spec.out_features, spec.in_features)
        axes = ("expert", *spec.axes)
        # As the product of groups reads it on a TPU: in any other order it is copied in each step.
        return cls(weight=ParamSpec(shape, axes, memory_order=(0, 2, 1)), axes=axes)

    def partition(self) -> DenseExperts:
        """Return this tree with each array's PartitionSpec in its place."""
        return DenseExperts(weight=partition_spec(self.axes), axes=self.axes)

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Return each row times its expert's weight, accumulated in float32.

        Args:
            x: [M, in], sorted by expert.
            group_sizes: [E] int32, rows of each expert.

        Returns:
            [M, out] in x's dtype.
        """
        return grouped_matmul(x, self.weight, group_sizes)


def dense_leaf(path: str, spec: LinearSpec) -> Any:
    """Return the leaf of a linear that no quantizer claims."""
    kind = Dense if spec.num_experts is None else DenseExperts
    return kind.from_spec(path, spec)
