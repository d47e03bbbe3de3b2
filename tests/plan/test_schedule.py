from __future__ import annotations

import importlib.util
from collections import Counter

import pytest

from hexllm.plan.chips import CHIPS
from hexllm.plan.collectives import Collective
from hexllm.plan.hlo import parse_module
from hexllm.plan.schedule import KernelPrice, simulate
from tests.plan.programs import KEPT, lower, stored

V5E = CHIPS["v5e"]
PEAK, RATE = V5E.peak_flops, V5E.hbm_bytes_per_s


def us(*, flops=0.0, hbm=0.0):
    """Return microseconds of products at the peak and of bytes at the bandwidth, added up."""
    return 1e6 * (flops / PEAK + hbm / RATE)


def estimate(name, **options):
    return simulate(parse_module(stored(name)), V5E, **options)


def test_a_matmul_waits_for_its_weight_and_multiplies():
    found = estimate("matmul")
    flops, weight = 2 * 2048 * 4096 * 7168, 4096 * 7168 * 2
    assert found.ledger.flops == flops
    assert found.floor_us == pytest.approx(us(flops=flops))
    assert found.roof_us == pytest.approx(us(flops=flops, hbm=weight))
    assert found.ledger.seconds["copy wait"] * 1e6 == pytest.approx(us(hbm=weight))
    assert found.ledger.hbm_bytes == {
        "matmul": (2048 * 4096 + 2048 * 7168) * 2,
        "async copy": weight,
        "copy wait": 0,
    }
    # XLA's cycles are more than the peak's: the difference is all that its estimate adds.
    assert found.xla_us - found.roof_us == pytest.approx(944550 / 1500 - us(flops=flops))


def test_prefetched_weights_hide_behind_the_others():
    found = estimate("mlp")
    weights = 4 * 2 * 4096 * 8192 * 2
    assert found.ledger.flops == 4 * 2 * 2 * 64 * 4096 * 8192
    assert found.floor_us == pytest.approx(us(hbm=weights), rel=0.01)
    # The first weight comes before anything multiplies, the last product after all copies.
    most = us(flops=2 * 64 * 4096 * 8192, hbm=weights + 4096 * 8192 * 2)
    assert found.floor_us < found.roof_us < 1.01 * most
    assert found.roof_us >= us(hbm=found.ledger.total_hbm_bytes)
    assert found.ratio == pytest.approx(found.roof_us / found.floor_us)


def test_a_loop_is_as_often_its_body():
    found = estimate("scan")
    assert found.ledger.flops == 12 * 2 * 64 * 4096 * 4096
    assert found.ledger.counts["matmul"] == 12
    assert found.roof_us == pytest.approx(us(hbm=12 * 4096 * 4096 * 2), rel=0.01)
    [matmul] = [each for each in found.ledger.top() if each.category == "matmul"]
    assert matmul.times == 12


def test_a_conditional_is_its_dearest_branch_or_the_one_that_is_said():
    dearest, product, double = (
        estimate("cond", **options)
        for options in ({}, {"branches": {"cond": 1}}, {"branches": {"jit.cond./cond": 0}})
    )
    flops = 2 * 64 * 4096 * 4096
    assert dearest.ledger.flops == product.ledger.flops == flops
    assert double.ledger.flops == 0
    assert dearest.roof_us == product.roof_us == product.cheapest_roof_us
    assert dearest.cheapest_roof_us == double.roof_us == double.cheapest_roof_us
    assert double.roof_us < 0.2 * dearest.roof_us
    assert dearest.cheapest_xla_us == double.xla_us < dearest.xla_us


def test_a_gather_reads_its_rows_and_a_scatter_writes_in_place():
    found = estimate("gather")
    row = 1024 * 2
    gathered, scattered = 64 * 1024 * row, 64 * row
    # Rows are read, written, and read again to be added up; the pool itself stays where it is.
    assert found.ledger.total_hbm_bytes == pytest.approx(3 * gathered + 2 * scattered, rel=0.01)
    assert found.copies_of((131072, 1024)) == 0


