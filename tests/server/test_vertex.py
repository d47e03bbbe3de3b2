from __future__ import annotations

import json

import pytest

from hexllm.core.settings import Settings
from hexllm.server.app import create_app
from tests.server.conftest import AppClient
from tests.server.test_completions import SENTENCE, events

HI = [{"role": "user", "content": "Hi"}]
WRAPPED = f"Prompt:\nSay it\nOutput:\n{SENTENCE}"


def predict(client, body):
    return client.post("/generate", json=body)


def test_hex_llm_s_wrapped_answer(client, engine):
    engine.script = [*engine.script]
    body = {"instances": [{"prompt": " Say it\n", "max_tokens": 50}]}
    response = predict(client, body)
    assert response.json() == {"predictions": [WRAPPED]}
    assert response.headers["content-type"] == "application/json"


def test_newlines_around_the_output_are_cut_in_the_wrapped_answer(client, engine, tokenizer):
    engine.script = tokenizer.encode("\n\n one\n", add_special_tokens=False)
    instance = {"prompt": "x", "max_tokens": 50}
    assert predict(client, instance).json()["predictions"] == ["Prompt:\nx\nOutput:\n one"]
    raw = predict(client, {**instance, "raw_response": True}).json()["predictions"]
    assert raw == ["\n\n one\n"]


def test_clients_of_hex_llm_find_the_output(client):
    (text,) = predict(client, {"instances": [{"prompt": "Say it"}]}).json()["predictions"]
    assert text.split("Output:")[1].strip().startswith("Hello")
    assert text.startswith("Prompt:\n")


def test_a_raw_answer_has_counts_and_logprobs(client, engine):
    instance = {"prompt": "Say it", "max_tokens": 50, "raw_response": True}
    body = predict(client, {"instances": [instance]}).json()
    count = len(engine.script) + 1
    assert body == {
        "predictions": [SENTENCE],
        "output_token_counts": [count],
        "cumulative_logprobs": [pytest.approx(-0.25 * count)],
    }


def test_a_body_without_instances_is_the_instance(client):
    assert predict(client, {"prompt": "Say it", "max_tokens": 50}).json() == {
        "predictions": [WRAPPED]
    }


def test_parameters_are_defaults_for_every_instance(client, engine):
    predict(
        client,
        {
            "instances": [{"prompt": "a"}, {"prompt": "b", "max_tokens": 3}],
            "parameters": {"max_tokens": 2, "temperature": 0.5},
        },
    )
    assert [r.sampling.max_tokens for r in engine.requests] == [2, 3]
    assert [r.sampling.temperature for r in engine.requests] == [0.5, 0.5]


def test_the_notebooks_numbers_are_doubles(client, engine):
    instance = {"prompt": "a", "max_tokens": 50.0, "top_k": 1.0, "temperature": 1, "top_p": 1}
    assert predict(client, {"instances": [instance]}).status_code == 200
    (request,) = engine.requests
    assert (request.sampling.max_tokens, request.sampling.top_k) == (50, 1)
    assert request.sampling.is_greedy
    assert request.sampling.mask_unscaled is True


def test_only_instances_with_a_prompt_are_served(client):
    body = {"instances": [{"prompt": "Say it", "max_tokens": 50}, {"max_tokens": 5}, {}]}
    assert predict(client, body).json() == {"predictions": [WRAPPED]}


def test_every_instance_with_a_prompt_has_its_answer_and_every_choice_too(client):
    body = {
        "instances": [
            {"prompt": "a", "max_tokens": 50, "n": 2, "raw_response": True},
            {"prompt": "b", "max_tokens": 50},
        ]
    }
    answer = predict(client, body).json()
    assert answer["predictions"] == [SENTENCE, SENTENCE, f"Prompt:\nb\nOutput:\n{SENTENCE}"]
    assert len(answer["output_token_counts"]) == len(answer["cumulative_logprobs"]) == 3


def test_zero_tokens_are_all_that_fit_and_too_many_are_cut(client, engine):
    predict(client, {"prompt": "ab", "max_tokens": 0})
    predict(client, {"prompt": "ab", "max_tokens": 10_000})
    predict(client, {"prompt": "ab"})
    room = 128 - len(engine.requests[0].prompt_token_ids)
    assert [r.sampling.max_tokens for r in engine.requests] == [room, room, 16]


def test_special_tokens_stay_visible_but_for_the_last(client, engine):
    engine.script = [2, *engine.script, 2]
    instance = {"prompt": "a", "max_tokens": 50, "raw_response": True}
    text = predict(client, instance).json()["predictions"]
    assert text == [f"<|im_start|>{SENTENCE}<|im_start|>"]


@pytest.mark.parametrize("body", [{"messages": HI}, {"@requestFormat": "chatCompletions"}])
@pytest.mark.parametrize("model", ["", "hexllm", "anything", None])
def test_a_chat_through_the_predict_route_is_openai_s_and_its_model_is_not_looked_at(
    client, body, model
):
    answer = predict(client, {"messages": HI, "model": model, **body}).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == SENTENCE
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_chat_through_the_predict_route_streams(client):
    body = {"@requestFormat": "chatCompletions", "messages": HI, "stream": True}
    response = predict(client, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events(response))
    assert text == SENTENCE
    assert all(event.get("usage") is None for event in events(response))


