from __future__ import annotations

import gzip
import importlib.util

import pytest

from hexllm.core.errors import HexllmError
from hexllm.plan.bundles import parse_bundles
from hexllm.plan.chips import CHIPS
from hexllm.plan.dump import dump
from hexllm.plan.hlo import parse_module
from tests.plan.programs import MODULES

V5E, V6E, TPU7X = CHIPS["v5e"], CHIPS["v6e"], CHIPS["tpu7x"]

#: Laid out as the compiler's own: a loop, in it a branch around a copy, four bundles of delay.
SMALL = """= control target key start
LB: loop body
= control target key end

     0   :  { %1 = vsyncpa [#allocation3], 0  ;;  %s2_s0 = smov 0 }
   0x1 LB: > { %3 = sst [smem:[#allocation9_spill]] %s1 /* Start region 7 :: Start region 21 */ }
   0x2   : > { %5 = sbr.rel (%p3_p2) target = $region24  ;;  %v1_v1 = vld [vmem:[%s1] sm:$0xff] }
   0x3   :  {}
   0x4   :  {}
   0x5   :  {}
   0x6   :  {} /* End region 21 */
   0x7   : > { %6 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s9 /* Start region 23 */ /* window:
base_bounds: (512, 32)
   0x1 is no bundle here */ }
   0x8   : > { %7 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v1  ;;  %9 = vmatmul.f32.gmra.mxu1 %v2 }
   0x9   : > { %8 = vmatpush.bf16.msra.mxu0 %v2  ;;  %11 = vst [vmem:[#allocation4_spill]] %v1 }
   0xa   : > { %v8_v1 = vld [vmem:[#allocation4_spill] sm:$0xff] /* End region 23 */ }
   0xb PF: > { %12 = dma.done.wait [#allocation3], 16 } /* Start/End empty region 24 */
   0xc   : > { %13 = sbr.rel (!%p9_p1) target = $region7 }
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   : > { %s4_s2 = sadd.s32 1, %s3_s2 /* End region 7 */ }
  0x11   :  { %14 = vsyncpa [#allocation3], 1 }
"""


def test_a_loop_and_what_a_branch_in_it_skips():
    kernel = parse_bundles(SMALL, V5E)
    assert [(each.name, each.first, each.last, each.bundles) for each in kernel] == [
        ("kernel", 0, 0x11, 2),
        ("L1", 1, 0x10, 12),
        ("L1.B1", 7, 0xA, 4),
    ]
    loop, copy = list(kernel)[1:]
    assert loop.is_loop
    assert not copy.is_loop
    assert loop.counts == {"dma wait": 1, "spill store": 1}
    assert copy.counts == {"dma": 1, "matmul": 2, "spill store": 1, "spill load": 1}
    assert kernel.total("spill store") == 2
    assert copy.parent is loop


def test_the_busiest_unit_counts_where_it_is_more():
    copy = list(parse_bundles(SMALL, V5E))[2]
    assert copy.products == {0: 16 + 4, 1: 8}
    assert copy.cycles == 20
    assert list(parse_bundles(SMALL, V6E))[2].products == {0: 8 + 4, 1: 4}
    results = SMALL.replace("gmra.mxu0", "gmra.mrb[0].mxu0")  # as TPU7x has it
    assert list(parse_bundles(results, V6E))[2].products == {0: 8 + 4, 1: 4}


def test_cycles_are_bundles_times_runs():
    kernel = parse_bundles(SMALL, V5E)
    assert kernel.issue_cycles() == 2 + 12 + 20
    assert kernel.issue_cycles({"L1": 8}) == 2 + 8 * (12 + 20)
    assert kernel.issue_cycles({"L1": 8, "L1.B1": 0.25}) == 2 + 8 * (12 + 5)
    assert kernel.issue_cycles(lambda region: 3 if region.is_loop else None) == 2 + 3 * 32
    assert kernel.issue_us(V5E, {"L1": 8}) == pytest.approx(258 / 1500)
    assert "L1.B1" in kernel.table({"L1": 8})
    assert "runs 8 " in kernel.table({"L1": 8})


def test_what_is_no_dump_or_half_a_dump_is_refused():
    with pytest.raises(ValueError, match="no dump of final bundles"):
        parse_bundles("HloModule m", V5E)
    with pytest.raises(ValueError, match="branch at 0xc goes to an unknown place"):
        parse_bundles(SMALL.replace("$region7", "$region9"), V5E)
    with pytest.raises(ValueError, match="loops at 0x1 "):
        parse_bundles(SMALL.replace("$region7", "$region24"), V5E)


def test_the_decode_kernel_as_libtpu_dumped_it():
    """8 query and 2 KV heads, blocks of 32 in pieces of 512, for v5e; libtpu 0.0.42."""
    text = gzip.decompress((MODULES / "decode_v5e.final_bundles.txt.gz").read_bytes()).decode()
    kernel = parse_bundles(text, V5E)
    assert sum(each.bundles for each in kernel) == kernel.last + 1 == 661
    loops = [each for each in kernel if each.is_loop]
    assert len(loops) == 5
    [pieces] = [each for each in loops if each.counts["matmul"]]
    assert pieces.name == "L1.B1.B3.B1.L1"
    assert pieces.counts["matmul"] == 16
    # A product with a piece of 512 tokens: 64 pushes and 8 multiplications of keys, as of values.
    assert sum(pieces.products.values()) == 2 * (64 * 4 + 8 * 16)
    # The next piece's 16 blocks of 32 tokens are copied in a branch, and one by one in a loop.
    assert [each.counts["dma"] for each in pieces if each.counts["dma"]] == [512 // 32, 1]


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler"
)


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5e:2x2", "tpu7x:2x2x1"])
def test_this_libtpu_dumps_a_kernel_that_is_understood(topology):
    found = dump("tests.plan.programs:lower", name="pallas", topology=topology)
    assert parse_module(found.hlo).name == "jit_pallas"
    kernel = parse_bundles(found.kernel("double"), CHIPS[topology.partition(":")[0]])
    [loop] = [each for each in kernel if each.is_loop]
    # A step doubles 512 × 4096 bfloat16, which fill 1,024 registers of 8 × 128 pairs: two cycles
    # a register at most, and not under half of one.
    assert 512 < sum(each.bundles for each in loop) < 3000
    assert kernel.total("dma") >= 1
    assert kernel.total("spill store") == 0
    with pytest.raises(KeyError, match="0 of the kernels"):
        found.kernel("nothing")


@needs_libtpu
@pytest.mark.tpu_compile
def test_what_does_not_compile_is_said():
    with pytest.raises(
        HexllmError,
        match=r"tests\.plan\.programs:lower does not compile: (?s:.*)ValueError: nothing",
    ):
        dump("tests.plan.programs:lower", name="nothing", topology="v5e:2x2")
