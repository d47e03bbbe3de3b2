from __future__ import annotations

import numpy as np
import pytest

from hexllm.core.checkpoint import TensorInfo
from hexllm.core.errors import CheckpointError
from hexllm.model.matching import match_tensors
from hexllm.model.rules import (
    DROP_BUFFERS,
    Drop,
    Rename,
    Rule,
    Split,
    Stack,
    Transpose,
    undo_rules,
)
from hexllm.model.specs import ParamSpec


def info(*shape: int, file: str = "m-1.safetensors") -> TensorInfo:
    return TensorInfo(shape, "float32", file, 4)


def spec(*shape: int) -> ParamSpec:
    return ParamSpec(shape, (None,) * len(shape))


def match(
    rules: list[Rule], tensors: dict[str, TensorInfo], params: dict[str, ParamSpec]
) -> dict[str, list[tuple[str, tuple[tuple[int, int], ...], int | None]]]:
    found = match_tensors(rules, tensors, params, uri="gs://b/m", family="fam")
    return {
        path: [(p.tensor, tuple((s.start, s.stop) for s in p.index), p.position) for p in pieces]
        for path, pieces in found.items()
    }


def test_names_that_agree_need_no_rule() -> None:
    assert match([], {"a": info(2, 3)}, {"a": spec(2, 3)}) == {"a": [("a", ((0, 2), (0, 3)), None)]}


def test_rules_run_in_order_and_compose() -> None:
    rules = [
        Rename(r"^transformer\.", "model."),
        Split(
            "qkv",
            ("q", "k", "v"),
            (4, 2, 2),
        ),
        Drop(r".*\.junk"),
    ]
    tensors = {"transformer.0.qkv.weight": info(8, 3), "transformer.0.junk": info(1)}
    params = {f"model.0.{x}.weight": spec(n, 3) for x, n in (("q", 4), ("k", 2), ("v", 2))}
    name = "transformer.0.qkv.weight"
    assert match(rules, tensors, params) == {
        "model.0.q.weight": [(name, ((0, 4), (0, 3)), None)],
        "model.0.k.weight": [(name, ((4, 6), (0, 3)), None)],
        "model.0.v.weight": [(name, ((6, 8), (0, 3)), None)],
    }


def test_split_of_another_axis_then_stack() -> None:
    rules = [
        Split("gate_up", ("gate", "up"), (1, 2), axis=1),
        Stack("e.*.gate", "e.gate"),
        Stack("e.*.up", "e.up"),
    ]
    tensors = {f"e.{i}.gate_up": info(5, 3) for i in (10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)}
    found = match(rules, tensors, {"e.gate": spec(11, 5, 1), "e.up": spec(11, 5, 2)})
    assert found["e.up"] == [(f"e.{i}.gate_up", ((0, 5), (1, 3)), i) for i in range(11)]
    assert found["e.gate"][10] == ("e.10.gate_up", ((0, 5), (0, 1)), 10)


def test_transposed_tensors_are_cut_where_the_parameter_says() -> None:
    rules = [Transpose("experts.gate_up"), Split("gate_up", ("gate", "up"), (3, 4), axis=1)]
    params = {"experts.gate": spec(2, 3, 5), "experts.up": spec(2, 4, 5)}
    tensors = {"experts.gate_up": info(2, 5, 7)}
    found = match_tensors(rules, tensors, params, uri="x", family="f")
    (up,) = found["experts.up"]
    assert up.shape == (2, 4, 5)
    assert up.index == (slice(0, 2), slice(0, 5), slice(3, 7))
    # rows 1 to 2 of expert 1, all columns but the first
    assert up.read_index([(1, 2), (1, 3), (1, 5)]) == (slice(1, 2), slice(1, 5), slice(4, 6))


