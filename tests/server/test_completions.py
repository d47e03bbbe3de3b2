from __future__ import annotations

import json

import pytest

from tests.server.conftest import AppClient
from tests.server.fake_engine import FakeEngine

SENTENCE = "Hello, world! Stop here."


def ask(client, **fields):
    return client.post("/v1/completions", json={"model": "tiny", "max_tokens": 100, **fields})


def events(response) -> list:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_prompt_is_continued(client, engine, tokenizer):
    response = ask(client, prompt="Say it")
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": SENTENCE,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    prompt = tokenizer.encode("Say it")
    count = len(engine.script) + 1  # the end token is one too
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "total_tokens": len(prompt) + count,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (request,) = engine.requests
    assert request.prompt_token_ids == tuple(prompt)
    assert prompt[0] == 0, "the tokenizer's BOS"
    assert request.eos_token_ids == (1, 3)
    assert engine.aborted == []


def test_openai_s_defaults(client, engine):
    client.post("/v1/completions", json={"prompt": "x"})
    sampling = engine.requests[0].sampling
    assert sampling.max_tokens == 16
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.min_p, sampling.logprobs, sampling.ignore_eos) == (0.0, None, False)
    assert sampling.mask_unscaled is False


def test_parameters_reach_the_engine(client, engine):
    ask(
        client,
        prompt="x",
        temperature=0.5,
        top_p=0.9,
        top_k=7.0,
        min_p=0.1,
        seed=12,
        ignore_eos=True,
        stop_token_ids=[5],
        max_tokens=3,
        user="ann",
        priority=-2,
    )
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.seed, sampling.ignore_eos) == (0.1, 12, True)
    assert (sampling.stop_token_ids, sampling.max_tokens) == ((5,), 3)
    assert (request.user, request.priority) == ("ann", -2)


def test_a_hair_of_temperature_is_greedy(client, engine):
    ask(client, prompt="x", temperature=1e-30)
    assert engine.requests[0].sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("prompt", "count"), [("ab", 1), (["ab", "cd"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)]
)
def test_every_form_of_prompt(client, engine, prompt, count):
    body = ask(client, prompt=prompt, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
    assert [choice["text"] for choice in body["choices"]] == [SENTENCE] * 2 * count
    prompts = [request.prompt_token_ids for request in engine.requests]
    if prompt == [[5, 6], [7]]:
        assert prompts == [(5, 6), (5, 6), (7,), (7,)]
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts)) // 2


def test_without_special_tokens_there_is_no_bos(client, engine):
    ask(client, prompt="ab", add_special_tokens=False)
    assert 0 not in engine.requests[0].prompt_token_ids


def test_choices_have_seeds_of_their_own_and_the_first_has_the_request_s(client, engine):
    ask(client, prompt="x", n=3, seed=77)
    first = [request.sampling.seed for request in engine.requests]
    assert first[0] == 77
    assert len(set(first)) == 3
    assert all(0 <= seed < 2**32 for seed in first)
    engine.requests.clear()
    ask(client, prompt=["x", "y"], n=3, seed=77)
    assert [request.sampling.seed for request in engine.requests] == first * 2


def test_unseeded_requests_differ_and_repeat_after_a_restart(settings, tokenizer):
    from hexllm.server.app import create_app

    def seeds(server_seed: int) -> list[int]:
        engine = FakeEngine([5], eos=1)
        app = create_app(settings.model_copy(update={"seed": server_seed}), engine, tokenizer)
        for fields in ({}, {"seed": -1}, {"n": 2}):
            assert ask(AppClient(app), prompt="x", **fields).status_code == 200
        return [request.sampling.seed for request in engine.requests]

    first = seeds(0)
    assert len(set(first)) == 4
    assert seeds(0) == first
    assert seeds(1) != first


def test_a_negative_seed_is_a_seed(client, engine):
    ask(client, prompt="x", seed=-5)
    ask(client, prompt="x", seed=-5)
    ask(client, prompt="x", seed=-6)
    one, same, other = (request.sampling.seed for request in engine.requests)
    assert one == same != other
    assert 0 <= one < 2**32


def test_echo_gives_the_prompt_first(client, tokenizer):
    assert ask(client, prompt="Say: ", echo=True).json()["choices"][0]["text"] == (
        "Say: " + SENTENCE
    )
    ids = tokenizer.encode("Say: ", add_special_tokens=False)
    assert ask(client, prompt=ids, echo=True).json()["choices"][0]["text"] == "Say: " + SENTENCE
    streamed = events(ask(client, prompt=["A ", "B "], n=2, echo=True, stream=True))
    texts = dict.fromkeys(range(4), "")
    for event in streamed:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {i: ("A " if i < 2 else "B ") + SENTENCE for i in range(4)}


def test_a_stop_string_ends_the_answer_and_aborts_the_rest(client, engine):
    engine.eos = None
    body = ask(client, prompt="x", stop=["nowhere", "Stop"]).json()
    (choice,) = body["choices"]
    assert choice["text"] == "Hello, world! "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Stop")
    assert engine.aborted == [request.request_id for request in engine.requests]
    assert engine.open == set()