def test_a_kernel_costs_what_the_caller_says():
    size, flops = 4096 * 4096 * 2, 2 * 4096**3
    rest = estimate("pallas", kernels={"double": (0.0, 0.0)})
    assert rest.ledger.counts["pallas"] == 1
    slow = estimate("pallas", kernels={r"/double/pallas_call$": (500.0, 0.0)})
    assert slow.ledger.seconds["pallas"] == pytest.approx(500e-6)
    wide = estimate("pallas", kernels={"^double": KernelPrice(1.0, size)})
    assert wide.ledger.seconds["pallas"] * 1e6 == pytest.approx(us(hbm=size))
    assert not wide.ledger.unpriced
    # The weight's copy has ended before the long kernel does, and waits for the wide one's bytes.
    assert slow.roof_us == pytest.approx(500 + us(flops=flops), rel=0.001)
    assert wide.roof_us == pytest.approx(us(flops=flops, hbm=2 * size), rel=0.001)
    assert wide.floor_us == pytest.approx(us(flops=flops), rel=0.001)


def test_a_kernel_without_a_price_is_named():
    found = estimate("pallas", kernels={"other": (1.0, 1.0)})
    assert list(found.ledger.unpriced) == ["double.1 jit(pallas)/double/pallas_call"]
    assert found.ledger.seconds["pallas"] > 0


def test_collectives_stand_in_the_ledger():
    found = estimate("tensor_parallel")
    reduce = Collective("all-reduce", 4, 64 * 4096 * 2)
    assert found.ledger.collectives == Counter({reduce: 1})
    assert found.ledger.seconds["collective"] == pytest.approx(reduce.seconds(V5E))
    assert found.ledger.flops == 2 * 2 * 64 * 4096 * 2048


def test_an_asynchronous_collective_counts_until_its_end():
    found = estimate("permute")
    [permute] = found.ledger.collectives
    assert found.roof_us == pytest.approx(permute.seconds(V5E) * 1e6, rel=0.2)


HEAD = "HloModule m, is_scheduled=true\n\n"
PALLAS = 'custom_call_target="tpu_custom_call"'
POOL = "bf16[512,32,256]{2,1,0:T(8,128)(2,1)}"
POOL_BYTES = 512 * 32 * 256 * 2


def pool_program(line, result=POOL):
    return HEAD + (
        f"ENTRY %main (pool: bf16[512,32,256]) -> {result} {{\n"
        f"  %pool = {POOL} parameter(0)\n"
        f"  ROOT %r = {line}\n}}\n"
    )


TRANSPOSED = POOL.replace("2,1,0", "2,0,1")
COPY_START = f"({POOL}, {POOL}, u32[]{{:S(2)}}) copy-start(%pool)"


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        (f"{POOL} copy(%pool)", 1),
        (f"{TRANSPOSED} copy(%pool)", 1),
        (COPY_START, 1),
        (COPY_START.replace("(2,1)}", "(2,1)S(1)}", 1), 0),
        (f"{POOL.replace('(2,1)}', '(2,1)S(1)}')} copy(%pool)", 0),
        (f"{POOL} custom-call(%pool), {PALLAS}", 0),
    ],
)
def test_copies_of_a_pool_are_seen(line, copies):
    found = simulate(parse_module(pool_program(line)), V5E, kernels={".": (1.0, 0.0)})
    assert found.copies_of((512, 32, 256)) == found.copies_of((512, 32, 256), "bf16") == copies
    assert found.copies_of((512, 32, 256), "f32") == found.copies_of((512, 32)) == 0


@pytest.mark.parametrize(
    ("fused", "copies", "moved"),
    [
        (f"{POOL} copy(%p)", 1, 2 * POOL_BYTES),
        (f"{POOL} negate(%p)", 1, 2 * POOL_BYTES),
        (f"{POOL} dynamic-update-slice(%p, %row, %zero, %zero, %zero)", 0, 2 * 32 * 256 * 2),
    ],
)
def test_a_fusion_copies_unless_it_updates_in_place(fused, copies, moved):
    row = "bf16[1,32,256]{2,1,0:T(8,128)(2,1)}"
    text = HEAD + (
        f"%inner (p: bf16[512,32,256], row: bf16[1,32,256]) -> bf16[512,32,256] {{\n"
        f"  %p = {POOL} parameter(0)\n  %row = {row} parameter(1)\n"
        f"  %zero = s32[] constant(0)\n  ROOT %u = {fused}\n}}\n\n"
        f"ENTRY %main (pool: bf16[512,32,256], new: bf16[1,32,256]) -> bf16[512,32,256] {{\n"
        f"  %pool = {POOL} parameter(0)\n  %new = {row} parameter(1)\n"
        f"  ROOT %f = {POOL} fusion(%pool, %new), kind=kLoop, calls=%inner\n}}\n"
    )
    found = simulate(parse_module(text), V5E)
    assert found.copies_of((512, 32, 256)) == copies
    assert found.ledger.hbm_bytes["fusion"] == moved


