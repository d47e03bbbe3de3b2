"""A real server under twice the load it can bear, with clients that leave midway."""

import asyncio
import json

import pytest

from benchmarks.load import Target, parse_loopback
from benchmarks.overload import Plan, overload
from tests.e2e.serving import serve
from tests.engine.tiny import CACHE, CONFIG
from tests.server.conftest import write_tokenizer

RUNNING, QUEUED = 4, 8
FLAGS = (
    "--load_format=dummy",
    "--block_size=8",
    "--max_model_len=256",
    "--prefill_len_padding=64",
    f"--max_running_seqs={RUNNING}",
    f"--max_queued_requests={QUEUED}",
    f"--compilation_cache_dir={CACHE}",
)
PLAN = Plan(
    seconds=15, capacity_seconds=4, concurrency=RUNNING + QUEUED, prompt_words=30, output_len=60
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 400}))
    write_tokenizer(folder)
    return folder


def test_overload_ends_in_429s_alone_and_leaves_nothing_behind(model, tmp_path):
    # So few blocks that sequences are preempted, too.
    with serve(tmp_path, f"--model={model}", "--num_blocks=40", *FLAGS) as served:
        host, port = parse_loopback(served.url)
        report = asyncio.run(overload(Target(host, port, ""), PLAN, served.process.pid))
        assert report.faults() == []
        assert report.sent == report.completed + report.refused + report.dropped
        assert report.completed > 20
        assert report.dropped > 0
        assert served.metric("hexllm:requests_refused_total") >= report.refused > 0
        assert served.metric("hexllm:late_compiles_total") == 0
        assert served.metric("vllm:request_success_total", 'finished_reason="error"') == 0
        # All that are let in take as long as their place in the queue, not longer and longer.
        places = RUNNING + QUEUED
        assert report.latency_p99 < 4 * places / report.capacity + 1
        steps = served.metric("hexllm:engine_steps_total")
        for share in ("host", "device"):
            assert served.metric("hexllm:step_seconds_count", f'share="{share}"') == steps
        shares = served.metric("hexllm:step_seconds_sum")
        assert shares == pytest.approx(served.metric("hexllm:engine_step_seconds_total"))
        # It serves as before.
        text = served.complete(prompt="red ox", max_tokens=5, temperature=0, ignore_eos=True)
        assert text["finish_reason"] == "length"
