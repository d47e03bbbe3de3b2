"""The loading benchmark's own parts, on checkpoints of some megabytes; nothing here is timed."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest

from benchmarks import checkpoints, loading
from benchmarks.checkpoints import CASES, Case, case_config, write_case
from benchmarks.loading import Result, load, main, measure, read_and_copy
from hexllm.model.loading import param_specs
from hexllm.model.specs import flatten
from hexllm.testing.checkpoints import FilesCheckpoint

SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def small(monkeypatch):
    """Cases of the same kinds, whose layers are small."""
    monkeypatch.setattr(checkpoints, "BASE", checkpoints.BASE | SMALL)
    small = dict.fromkeys(("moe_intermediate_size", "intermediate_size_mlp"), 96)
    cases = tuple(
        Case(
            c.name,
            c.architecture,
            c.stored,
            c.dtype,
            c.config | SMALL | {k: v for k, v in small.items() if k in c.config},
        )
        for c in CASES
    )
    monkeypatch.setattr(loading, "CASES", cases)
    return {case.name: case for case in cases}


def parameters(case, nbytes):
    family, cfg = checkpoints.read_model(case_config(case, nbytes))
    specs = flatten(param_specs(family, cfg))
    return sum(math.prod(spec.shape) for spec in specs.values())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_case_s_checkpoint_loads_with_nothing_left_over(tmp_path, small, name):
    case = small[name]
    written = write_case(case, 700_000, tmp_path)
    assert 400_000 < written < 1_200_000
    infos = FilesCheckpoint(tmp_path).tensors().values()
    assert {info.dtype for info in infos} == {case.stored}
    assert sum(info.nbytes for info in infos) == written
    arrays = load(tmp_path, case.dtype)()
    assert {array.dtype.name for array in arrays} == {case.dtype}
    assert sum(array.size for array in arrays) == parameters(case, 700_000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_real_run_s_checkpoint_has_a_gigabyte_and_no_tensor_that_is_most_of_it(case):
    family, cfg = checkpoints.read_model(case_config(case, 10**9))
    itemsize = np.dtype(checkpoints.DTYPES[case.stored]).itemsize
    sizes = [
        itemsize * math.prod(spec.shape) for spec in flatten(param_specs(family, cfg)).values()
    ]
    assert sum(sizes) == pytest.approx(1e9, rel=0.1)
    assert max(sizes) < sum(sizes) / 3


def test_more_bytes_are_more_layers(small):
    case = small["llama f32"]
    layers = [case_config(case, n)["num_hidden_layers"] for n in (0, 1 << 20, 8 << 20)]
    assert layers[0] == 1
    assert layers[0] < layers[1] < layers[2]
    nbytes = 4 * parameters(case, 8 << 20)
    assert abs(nbytes - (8 << 20)) < 200_000


def test_the_floor_reads_every_byte_of_every_tensor_and_keeps_it(tmp_path, small):
    written = write_case(small["mixtral bf16, 8 experts"], 700_000, tmp_path)
    arrays = read_and_copy(tmp_path)()
    assert sum(array.nbytes for array in arrays) == written
    checkpoint = FilesCheckpoint(tmp_path)
    stored = sorted(checkpoint.read(name).tobytes() for name in checkpoint.tensors())
    assert sorted(np.asarray(array).tobytes() for array in arrays) == stored


def test_the_peak_counts_what_is_held_while_the_work_runs():
    size = 64 << 20

    def work():
        waste = np.ones(size, np.uint8)  # freed at the end: a peak, not a residue
        return [jax.numpy.asarray(waste[:1000])]

    measured = measure(work)
    assert measured["peak"] > size
    assert measured["nbytes"] == 1000
    assert measured["seconds"] > 0
    assert measure(list)["peak"] < size  # the peak before does not count


@pytest.mark.parametrize(
    ("load_s", "peak", "met"),
    [(2.0, 100, True), (2.1, 100, False), (1.0, 130, False), (1.0, 129, True), (0.5, 90, True)],
)
def test_both_bounds_are_judged(load_s, peak, met):
    result = Result("x", nbytes=100, largest=30, load_s=load_s, floor_s=1.0, peak=peak)
    assert result.is_met == met
    assert result.row().endswith("met" if met else "MISSED")


@pytest.mark.usefixtures("small")
def test_a_run_prints_a_row_a_case_and_its_status_is_the_verdict(tmp_path, capsys, monkeypatch):
    seconds = {"load": 4.0, "floor": 1.0}
    asked = []

    def in_child(what, directory, dtype):
        asked.append((what, dtype, len(list(directory.glob("*.safetensors")))))
        return {"seconds": seconds[what], "nbytes": 1, "peak": 1000}

    monkeypatch.setattr(loading, "in_child", in_child)
    arguments = ["--gigabytes", "0.0007", "--rounds", "2", "--cases", "phi3", "--cold"]
    assert main([*arguments, "--directory", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("MISSED") == 2
    assert [what for what, _, _ in asked] == ["floor", "load"] * 4
    assert all(shards > 1 for _, _, shards in asked)
    assert list(tmp_path.iterdir()) == []  # a gigabyte a case is not left behind
    seconds["load"] = 1.5
    assert main([*arguments, "--directory", str(tmp_path)]) == 0


def test_a_child_prints_its_figures_last(tmp_path, small, capsys):
    write_case(small["llama f32 as bf16"], 700_000, tmp_path)
    for what in ("load", "floor"):
        assert main(["--child", what, str(tmp_path), "bfloat16"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["nbytes"] > 100_000