def test_a_stop_string_can_be_shown(client):
    text = ask(client, prompt="x", stop="Stop", include_stop_str_in_output=True).json()
    assert text["choices"][0]["text"] == "Hello, world! Stop"


def test_a_stop_token_ends_the_answer_and_has_no_text(client, engine, tokenizer):
    engine.eos = None
    stop_token = engine.script[3]
    (choice,) = ask(client, prompt="x", stop_token_ids=[stop_token]).json()["choices"]
    assert choice["text"] == tokenizer.decode(engine.script[:3])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_token)


def test_special_tokens_are_shown_on_request(client, engine, tokenizer):
    engine.script = [*tokenizer.encode("a", add_special_tokens=False), 2]
    assert ask(client, prompt="x").json()["choices"][0]["text"] == "a"
    shown = ask(client, prompt="x", skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown == "a<|im_start|>"  # and not the end token


def test_the_length_limit_is_a_finish_reason(client, tokenizer, engine):
    (choice,) = ask(client, prompt="x", max_tokens=2).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == tokenizer.decode(engine.script[:2])


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("stop", [None, "Stop", "world"])
def test_a_stream_is_the_same_text(client, engine, chunk, stop):
    engine.chunk = chunk
    whole = ask(client, prompt="x", stop=stop).json()
    streamed = events(
        ask(client, prompt="x", stop=stop, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(event["choices"][0]["text"] for event in streamed[:-1])
    assert text == whole["choices"][0]["text"]
    assert streamed[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in streamed[:-1])
    assert {event["object"] for event in streamed} == {"text_completion"}


def test_a_stream_carries_no_usage_unless_asked(client):
    assert all("usage" not in event for event in events(ask(client, prompt="x", stream=True)))


def test_logprobs(client, engine, tokenizer):
    body = ask(client, prompt="x", logprobs=2).json()
    logprobs = body["choices"][0]["logprobs"]
    ids = [*engine.script, 1]
    assert logprobs["tokens"] == [tokenizer.token_text(i) for i in ids]
    assert logprobs["token_logprobs"] == [-0.25] * len(ids)
    assert logprobs["top_logprobs"][0] == {
        tokenizer.token_text(ids[0]): -0.25,
        tokenizer.token_text(ids[0] + 1): -1.25,
    }
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert SENTENCE[offset:].startswith(token)
    assert engine.requests[0].sampling.logprobs == 2


def test_logprobs_of_a_stream_are_the_same_and_those_of_a_stop_string_are_cut(client):
    for stop in (None, "Stop"):
        whole = ask(client, prompt="x", logprobs=1, stop=stop).json()["choices"][0]
        streamed = events(ask(client, prompt="x", logprobs=1, stop=stop, stream=True))
        for key in whole["logprobs"]:
            pieces = [event["choices"][0]["logprobs"] for event in streamed]
            joined = [item for piece in pieces if piece for item in piece[key]]
            assert joined == whole["logprobs"][key]
        shown = "".join(whole["logprobs"]["tokens"])
        assert ("Stop" in shown) is (stop is None)


def test_logprobs_zero_gives_the_sampled_token_s_alone(client):
    logprobs = ask(client, prompt="x", logprobs=0, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.25]
    assert logprobs["top_logprobs"] is None


def test_an_infinite_logprob_is_json(client, engine, monkeypatch):
    from hexllm.engine.messages import TokenLogprobs

    monkeypatch.setattr(
        FakeEngine,
        "logprobs_of",
        staticmethod(lambda token, _top: TokenLogprobs(float("-inf"), ((token, float("-inf")),))),
    )
    response = ask(client, prompt="x", logprobs=1, max_tokens=1)
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_cached_tokens_are_reported(client, engine):
    engine.cached_tokens = 2
    usage = ask(client, prompt=["abc", "def"], n=2).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_an_engine_error_is_a_500_and_in_a_stream_an_event(client, engine, error_of):
    engine.error, engine.error_after = "it broke", 2
    assert "it broke" in error_of(ask(client, prompt="x"), 500)["message"]
    response = ask(client, prompt="x", stream=True)
    assert response.status_code == 200
    *_, last = events(response)
    assert last["error"]["message"] == "it broke"
    engine.error_after = 0
    error_of(ask(client, prompt="x", stream=True), 500)


def test_one_failing_choice_ends_the_others(client, engine, error_of):
    engine.error, engine.error_after = "it broke", 2
    error_of(ask(client, prompt="x", n=4), 500)
    assert engine.open == set()


@pytest.mark.parametrize("name", ["", "hexllm", "tiny", "tiny/model", None])
def test_the_model_s_names(client, name):
    assert ask(client, prompt="x", model=name).status_code == 200


def test_another_model_is_not_here(client, error_of):
    error = error_of(ask(client, prompt="x", model="gpt-4"), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "'tiny'" in error["message"]
