"""Any rules, undone and applied again, give every parameter back, whole and in slices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexllm.core.checkpoint import TensorInfo
from hexllm.model.matching import match_tensors
from hexllm.model.rules import (
    Drop,
    Rename,
    Rule,
    Split,
    Stack,
    Transpose,
    undo_rules,
)
from hexllm.model.specs import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    Drawn = tuple[list[Rule], dict[str, tuple[int, ...]]]

SIZES = st.integers(1, 4)


@st.composite
def fused_linear(draw: Any) -> Drawn:
    """A fused linear, perhaps with a bias, perhaps kept as [in, out]."""
    sizes = tuple(draw(st.lists(SIZES, min_size=2, max_size=3)))
    parts = tuple(f"attn.{letter}" for letter in "qkv"[: len(sizes)])
    inputs, has_bias = draw(SIZES), draw(st.booleans())
    rules: list[Rule] = [Transpose("attn.qkv.weight")] if draw(st.booleans()) else []
    shapes = {f"{p}.weight": (size, inputs) for p, size in zip(parts, sizes, strict=True)}
    if has_bias:
        shapes |= {f"{p}.bias": (size,) for p, size in zip(parts, sizes, strict=True)}
    return [*rules, Split("attn.qkv", parts, sizes)], shapes


@st.composite
def stacked_experts(draw: Any) -> Drawn:
    """Experts one by one, gate and up perhaps fused in each, perhaps kept as [in, out]."""
    E, F, D = draw(st.integers(1, 12)), draw(SIZES), draw(SIZES)
    rules: list[Rule] = [Stack(f"moe.*.{name}", f"moe.{name}") for name in ("w1", "w3")]
    if draw(st.booleans()):
        rules = [Split("w13", ("w1", "w3"), (F, F)), *rules]
        if draw(st.booleans()):
            rules = [Transpose("w13"), *rules]
    return rules, {f"moe.{name}.weight": (E, F, D) for name in ("w1", "w3")}


@st.composite
def fused_experts(draw: Any) -> Drawn:
    """All experts in one tensor [E, in, out] or [E, out, in], gate beside up, without a suffix."""
    E, F, G, D = (draw(SIZES) for _ in range(4))
    rules: list[Rule] = [Transpose("all.gate_up")] if draw(st.booleans()) else []
    rules += [
        Rename(r"(all\.gate_up)$", r"\1.weight", inverse=(r"(all\.gate_up)\.weight$", r"\1")),
        Split("all.gate_up", ("all.gate", "all.up"), (F, G), axis=1),
    ]
    return rules, {"all.gate.weight": (E, F, D), "all.up.weight": (E, G, D)}


@st.composite
def models(draw: Any) -> Drawn:
    """Some of these in one or two layers, perhaps under another prefix."""
    chosen = draw(
        st.tuples(*(st.none() | part() for part in (fused_linear, stacked_experts, fused_experts)))
    )
    rules: list[Rule] = [rule for part in chosen if part for rule in part[0]]
    shapes = {"model.norm": (3,)}
    for i in range(draw(st.integers(1, 2))):
        for part in chosen:
            if part:
                shapes |= {f"model.layers.{i}.{name}": shape for name, shape in part[1].items()}
    if draw(st.booleans()):
        rules.append(Drop("vision.*"))
    prefix = Rename(r"^transformer\.", "model.", inverse=(r"^model\.", "transformer."))
    if draw(st.booleans()):
        rules.insert(draw(st.integers(0, len(rules))), prefix)
    return rules, shapes


def read(
    tensors: dict[str, np.ndarray], pieces: Sequence[Any], bounds: list[tuple[int, int]]
) -> np.ndarray:
    """What loading reads of a parameter, by the pieces alone."""
    if pieces[0].position is not None:
        (first, last), *bounds = bounds
        return np.stack([read_piece(tensors, piece, bounds) for piece in pieces[first:last]])
    return read_piece(tensors, pieces[0], bounds)


def read_piece(
    tensors: dict[str, np.ndarray], piece: Any, bounds: list[tuple[int, int]]
) -> np.ndarray:
    array = tensors[piece.tensor][piece.read_index(bounds)]
    return array.swapaxes(-1, -2) if piece.is_transposed else array


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(drawn=models(), data=st.data())
def test_undone_and_applied_again_all_is_as_it_was(drawn: Drawn, data: Any) -> None:
    rules, shapes = drawn
    # No two values are equal, so that whatever is in the wrong place shows.
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    arrays = {
        name: np.arange(end - math.prod(shape), end).reshape(shape)
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }
    tensors = undo_rules(rules, arrays)
    assert sum(tensor.size for tensor in tensors.values()) == ends[-1]
    found = match_tensors(
        rules,
        {name: TensorInfo(t.shape, "int64", "f", t.nbytes) for name, t in tensors.items()},
        {name: ParamSpec(shape, (None,) * len(shape)) for name, shape in shapes.items()},
        uri="x",
        family="f",
    )
    for name, shape in shapes.items():
        whole = [(0, size) for size in shape]
        np.testing.assert_array_equal(read(tensors, found[name], whole), arrays[name])
        part = []
        for size in shape:
            start = data.draw(st.integers(0, size - 1))
            part.append((start, data.draw(st.integers(start + 1, size))))
        index = tuple(slice(*bound) for bound in part)
        np.testing.assert_array_equal(read(tensors, found[name], part), arrays[name][index])


def test_a_part_that_no_parameter_gives_is_named() -> None:
    rule = Split("qkv", ("q", "k", "v"), (1, 1, 1))
    with pytest.raises(ValueError, match=r"'qkv'.*undone without layers\.0\.k\."):
        undo_rules([rule], {"layers.0.q": np.ones(1), "layers.0.v": np.ones(1)})
