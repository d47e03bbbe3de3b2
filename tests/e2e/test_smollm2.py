"""The real model, served over HTTP: equal to transformers, and to itself under any load."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.e2e.reference import greedy, load_reference
from tests.e2e.serving import serve

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of motion are:\n1.",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients: 2 eggs, 300 g flour, 1 l milk.\nMethod:",
    "Q: What is 12 times 12?\nA:",
    "In 1969, Apollo 11",
    "import numpy as np\n\n",
    "Die Hauptstadt von Deutschland ist",
    "The mitochondria is",
    "SELECT name, age FROM people WHERE",
    "My favourite book is",
    "To be, or not to be,",
    "The difference between a virus and a bacterium is that",
    "<html>\n<head>\n<title>",
    "She opened the door and saw",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8,",
]
COUNT = 64
#: Enough for all 64 requests of the mixed test at once.
BLOCKS = 640
FLAGS = ("--max_model_len=640", "--max_running_seqs=64", "--dtype=float32")


@pytest.fixture(scope="module")
def served(smollm2_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    with serve(folder, f"--model={smollm2_gguf}", f"--num_blocks={BLOCKS}", *FLAGS) as served:
        yield served
        assert served.metric("hexllm:late_compiles_total") == 0
        assert served.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.torch
def test_greedy_tokens_and_logprobs_equal_transformers(served, smollm2_gguf):
    from transformers import AutoTokenizer

    from hexllm.core.plugins import load_plugins
    from hexllm.core.settings import PluginSettings

    directory = load_plugins(PluginSettings()).open_checkpoint(str(smollm2_gguf)).directory()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = load_reference(smollm2_gguf)
    worst = 0.0
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        expected, rows = greedy(model, ids, COUNT)
        choice = served.complete(
            prompt=ids, temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=5
        )
        got = choice["logprobs"]
        texts = [tokenizer.decode([token]) for token in expected]
        assert [t for t in got["tokens"] if not t.startswith("bytes:")] == [
            t for t in texts if "�" not in t
        ], prompt
        assert choice["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        own = rows[np.arange(COUNT), expected]
        worst = max(worst, np.abs(own - got["token_logprobs"]).max())
        for row, top in zip(rows, got["top_logprobs"], strict=True):
            best = np.sort(row)[::-1][: len(top)]
            worst = max(worst, np.abs(best - sorted(top.values(), reverse=True)).max())
    assert worst < 1e-4


def mixed_bodies(count=64, growers=18):
    """Return requests of 1 to 500 tokens, streamed and not, greedy and seeded.

    The first ones are short and grow for long, so that blocks run out while they run.
    """
    rng = random.Random(0)
    bodies = []
    for i in range(count):
        length = rng.randint(1, 30) if i < growers else 500 if i == growers else 0
        body = {
            "prompt": [rng.randrange(17, 49152) for _ in range(length or int(500 ** rng.random()))],
            "max_tokens": 100 if i < growers else rng.randint(1, 16),
            "ignore_eos": i < growers,
            "stream": bool(i % 2),
            "temperature": 0,
        }
        if i % 4 >= 2:
            body |= {"temperature": 0.8, "seed": i, "top_p": 0.95, "top_k": 50 * (i % 3)}
        bodies.append(body)
    return bodies


def outcome(served, body):
    choice = served.complete(**body)
    return choice["text"], choice["finish_reason"]


def all_at_once(served, bodies):
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: outcome(served, body), bodies))


@pytest.fixture(scope="module")
def solo(served):
    return [outcome(served, body) for body in mixed_bodies()]


def test_64_mixed_requests_at_once_give_what_each_gives_alone(served, solo):
    before = served.metric("vllm:num_preemptions_total")
    assert all_at_once(served, mixed_bodies()) == solo
    assert served.metric("vllm:num_preemptions_total") == before


def test_with_a_tenth_of_the_blocks_they_give_the_same(smollm2_gguf, tmp_path, solo):
    with serve(
        tmp_path, f"--model={smollm2_gguf}", f"--num_blocks={BLOCKS // 10}", *FLAGS
    ) as small:
        assert all_at_once(small, mixed_bodies()) == solo
        assert small.metric("vllm:num_preemptions_total") > 0
        assert small.metric("vllm:kv_cache_usage_perc") == 0
        assert small.metric("hexllm:late_compiles_total") == 0


def test_a_chat_streamed_and_whole(served):
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    answer = served.post("/v1/chat/completions", body).json()
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    predicted = served.post(
        "/generate", {"instances": [{"@requestFormat": "chatCompletions", **body}]}
    ).json()
    assert predicted["predictions"]["choices"][0]["message"]["content"] == text


def test_stop_strings_end_the_request_in_the_engine_too(served):
    body = {"prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    whole = served.complete(**body)["text"]
    stop = whole[20:26]
    expected = whole[: whole.index(stop)]
    for stream in (False, True):
        choice = served.complete(**body, stop=[stop], stream=stream)
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        served.wait_for(lambda: served.metric("vllm:num_requests_running") == 0)