def test_copies_in_a_loop_count_as_often_as_they_run():
    state = f"(s32[]{{:T(128)}}, {POOL})"
    text = HEAD + (
        f"%body (s: (s32[], bf16[512,32,256])) -> (s32[], bf16[512,32,256]) {{\n"
        f"  %s = {state} parameter(0)\n"
        f"  %i = s32[]{{:T(128)}} get-tuple-element(%s), index=0\n"
        f"  %x = {POOL} get-tuple-element(%s), index=1\n"
        f"  %c = {POOL} copy(%x)\n"
        f"  ROOT %t = {state} tuple(%i, %c)\n}}\n\n"
        f"%until (s: (s32[], bf16[512,32,256])) -> pred[] {{\n"
        f"  %s = {state} parameter(0)\n  %n = s32[]{{:T(128)}} constant(32)\n"
        f"  %i = s32[]{{:T(128)}} get-tuple-element(%s), index=0\n"
        f"  ROOT %lt = pred[]{{:T(512)}} compare(%i, %n), direction=LT\n}}\n\n"
        f"ENTRY %main (a: s32[], b: bf16[512,32,256]) -> (s32[], bf16[512,32,256]) {{\n"
        f"  %a = s32[]{{:T(128)}} parameter(0)\n  %b = {POOL} parameter(1)\n"
        f"  %t = {state} tuple(%a, %b)\n"
        f"  ROOT %w = {state} while(%t), condition=%until, body=%body\n}}\n"
    )
    found = simulate(parse_module(text), V5E)
    assert found.copies_of((512, 32, 256)) == 32
    assert found.roof_us == pytest.approx(us(hbm=32 * 2 * POOL_BYTES))


def test_a_loop_that_ends_when_data_says_so_is_named():
    """A bisection goes on while ``low + 1 < high``: no number in its condition is its length."""
    there = "f32[1024,1024]{1,0:T(8,128)}"
    state = f"(s32[]{{:T(128)}}, s32[]{{:T(128)}}, {there})"
    text = HEAD + (
        f"%body (s: (s32[], s32[], f32[1024,1024])) -> (s32[], s32[], f32[1024,1024]) {{\n"
        f"  %s = {state} parameter(0)\n"
        f"  %low = s32[]{{:T(128)}} get-tuple-element(%s), index=0\n"
        f"  %x = {there} get-tuple-element(%s), index=2\n"
        f"  %y = {there} negate(%x)\n"
        f"  ROOT %t = {state} tuple(%low, %low, %y)\n}}\n\n"
        f"%until (s: (s32[], s32[], f32[1024,1024])) -> pred[] {{\n"
        f"  %s = {state} parameter(0)\n  %one = s32[]{{:T(128)}} constant(1)\n"
        f"  %low = s32[]{{:T(128)}} get-tuple-element(%s), index=0\n"
        f"  %high = s32[]{{:T(128)}} get-tuple-element(%s), index=1\n"
        f"  %next = s32[]{{:T(128)}} add(%low, %one)\n"
        f"  ROOT %lt = pred[]{{:T(512)}} compare(%next, %high), direction=LT\n}}\n\n"
        f"ENTRY %main (a: s32[], x: f32[1024,1024]) -> (s32[], s32[], f32[1024,1024]) {{\n"
        f"  %a = s32[]{{:T(128)}} parameter(0)\n  %x = {there} parameter(1)\n"
        f"  %t = {state} tuple(%a, %a, %x)\n"
        f"  ROOT %w = {state} while(%t), condition=%until, body=%body, "
        f'metadata={{op_name="bisect"}}\n}}\n'
    )
    once, often = (simulate(parse_module(text), V5E, loops=n) for n in (None, {"^w bisect$": 32}))
    assert once.ledger.unpriced == {"while bisect": 1}
    assert not often.ledger.unpriced
    assert once.roof_us == pytest.approx(us(hbm=2 * 4 * 2**20))
    assert often.roof_us == pytest.approx(32 * once.roof_us)


