from __future__ import annotations

import re
import time

import pytest

from hexllm.plan.hlo import HBM, VMEM, parse_module, parse_shape
from tests.plan.programs import KEPT, stored


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Whole tiles: 2048 × 4096 fits, 70 × 100 becomes 72 × 128, 5 becomes 128.
        ("bf16[2048,4096]{1,0:T(8,128)(2,1)}", [(HBM, 2048 * 4096 * 2)]),
        ("f32[70,100]{1,0:T(8,128)S(1)}", [(VMEM, 72 * 128 * 4)]),
        ("f32[70,100]{0,1:T(8,128)}", [(HBM, 128 * 104 * 4)]),
        ("s32[5]{0:T(128)}", [(HBM, 128 * 4)]),
        ("bf16[3,5,7]{2,1,0:T(4,128)(2,1)}", [(HBM, 3 * 8 * 128 * 2)]),
        ("s4[256,256]{1,0:T(64,128)(8,1)E(4)}", [(HBM, 256 * 256 // 2)]),
        ("pred[]{:T(512)}", [(HBM, 1)]),
        ("f32[<=16]{0}", [(HBM, 64)]),
        (
            "((bf16[8,128]{1,0:T(8,128)(2,1)}), /*index=1*/bf16[4,128]{1,0:T(4,128)(2,1)S(1)}, "
            "s32[]{:S(2)})",
            [(HBM, 2048), (VMEM, 1024), (2, 4)],
        ),
        ("()", []),
    ],
)
def test_shapes(text, expected):
    assert [(array.space, array.num_bytes) for array in parse_shape(text)] == expected


@pytest.mark.parametrize("name", KEPT)
def test_every_line_of_a_program_is_read(name):
    text = stored(name)
    module = parse_module(text)
    lines = re.findall(
        r"^\s+(ROOT )?%(\S+) = .*? ([a-z][\w\-]*)\((?:%|\)|\d|\{|true|f)", text, re.M
    )
    assert len(lines) == len(re.findall(r"^ +(?:ROOT )?%\S+ = ", text, re.M))
    assert [(bool(root), name, code) for root, name, code in lines] == [
        (each.is_root, each.name, each.opcode) for each in module
    ]
    known = set(module.computations)
    for computation in module.computations.values():
        for each in computation:
            assert set(each.operands) <= set(computation.by_name), each.name
            assert {*each.called, *each.branches} <= known, each.name


def test_what_a_matmul_says_of_itself():
    module = parse_module(stored("matmul"))
    assert module.name == "jit_matmul"
    assert [each.opcode for each in module.entry] == [
        *("parameter", "copy-start", "parameter", "copy-done", "fusion")
    ]
    root = module.entry.root
    assert root.op_name == "jit(matmul)/dot_general"
    assert root.estimated_cycles == 944550
    assert [array.dims for array in root.arrays] == [(2048, 7168)]
    assert module.entry.by_name["copy-done"].arrays[0].space == VMEM
    assert module.entry.users["copy-start"] == [(module.entry.by_name["copy-done"], 0)]
    inner = module.computations[root.called[0]]
    assert sorted(inner.parameters) == [0, 1]
    assert inner.root.opcode == "convolution"


def test_loops_branches_and_kernels():
    module = parse_module(stored("scan"))
    loop = next(each for each in module if each.opcode == "while")
    assert module.trip_count(loop) == 12
    assert loop.body in module.computations
    choice = next(each for each in parse_module(stored("cond")) if each.opcode == "conditional")
    assert len(choice.branches) == 2
    kernels = [each for each in parse_module(stored("pallas")) if each.target == "tpu_custom_call"]
    assert [each.op_name for each in kernels] == ["jit(pallas)/double/pallas_call"]


def instruction(attributes, opcode="all-reduce"):
    line = f"  ROOT %a = f32[8]{{0}} {opcode}(%p), {attributes}"
    text = f"HloModule m, is_scheduled=true\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{line}\n}}\n"
    return parse_module(text).entry.root


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", 4),
        ("replica_groups=[2,8]<=[16], to_apply=%add", 8),
        ("replica_groups=[4,4]<=[4,4]T(1,0), to_apply=%add", 4),
        ("replica_groups=mesh['a'=2,'b'=4,'c'=2] {'b','c'}, to_apply=%add", 8),
        ("source_target_pairs={{0,1},{1,2},{2,0}}", 3),
        ("to_apply=%add", 1),
    ],
)
def test_groups_of_collectives(attributes, size):
    assert instruction(attributes).group_size == size


def test_spellings_of_attributes():
    assert instruction('backend_config={"known_trip_count":{"n":"7"}}').known_trip_count == 7
    assert instruction("true_computation=%yes, false_computation=%no").branches == ("no", "yes")
    unknown = f'backend_config={{"window_config":{{"estimated_cycles":"{2**63}"}}}}'
    assert instruction(unknown).estimated_cycles is None
    assert instruction("body=%b, condition=%c").body == "b"


@pytest.mark.parametrize("text", ["", "HloModule m\nENTRY %e (p: f32[]) -> f32[] {\n}", "junk"])
def test_what_is_no_scheduled_module_is_refused(text):
    with pytest.raises(ValueError, match="scheduled HLO module"):
        parse_module(text)


def test_megabytes_take_seconds():
    """A program of 80 layers has some ten thousand instructions."""
    text = stored("mlp")
    head, entry = text.split("ENTRY", 1)
    computations = re.findall(r"^%.*?^\}\n", head, re.M | re.S)
    more = [
        re.sub(r"%([\w.\-]+)", rf"%\1.c{i}", computation)
        for i in range(200)
        for computation in computations
    ]
    text = f"{head}{''.join(more)}ENTRY{entry}"
    assert len(text) > 4_000_000
    start = time.process_time()
    module = parse_module(text)
    assert time.process_time() - start < 5
    assert len(module.computations) > 200 * len(computations)
