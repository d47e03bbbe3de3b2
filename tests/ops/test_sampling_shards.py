"""The same tokens on every number of devices: one process with eight of them samples every case."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from hexllm.engine.messages import SamplingParams
from hexllm.ops.sampling import NUM_TOP_LOGPROBS, SamplingRows, rows_from_params
from hexllm.ops.sampling_reference import sample_reference

#: Every kind of row; top_k=300 and top_p=0.99 leave more than the candidates of a device.
MIX = [
    {"temperature": 0.0},
    {"top_k": 1},
    {},
    {"temperature": 0.3},
    {"top_k": 40},
    {"top_k": 300, "temperature": 1.5},
    {"top_p": 0.9, "temperature": 0.5},
    {"top_p": 0.99},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    {"top_k": 400, "top_p": 0.999, "temperature": 0.6, "mask_unscaled": True},
]
#: Name of a case: columns, tokens among them, and the devices it is sampled on.
CASES = {
    "whole parts": (2400, None, (1, 4)),
    "uneven parts": (601, None, (1, 2, 4, 8)),
    "padded by the caller": (608, 601, (1, 4)),
    "parts smaller than the report": (19, None, (1, 8)),
}
RUNS = [(name, devices) for name, case in CASES.items() for devices in case[2]]
#: What is sampled in the form of a TPU, too.
ON_TPU = [("whole parts", 4), ("uneven parts", 8)]


def case(name):
    """Return the logits and rows of a case: of each kind of row, and of the oddest of logits."""
    V, vocab_size, _ = CASES[name]
    S, odd = 4 * len(MIX), 6
    logits = (np.random.default_rng(len(name)).normal(size=(S + odd, V)) * 2.5).astype(np.float32)
    logits[S] = 1.0  # all alike
    logits[S + 1] = -np.inf
    logits[S + 2] = np.nan
    logits[S + 3] = -np.inf
    logits[S + 3, V // 2] = 3.0  # one left by a grammar
    logits[S + 4, [V // 3, V // 2]] = 50.0  # the likeliest, twice
    logits[S + 5] = np.where(np.arange(V) % 2, 0.0, -0.0)
    if vocab_size is not None:
        logits[:, vocab_size:] = -np.inf
        logits[::2, vocab_size:] = 99.0  # a head's row of anything
    kinds = [MIX[i % len(MIX)] for i in range(S)] + [{"top_k": 3}, {}, {}, {"top_p": 0.9}]
    kinds += [{"temperature": 0.0}, {"top_p": 0.5}]
    params = [
        SamplingParams(max_tokens=1, seed=1000 + i, logprobs=20 if i % 3 else None, **kind)
        for i, kind in enumerate(kinds)
    ]
    return logits, rows_from_params(params, range(7, 7 + S + odd), S + odd), vocab_size


def sample_on(devices, name):
    """Sample a case on so many of this process's devices."""
    import jax
    from jax.sharding import Mesh

    from hexllm.ops.platform import TENSOR_AXIS, traced_for
    from hexllm.ops.sampling import sample

    def program(logits, rows):  # a new one each time: JAX keeps what it traced of the last
        return sample(logits, rows, vocab_size)

    logits, rows, vocab_size = case(name)
    with traced_for(Mesh(np.array(jax.devices()[:devices]), (TENSOR_AXIS,))):
        return jax.jit(program)(logits, rows)


def write(folder, name, got):
    fields = {field: np.asarray(value) for field, value in vars(got).items()}
    np.savez(Path(folder) / f"{name}.npz", **fields)


def write_all(folder):
    """Sample every case, in the form of the CPU and then in that of TPUs."""
    from hexllm.ops import platform, sampling_candidates
    from hexllm.ops.sampling_reference import lane_lists_reference

    for name, devices in RUNS:
        write(folder, f"{name} {devices}", sample_on(devices, name))
    platform.platform = lambda: "tpu"
    sampling_candidates.lane_lists = lane_lists_reference
    sampling_candidates.SEGMENT = 512
    sampling_candidates._MAX_LEVELS = sampling_candidates._MIN_LEVELS = 1
    for name, devices in ON_TPU:
        write(folder, f"{name} {devices} on tpu", sample_on(devices, name))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    root = Path(__file__).parents[2]
    code = f"from tests.ops.test_sampling_shards import write_all; write_all({str(folder)!r})"
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True, timeout=600)
    files = {(name, devices): f"{name} {devices}" for name, devices in RUNS}
    files |= {(name, devices, "tpu"): f"{name} {devices} on tpu" for name, devices in ON_TPU}
    return {run: np.load(folder / f"{file}.npz") for run, file in files.items()}


@pytest.mark.parametrize(("name", "devices"), RUNS)
def test_tokens_equal_the_reference(sampled, name, devices):
    logits, rows, vocab_size = case(name)
    logits = logits[:, :vocab_size]
    tokens = sampled[name, devices]["tokens"]
    assert (tokens < logits.shape[1]).all()
    assert (tokens >= 0).all()
    plain = np.r_[: len(tokens) - 6, -6, -3, -2, -1]  # the reference knows no row without a peak
    some = SamplingRows(**{field: column[plain] for field, column in vars(rows).items()})
    np.testing.assert_array_equal(tokens[plain], sample_reference(logits[plain], some))


@pytest.mark.parametrize(("name", "devices"), RUNS)
def test_tokens_and_reports_are_those_of_one_device(sampled, name, devices):
    one, many = sampled[name, 1], sampled[name, devices]
    np.testing.assert_array_equal(many["tokens"], one["tokens"])
    np.testing.assert_array_equal(many["top_tokens"], one["top_tokens"])
    np.testing.assert_allclose(many["logprobs"], one["logprobs"], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(many["top_logprobs"], one["top_logprobs"], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("name", "devices"), RUNS)
def test_reports_equal_the_reference(sampled, name, devices):
    logits, _, vocab_size = case(name)
    logits = logits[: 4 * len(MIX), :vocab_size]
    got = {field: value[: len(logits)] for field, value in sampled[name, devices].items()}
    expected = log_softmax(logits.astype(np.float64), axis=1)
    own = np.take_along_axis(expected, got["tokens"][:, None], 1)[:, 0]
    np.testing.assert_allclose(got["logprobs"], own, atol=2e-6)
    n = min(NUM_TOP_LOGPROBS, logits.shape[1])
    order = np.argsort(-expected, axis=1, kind="stable")[:, :n]
    np.testing.assert_array_equal(got["top_tokens"][:, :n], order)
    top = np.take_along_axis(expected, order, 1)
    np.testing.assert_allclose(got["top_logprobs"][:, :n], top, atol=2e-6)
    assert np.isneginf(got["top_logprobs"][:, n:]).all()


@pytest.mark.parametrize(("name", "devices"), ON_TPU)
def test_the_form_of_tpus_gives_the_same(sampled, name, devices):
    cpu, tpu = sampled[name, devices], sampled[name, devices, "tpu"]
    rows = np.delete(np.arange(len(cpu["tokens"])), 4 * len(MIX) + 2)  # NaN: any token will do
    np.testing.assert_array_equal(tpu["tokens"][rows], cpu["tokens"][rows])
    np.testing.assert_array_equal(tpu["top_tokens"][rows], cpu["top_tokens"][rows])
    for field in "logprobs", "top_logprobs":
        np.testing.assert_allclose(tpu[field][rows], cpu[field][rows], rtol=1e-6, atol=2e-6)
    assert tpu["tokens"].max() < (CASES[name][1] or CASES[name][0])