def prefetch(kernel_bytes):
    """Copy 8 MiB to VMEM, run a kernel, use the copy."""
    big, there = "f32[2048,1024]{1,0:T(8,128)}", "f32[2048,1024]{1,0:T(8,128)S(1)}"
    text = HEAD + (
        f"ENTRY %main (w: f32[2048,1024]) -> f32[2048,1024] {{\n"
        f"  %w = {big} parameter(0)\n"
        f"  %s = ({there}, {big}, u32[]{{:S(2)}}) copy-start(%w)\n"
        f"  %k = f32[8]{{0:T(128)S(1)}} custom-call(), {PALLAS}\n"
        f"  %d = {there} copy-done(%s)\n"
        f"  ROOT %n = {there} negate(%d)\n}}\n"
    )
    return simulate(parse_module(text), V5E, kernels={"^k": (20.0, kernel_bytes)})


def test_a_copy_gets_the_bandwidth_that_others_leave():
    copy = us(hbm=2**23)
    assert 10 < copy < 20
    assert prefetch(0).roof_us == pytest.approx(20)
    # A kernel that takes 15 µs of the bandwidth in 20 leaves 5 for the copy.
    assert prefetch(15e-6 * RATE).roof_us == pytest.approx(15 + copy)
    assert prefetch(30e-6 * RATE).roof_us == pytest.approx(30 + copy)


def test_what_xla_gives_no_time_is_named():
    """A sort in VMEM moves nothing and has no cycles: it counts as nothing, and is said."""
    there = "f32[64,4096]{1,0:T(8,128)S(1)}"
    text = HEAD + (
        f"ENTRY %main (x: f32[64,4096]) -> f32[64,4096] {{\n  %x = {there} parameter(0)\n"
        f"  ROOT %s = {there} sort(%x), dimensions={{1}}, to_apply=%less\n}}\n"
    )
    found = simulate(parse_module(text), V5E)
    assert found.roof_us == 0
    assert found.ledger.unpriced == {"sort": 1}


@pytest.mark.parametrize("name", KEPT)
def test_the_three_times_stand_in_their_order(name):
    found = estimate(name, kernels={"double": (50.0, 2 * 4096 * 4096 * 2)})
    assert 0 < found.floor_us <= found.roof_us <= found.xla_us
    assert found.cheapest_roof_us <= found.roof_us
    assert found.roof_us >= us(hbm=found.ledger.total_hbm_bytes) * 0.999
    assert sum(found.ledger.seconds.values()) * 1e6 == pytest.approx(found.roof_us)
    assert estimate(name, floor_bytes=1e9).floor_us == pytest.approx(max(us(hbm=1e9), 0))


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler"
)


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("matmul", 2 * 2048 * 4096 * 7168),
        ("mlp", 4 * 2 * 2 * 64 * 4096 * 8192),
        ("scan", 12 * 2 * 64 * 4096 * 4096),
        ("cond", 2 * 64 * 4096 * 4096),
        ("tensor_parallel", 2 * 2 * 64 * 4096 * 2048),
        ("einsums", 2 * 8 * 64 * 512 * 256 + 2 * 64 * 1024 * 4096),
    ],
)
def test_the_products_of_what_this_libtpu_makes(name, flops, topology):
    module = parse_module(lower(name, topology).compile().as_text())
    found = simulate(module, CHIPS[topology[:3]])
    assert found.ledger.flops == flops
    assert 0 < found.floor_us <= found.roof_us <= found.xla_us
    assert found.roof_us < 2 * found.floor_us + 10


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_the_bytes_of_what_this_libtpu_makes(topology):
    """Newer ones gather on the SparseCore of a v6e, in an asynchronous call."""
    module = parse_module(lower("gather", topology).compile().as_text())
    found = simulate(module, CHIPS[topology[:3]])
    assert found.ledger.total_hbm_bytes == pytest.approx(3 * 64 * 1024 * 1024 * 2, rel=0.02)
    assert found.copies_of((131072, 1024)) == 0
