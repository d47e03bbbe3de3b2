from __future__ import annotations

import json

import openai
import pytest

from tests.server.conftest import AppClient, write_tokenizer
from tests.server.test_completions import SENTENCE, events

HI = [{"role": "user", "content": "Hi"}]


def ask(client, messages=HI, **fields):
    return client.post("/v1/chat/completions", json={"messages": messages, **fields})


def prompt_of(engine, tokenizer) -> str:
    return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_chat_is_answered(client, engine, tokenizer):
    body = ask(client, model="tiny").json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": SENTENCE, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert body["usage"]["completion_tokens"] == len(engine.script) + 1
    assert prompt_of(engine, tokenizer) == (
        "<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_chat_may_take_all_the_room_there_is(client, engine):
    ask(client)
    (request,) = engine.requests
    assert request.sampling.max_tokens == 128 - len(request.prompt_token_ids)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(client, engine, field, error_of):
    ask(client, **{field: 3})
    assert engine.requests[-1].sampling.max_tokens == 3
    error = error_of(ask(client, **{field: 128}), 400)
    assert error["param"] == field


def test_the_two_names_of_the_limit_may_not_contradict(client, error_of):
    assert ask(client, max_tokens=3, max_completion_tokens=3).status_code == 200
    error_of(ask(client, max_tokens=3, max_completion_tokens=4), 400)


def test_text_parts_and_developer_messages(client, engine, tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    ask(client, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    prompt = prompt_of(engine, tokenizer)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert "<|im_start|>user\none\ntwo<|im_end|>" in prompt


def test_template_variables(client, engine, tokenizer):
    ask(client, chat_template_kwargs={"shout": True})
    assert "LOUD" in prompt_of(engine, tokenizer)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "tools"])
def test_template_variables_cannot_replace_the_template(client, error_of, name):
    error = error_of(ask(client, chat_template_kwargs={name: "x"}), 400)
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "wizard", "content": "Hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "Hi"}], "messages[0].role"),
        ([*HI, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": "Hi", "colour": "red"}], "messages[0].colour"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": "refuse me"}], "messages"),
        ([{"role": "user", "content": "half \ud83d"}], "messages[0].content"),
    ],
)
def test_messages_that_cannot_be_honoured_are_named(client, error_of, messages, param):
    response = client.post("/v1/chat/completions", content=json.dumps({"messages": messages}))
    assert error_of(response, 400)["param"] == param


def test_a_stream_is_the_same_text(client):
    whole = ask(client, n=2).json()
    streamed = events(ask(client, n=2, stream=True, stream_options={"include_usage": True}))
    *chunks, last = streamed
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in mine)
        assert text == whole["choices"][index]["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert all("role" not in choice["delta"] for choice in mine[1:])
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["object"] for chunk in streamed} == {"chat.completion.chunk"}


def test_google_s_client_sees_no_usage_in_content_chunks(client):
    assert all("usage" not in event for event in events(ask(client, stream=True)))


def test_logprobs(client, engine, tokenizer):
    body = ask(client, logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == len(engine.script) + 1
    first = engine.script[0]
    assert content[0] == {
        "token": tokenizer.token_text(first),
        "logprob": -0.25,
        "bytes": list(tokenizer.token_bytes(first)),
        "top_logprobs": [
            {
                "token": tokenizer.token_text(first + i),
                "logprob": -0.25 - i,
                "bytes": list(tokenizer.token_bytes(first + i)),
            }
            for i in range(2)
        ],
    }
    streamed = events(ask(client, logprobs=True, top_logprobs=2, stream=True))
    pieces = [event["choices"][0]["logprobs"] for event in streamed]
    assert [item for piece in pieces if piece for item in piece["content"]] == content


def test_logprobs_without_alternatives(client):
    content = ask(client, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


def test_top_logprobs_need_logprobs(client, error_of):
    assert error_of(ask(client, top_logprobs=2), 400)["param"] == "top_logprobs"
    assert error_of(ask(client, logprobs=True, top_logprobs=21), 400)["param"] == "top_logprobs"


def test_a_model_without_a_template_says_so(settings, engine, tmp_path, error_of):
    from hexllm.server.app import create_app
    from hexllm.server.tokenizer import Tokenizer

    bare = Tokenizer.from_directory(write_tokenizer(tmp_path, chat_template=None))
    client = AppClient(create_app(settings, engine, bare))
    assert "no chat template" in error_of(ask(client), 400)["message"]


def test_another_model_is_not_here(client, error_of):
    assert error_of(ask(client, model="gpt-4"), 404)["code"] == "model_not_found"


def test_the_openai_client_reads_both_forms(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=HI)
        assert whole.choices[0].message.content == SENTENCE
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == SENTENCE
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="x", temperature=-1)