@pytest.mark.parametrize(
    "body",
    [
        {"instances": [{"@requestFormat": "chatCompletions", "messages": HI}]},
        {"instances": [{"@requestFormat": "chatCompletions", "prompt": "Hi"}]},
        {"instances": [{"messages": HI}], "@requestFormat": "chatCompletions"},
        {"instances": [{"max_tokens": 3}, {"messages": HI}]},
    ],
)
def test_a_chat_inside_instances_answers_with_a_dict(client, body):
    predictions = predict(client, body).json()["predictions"]
    assert predictions["choices"][0]["message"]["content"] == SENTENCE


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"instances": []}, "instances"),
        ({"instances": {}}, "instances"),
        ({"instances": ["a"]}, "instances[0]"),
        ({"instances": [{}]}, "instances[0].prompt"),
        ({"instances": [{"prompt": 3}]}, "instances[0].prompt"),
        ({"instances": [{"prompt": "a"}, {"prompt": "b", "top_k": 1.5}]}, "instances[1].top_k"),
        ({"instances": [{"prompt": "a", "max_tokens": -1}]}, "instances[0].max_tokens"),
        ({"instances": [{"prompt": "a", "stop": [""]}]}, "instances[0].stop"),
        ({"instances": [{"prompt": "a", "logprobs": 1}]}, "instances[0].logprobs"),
        ({"instances": [{"prompt": "a", "dynamic-lora": "gs://b/x"}]}, "instances[0].dynamic-lora"),
        ({"instances": [{"prompt": "a"}], "parameters": 3}, "parameters"),
        ({"instances": [{"prompt": "a"}], "max_tokens": 3}, "max_tokens"),
        ({"prompt": "a", "@requestFormat": "tgi"}, "@requestFormat"),
        ({"instances": [{"messages": HI}, {"messages": HI}]}, "instances"),
        ({"instances": [{"messages": HI, "n": 0}]}, "instances[0].n"),
        ({"prompt": "a", "streaming_tokens": 4, "n": 2}, "streaming_tokens"),
        ({"prompt": "a", "streaming_tokens": 4, "stream": True}, "streaming_tokens"),
        ({"instances": [{"prompt": "a", "stream": True}, {"prompt": "b"}]}, "instances[0].stream"),
    ],
)
def test_what_cannot_be_honoured_is_named(client, error_of, body, param):
    assert error_of(predict(client, body), 400)["param"] == param


def test_neutral_fields_of_hex_llm_s_benchmark_pass(client):
    body = {
        "prompt": "a",
        "n": 1,
        "best_of": 1,
        "use_beam_search": False,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": False,
        "dynamic-lora": "",
    }
    assert predict(client, body).status_code == 200


def test_hex_llm_s_stream_is_one_object_a_piece_without_the_wrapper(client, engine, tokenizer):
    body = {"prompt": "a", "max_tokens": 50, "streaming_tokens": 4}
    text = predict(client, body).text
    pieces = [json.loads(part + "}") for part in text.split("}")[:-1]]
    assert all(set(piece) == {"predictions"} for piece in pieces)
    deltas = [piece["predictions"][0] for piece in pieces]
    assert "".join(deltas) == SENTENCE
    assert deltas[0] == tokenizer.decode(engine.script[:4])
    assert len(deltas) == 2  # 8 tokens; the end token has no text to send


def test_model_garden_s_stream_ends_each_object_with_a_nul(client):
    text = predict(client, {"instances": [{"prompt": "a", "max_tokens": 50, "stream": True}]}).text
    *parts, end = text.split("\0")
    assert end == ""
    assert "".join(json.loads(part)["predictions"][0] for part in parts) == SENTENCE


def test_an_error_ends_a_stream_as_an_object(client, engine):
    engine.error, engine.error_after = "it broke", 2
    text = predict(client, {"prompt": "a", "max_tokens": 50, "stream": True}).text
    assert json.loads(text.split("\0")[-2])["error"]["message"] == "it broke"


def test_an_answer_without_text_still_has_an_object(client, engine):
    engine.script = []
    text = predict(client, {"prompt": "a", "streaming_tokens": 5}).text
    assert json.loads(text) == {"predictions": [""]}


def test_each_object_of_a_stream_is_an_http_chunk(live, engine):
    import httpx

    engine.delay = 0.002
    body = {"prompt": "a", "max_tokens": 50, "streaming_tokens": 1}
    with httpx.stream("POST", f"{live.url}/generate", json=body) as response:
        chunks = [json.loads(chunk) for chunk in response.iter_raw()]
    assert len(chunks) > 3
    assert "".join(chunk["predictions"][0] for chunk in chunks) == SENTENCE


def test_vertex_s_routes_are_honoured(engine, tokenizer):
    settings = Settings(
        model="tiny",
        health_route="/alive",
        predict_route="/v1/endpoints/1/deployedModels/2:predict",
    )
    client = AppClient(create_app(settings, engine, tokenizer))
    assert client.get("/alive").status_code == client.get("/ping").status_code == 200
    instance = {"instances": [{"prompt": "Say it", "max_tokens": 50}]}
    for path in (settings.predict_route, "/generate"):
        assert client.post(path, json=instance).json() == {"predictions": [WRAPPED]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_predict_route_on_an_openai_route_takes_both(engine, tokenizer, path):
    app = create_app(Settings(model="tiny", predict_route=path), engine, tokenizer)
    client = AppClient(app)
    instance = {"instances": [{"prompt": "Say it", "max_tokens": 50}]}
    assert client.post(path, json=instance).json() == {"predictions": [WRAPPED]}
    chat = {"@requestFormat": "chatCompletions", "messages": HI}
    assert client.post(path, json=chat).json()["object"] == "chat.completion"
    plain = {"messages": HI} if "chat" in path else {"prompt": "x"}
    assert client.post(path, json=plain).json()["object"] in ("chat.completion", "text_completion")