def test_rules_can_be_undone() -> None:
    rng = np.random.default_rng(0)
    rules = [
        Transpose("experts.gate_up"),
        Transpose("experts.down"),
        Rename(r"(experts\.\w+)$", r"\1.weight", inverse=(r"(experts\.\w+)\.weight$", r"\1")),
        Split("experts.gate_up", ("experts.gate", "experts.up"), (4, 2), axis=1),
        Split("qkv", ("q", "k", "v"), (4, 2, 2)),
        Stack("mlp.*.w1", "mlp.w1"),
        Rename(r"^transformer\.", "model."),
        Drop("junk"),
    ]
    shapes = {
        "model.experts.gate.weight": (3, 4, 5),
        "model.experts.up.weight": (3, 2, 5),
        "model.experts.down.weight": (3, 5, 4),
        "model.q.weight": (4, 3),
        "model.k.weight": (2, 3),
        "model.v.weight": (2, 3),
        "model.q.bias": (4,),
        "model.k.bias": (2,),
        "model.v.bias": (2,),
        "model.mlp.w1.weight": (11, 2, 3),
        "head": (7,),
    }
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    tensors = undo_rules(rules, arrays)
    assert {name: array.shape for name, array in tensors.items()} == {
        "model.experts.gate_up": (3, 5, 6),
        "model.experts.down": (3, 4, 5),
        "model.qkv.weight": (8, 3),
        "model.qkv.bias": (8,),
        **{f"model.mlp.{i}.w1.weight": (2, 3) for i in range(11)},
        "head": (7,),
    }
    found = match_tensors(
        rules,
        {name: info(*array.shape) for name, array in tensors.items()},
        {name: spec(*shape) for name, shape in shapes.items()},
        uri="x",
        family="f",
    )
    for name, pieces in found.items():
        parts = [tensors[piece.tensor][piece.index] for piece in pieces]
        parts = [
            x.swapaxes(-1, -2) if p.is_transposed else x for x, p in zip(parts, pieces, strict=True)
        ]
        whole = parts[0] if pieces[0].position is None else np.stack(parts)
        np.testing.assert_array_equal(whole, arrays[name])


def test_runs_match_whole_components() -> None:
    rule = Split("mlp.gate_up", ("mlp.gate", "mlp.up"), (1, 1))
    tensors = {"mlp.gate_up.weight": info(2), "xmlp.gate_up": info(2), "mlp.gate_up_x": info(2)}
    params = {"mlp.gate.weight": spec(1), "mlp.up.weight": spec(1)}
    rest = {name: spec(2) for name in ("xmlp.gate_up", "mlp.gate_up_x")}
    assert match([rule], tensors, params | rest)["mlp.up.weight"] == [
        ("mlp.gate_up.weight", ((1, 2),), None)
    ]


def test_buffers_of_old_checkpoints_are_dropped() -> None:
    tensors = {"a": info(1), "model.layers.0.self_attn.rotary_emb.inv_freq": info(8)}
    assert list(match([DROP_BUFFERS], tensors, {"a": spec(1)})) == ["a"]


@pytest.mark.parametrize(
    ("tensors", "params", "words"),
    [
        (
            {"a": info(1), "z": info(1)},
            {"a": spec(1), "b": spec(1), "c": spec(1)},
            ["2 parameters missing (b, c)", "1 tensor unused (z)."],
        ),
        (
            {"z": info(1)},
            {f"p{i}": spec(1) for i in range(9)},
            ["9 parameters missing (p0, p1, p2, p3, …)"],
        ),
        (
            {"layers.0.q_porj.weight": info(1)},
            {"layers.0.q_proj.weight": spec(1)},
            ["Is layers.0.q_porj.weight meant to be layers.0.q_proj.weight?"],
        ),
        (
            {"mlp.gate_up_proj.weight": info(1)},
            {"mlp.gate_proj.weight": spec(1)},
            ["gate_up_proj tensors: choose a family"],
        ),
        ({"a": info(1)}, {"a": spec(1), "lm_head.weight": spec(1)}, ["tie_word_embeddings"]),
        (
            {"a": info(2, 3, file="m-7.safetensors")},
            {"a": spec(3, 2)},
            ["tensor a in m-7.safetensors", "[2, 3]", "[3, 2]"],
        ),
        ({"a": info(2, 3)}, {"a": spec(2)}, ["[2, 3]", "[2]"]),
    ],
)
def test_what_does_not_fit_is_named(
    tensors: dict[str, TensorInfo], params: dict[str, ParamSpec], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        match([], tensors, params)
    for word in ["Checkpoint gs://b/m does not fit family 'fam'", *words]:
        assert word in str(caught.value)


def test_two_tensors_for_one_parameter() -> None:
    with pytest.raises(CheckpointError, match=r"a takes 1 tensor, and 2 came \(a, x\.a\)"):
        match([Rename(r"^x\.", "")], {"a": info(1), "x.a": info(1)}, {"a": spec(1)})


def test_a_stack_with_a_gap_or_a_double() -> None:
    rule = Stack("e.*", "e")
    with pytest.raises(
        CheckpointError, match=r"e takes 3 tensors, and 2 came .*number 1 is missing"
    ):
        match([rule], {"e.0": info(2), "e.2": info(2)}, {"e": spec(3, 2)})
    with pytest.raises(CheckpointError, match="e takes 2 tensors, and 3 came"):
        match([rule], {"e.0": info(2), "e.1": info(2), "e.01": info(2)}, {"e": spec(2, 2)})


def test_a_split_that_does_not_add_up() -> None:
    with pytest.raises(CheckpointError, match=r"Tensor w has shape \[7\].*should be 6 = 4 \+ 2"):
        match([Split("w", ("a", "b"), (4, 2))], {"w": info(7)}, {"a": spec(4), "b": spec(2)})
