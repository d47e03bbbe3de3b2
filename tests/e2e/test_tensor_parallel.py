"""A model spread over two devices, served over HTTP: the answers of one device."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hexllm.model.hf_config import HfConfig
from hexllm.plugins.models.qwen2 import Qwen2
from hexllm.testing.synthetic import write_model
from tests.e2e.serving import environment, serve
from tests.engine.tiny import CACHE
from tests.families.checkpoints import write_tokenizer
from tests.families.small import small

CONFIG = small("Qwen2ForCausalLM", "qwen2", num_key_value_heads=1, vocab_size=401)
FLAGS = (
    "--dtype=float32",
    "--prefill_len_padding=64",
    "--max_model_len=64",
    "--max_running_seqs=4",
    "--num_blocks=64",
    f"--compilation_cache_dir={CACHE}",
)
PROMPTS = [[7], [9, 8, 7, 6, 5, 4, 3], list(range(100, 140)), [400, 399]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    family = Qwen2()
    write_model(family, family.config(HfConfig(CONFIG, "config.json")), CONFIG, folder)
    write_tokenizer(folder, CONFIG["vocab_size"])
    return folder


def test_served_on_two_devices_as_on_one(model, tmp_path):
    env = environment(
        XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_DISABLE_MOST_OPTIMIZATIONS="1"
    )
    answers = []
    for size in (1, 2):
        flags = (f"--model={model}", f"--tensor_parallel_size={size}", *FLAGS)
        with serve(tmp_path, *flags, env=env) as served:

            def ask(prompt, served=served):
                return served.complete(
                    prompt=prompt, temperature=0, max_tokens=12, logprobs=2, ignore_eos=True
                )["logprobs"]

            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                answers.append(list(pool.map(ask, PROMPTS)))
            assert served.metric("hexllm:late_compiles_total") == 0
            assert f"on {size} cpu device" in served.log.read_text()
    for one, two in zip(*answers, strict=True):
        assert one["tokens"] == two["tokens"]
        np.testing.assert_allclose(one["token_logprobs"], two["token_logprobs"], atol=1e-4)


@pytest.mark.parametrize(
    ("size", "devices", "said"),
    [
        (
            3,
            4,
            "tensor_parallel_size=3 does not divide num_attention_heads=4 ({model}). "
            "Use 1, 2 or 4.",
        ),
        (
            4,
            2,
            "tensor_parallel_size=4 needs as many devices, and JAX sees 2 (cpu). Lower it, or set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=4: a CPU is then as many devices.",
        ),
    ],
)
def test_a_size_that_does_not_fit_is_refused(size, devices, said, model):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hexllm", "serve", "--port=0"),
            *(f"--model={model}", f"--tensor_parallel_size={size}", *FLAGS),
        ],
        env=environment(XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    said = said.format(model=model)
    assert said in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
