"""Specs: what a family says of its parameters before any of them exists.

A tree of specs has Hugging Face's names as keys, so that a parameter's path in the tree is its
tensor's name in the checkpoint. Linears are turned into leaves (``Dense`` or a quantizer's) whose
fields hold specs first and arrays after loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax

if TYPE_CHECKING:
    from collections.abc import Callable

#: The field in which a leaf that wraps another (an adapter) keeps it; it does not show in paths.
WRAPPED_FIELD = "base"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One array.

    Attributes:
        shape: Its dimensions, as the checkpoint has them.
        axes: The logical axis of each dimension (``hexllm.model.sharding`` maps them to the
            mesh); None is never sharded.
        dtype: numpy's name; None is the model's own.
        init: How dummy weights, and those that are not loaded, are made.
        is_loaded: False for an array that no checkpoint holds (adapter slots).
        memory_order: Its dimensions in the order in which a TPU's memory should hold them, slowest
            first; None is the order of ``shape``.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None
    init: Literal["normal", "ones", "zeros"] = "normal"
    is_loaded: bool = True
    memory_order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} axes for the {len(self.shape)} of {self.shape}")


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear layer, whatever its numbers will be stored as.

    Attributes:
        in_features: Columns of its weight.
        out_features: Rows of its weight.
        bias: Whether a bias is added.
        axes: Logical axes of (out, in).
        out_dtype: numpy's name of the result's dtype; None is the input's.
        num_experts: Of a stack of linears, one an expert, how many; None is a single one.
    """

    in_features: int
    out_features: int
    bias: bool = False
    axes: tuple[str | None, str | None] = (None, None)
    out_dtype: str | None = None
    num_experts: int | None = None


#: Nested dict of ParamSpec | LinearSpec; keys are Hugging Face's names.
Specs: TypeAlias = dict[str, Any]


def norm_spec(size: int, *, init: Literal["ones", "zeros"] = "ones") -> Specs:
    """Return the specs of a norm: a weight of [size]; ``init`` is the one that changes nothing."""
    return {"weight": ParamSpec((size,), (None,), init=init)}


def is_spec(node: object) -> bool:
    """Tell whether a node of a tree is a spec rather than something that holds specs."""
    return isinstance(node, ParamSpec | LinearSpec)


def map_linears(specs: Specs, build: Callable[[str, LinearSpec], Any]) -> Any:
    """Return the tree with each LinearSpec replaced by the leaf that ``build(path, spec)`` gives.

    This is where a quantizer puts its own leaves; families never see the difference.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, node: build(path_of(keys), node) if isinstance(node, LinearSpec) else node,
        specs,
        is_leaf=is_spec,
    )


def path_of(keys: tuple[Any, ...]) -> str:
    """Return the Hugging Face name of a key path of a tree of specs or parameters."""
    names = []
    for key in keys:
        if isinstance(key, jax.tree_util.GetAttrKey):
            if key.name != WRAPPED_FIELD:
                names.append(key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            names.append(str(key.idx))
        else:
            names.append(str(key.key))
    return ".".join(names)


def flatten(tree: Any) -> dict[str, Any]:
    """Return each leaf of a tree (specs or arrays) by its Hugging Face name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    return {path_of(keys): leaf for keys, leaf in leaves}
