"""What is refused, and how: the answer to each kind of bad request."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexllm.core.errors import RequestError
from hexllm.server.app import create_app
from hexllm.server.requests import ChatRequest, CompletionRequest, PredictInstance, parse
from tests.server.conftest import AppClient

CHAT_MESSAGE = {"role": "user", "content": "x"}
ROUTES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/generate": {"prompt": "x", "max_tokens": 2},
}
every_route = pytest.mark.parametrize("route", ROUTES)


def post_text(client, route, text, **headers):
    return client.post(route, content=text, headers={"content-type": "application/json", **headers})


def ask(client, route, **fields):
    return post_text(client, route, json.dumps({**ROUTES[route], **fields}))


@every_route
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nonsense",
        b"\xff\xfe\x00",
        '{"prompt": "a"} trailing',
        '{"n": ' + "1" * 5000 + "}",
        "[" * 100_000,
        "[]",
        '"prompt"',
        "null",
        "3",
    ],
)
def test_what_is_not_a_json_object_is_a_400(client, error_of, route, text):
    error = error_of(post_text(client, route, text), 400)
    assert error["type"] == "invalid_request_error"


@every_route
def test_a_byte_order_mark_is_harmless(client, route):
    text = json.dumps(ROUTES[route]).encode("utf-8-sig")
    assert post_text(client, route, text).status_code == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_another_content_type_is_a_415(client, error_of, route):
    response = client.post(route, content="x=1", headers={"content-type": "text/plain"})
    assert "text/plain" in error_of(response, 415)["message"]


def test_the_predict_route_reads_json_of_any_content_type(client, error_of):
    form = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` says
    assert client.post("/generate", content='{"prompt": "x"}', headers=form).status_code == 200
    error_of(client.post("/generate", content="x=1", headers=form), 400)


@every_route
def test_json_by_any_of_its_content_types(client, route):
    for kind in ("application/json; charset=utf-8", "application/vnd.x+json", None):
        headers = {"content-type": kind} if kind else {}
        response = client.post(route, content=json.dumps(ROUTES[route]), headers=headers)
        assert response.status_code == 200, response.text


@every_route
def test_a_body_over_the_limit_is_a_413(client, engine, error_of, route):
    error = error_of(ask(client, route, user="x" * 10_000_000), 413)
    assert error["code"] == "request_too_large"
    assert "200000 bytes" in error["message"]
    assert engine.requests == []


def test_a_body_just_within_the_limit_is_read(client):
    body = json.dumps(ROUTES["/v1/completions"])
    body += " " * (200_000 - len(body))
    assert post_text(client, "/v1/completions", body).status_code == 200
    assert post_text(client, "/v1/completions", body + " ").status_code == 413


@pytest.mark.parametrize("announced", [True, False])
def test_a_10_mb_body_on_a_socket_is_a_413_that_the_client_gets_to_see(live, announced):
    import httpx

    def parts():
        for _ in range(10):
            yield b"x" * 1_000_000

    content = b"".join(parts()) if announced else parts()
    response = httpx.post(
        f"{live.url}/v1/completions",
        content=content,
        headers={"content-type": "application/json"},
        timeout=20,
    )
    assert response.status_code == 413
    assert httpx.get(f"{live.url}/ping").status_code == 200


@every_route
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [float("nan"), float("inf"), -0.1, "hot", True, 101, [1], 10**400]),
        ("top_p", [0, -1, 1.01, float("nan"), "1"]),
        ("top_k", [-2, 1.5, "1", True, float("inf")]),
        ("min_p", [-0.1, 1.1, float("nan")]),
        ("n", [0, -1, 129, 1.5, "2"]),
        ("seed", [1.5, "1", 2**63, -(2**63) - 1, float("nan")]),
        ("stop", ["", ["a", ""], 3, [3], ["a"] * 33, "a" * 1025]),
        ("stop_token_ids", [[-1], ["a"], 3, [400]]),
        ("max_tokens", [-1, 1.5, "5", True]),
        ("ignore_eos", [1, "true"]),
        ("stream", [1, "yes"]),
        ("skip_special_tokens", [0]),
        ("user", [3]),
        ("priority", ["high", 2**31]),
    ],
)
def test_values_out_of_range_are_named(client, engine, error_of, route, field, values):
    for value in values:
        error = error_of(ask(client, route, **{field: value}), 400)
        assert error["param"].startswith(field), error
        assert field in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_max_tokens_zero_is_a_400_on_openai_s_routes(client, error_of, route):
    assert error_of(ask(client, route, max_tokens=0), 400)["param"] == "max_tokens"


@every_route
@pytest.mark.parametrize(
    ("field", "refused", "neutral"),
    [
        ("logit_bias", {"5": 1.0}, {}),
        ("presence_penalty", 0.5, 0.0),
        ("frequency_penalty", -1, 0),
        ("repetition_penalty", 1.1, 1.0),
        ("min_tokens", 5, 0),
        ("bad_words", ["a"], []),
        ("prompt_logprobs", 1, None),
        ("use_beam_search", True, False),
        ("length_penalty", 2, 1.0),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("guided_json", {"type": "object"}, None),
        ("dynamic-lora", "org/adapter", ""),
        ("store", True, False),
        ("service_tier", "priority", "auto"),
    ],
)
def test_fields_that_are_not_honoured_pass_only_where_they_change_nothing(
    client, engine, error_of, route, field, refused, neutral
):
    error = error_of(ask(client, route, **{field: refused}), 400)
    assert error["param"] == field
    assert "not supported" in error["message"]
    assert engine.requests == []
    for value in (neutral, None):
        assert ask(client, route, **{field: value}).status_code == 200


@pytest.mark.parametrize(
    ("field", "refused", "neutral"),
    [
        ("tools", [{"type": "function"}], []),
        ("tool_choice", "required", "auto"),
        ("functions", [{}], []),
        ("modalities", ["audio"], ["text"]),
        ("reasoning_effort", "high", None),
        ("continue_final_message", True, False),
        ("web_search_options", {}, None),
    ],
)
def test_chat_s_own_fields_that_are_not_honoured(client, error_of, field, refused, neutral):
    route = "/v1/chat/completions"
    assert error_of(ask(client, route, **{field: refused}), 400)["param"] == field
    assert ask(client, route, **{field: neutral}).status_code == 200


def test_false_is_not_zero_for_a_field_that_takes_a_number(client, error_of):
    assert error_of(ask(client, "/generate", presence_penalty=False), 400)


@every_route
def test_an_unknown_field_is_named_with_the_nearest_one(client, error_of, route):
    error = error_of(ask(client, route, temprature=1), 400)
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]


@every_route
def test_null_is_absent(client, route):
    fields = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "stream", "user"))
    assert ask(client, route, **fields).status_code == 200


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, PredictInstance])
def test_no_field_is_both_honoured_and_neutral(kind):
    assert set(kind.model_fields) & set(kind.neutral) == set()


@every_route
def test_a_lone_surrogate_is_a_400_that_names_its_field(client, error_of, route):
    text = json.dumps(ROUTES[route]).replace('"x"', '"half \\ud83d"')
    error = error_of(post_text(client, route, text), 400)
    assert error["param"] in ("prompt", "messages[0].content")
    assert "surrogate" in error["message"]
    assert error_of(ask(client, route, stop=["\udc00"]), 400)["param"] == "stop[0]"
    error_of(post_text(client, route, '{"\\ud800": 1}'), 400)


@every_route
def test_a_whole_pair_of_surrogates_is_a_character(client, engine, tokenizer, route):
    text = json.dumps(ROUTES[route]).replace('"x"', '"\\ud83d\\ude42"')
    assert post_text(client, route, text).status_code == 200
    assert "🙂" in tokenizer.decode(engine.requests[0].prompt_token_ids)


@every_route
@pytest.mark.parametrize("length", [300, 150_000])
def test_a_prompt_over_max_model_len_is_a_400(client, engine, error_of, route, length):
    words = "q z" * (length // 3)
    text = json.dumps(ROUTES[route]).replace('"x"', json.dumps(words))
    error = error_of(post_text(client, route, text), 400)
    assert error["param"] in ("prompt", "messages")
    assert "128" in error["message"]
    assert engine.requests == []


def test_a_prompt_that_leaves_room_for_one_token_is_served(client, engine, error_of):
    assert ask(client, "/v1/completions", prompt=[5] * 127, max_tokens=1).status_code == 200
    error_of(ask(client, "/v1/completions", prompt=[5] * 128, max_tokens=1), 400)
    error = error_of(ask(client, "/v1/completions", prompt=[5] * 120, max_tokens=9), 400)
    assert error["param"] == "max_tokens"
    assert "at most 8" in error["message"]


def test_an_empty_prompt_is_its_bos_or_refused(client, engine, error_of):
    assert ask(client, "/v1/completions", prompt="").status_code == 200
    assert engine.requests[0].prompt_token_ids == (0,)
    error = error_of(ask(client, "/v1/completions", prompt="", add_special_tokens=False), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        ([5, "a"], "prompt"),
        ([True], "prompt"),
        ([1.0], "prompt"),
        ({"a": 1}, "prompt"),
        (None, "prompt"),
        ([400], "prompt"),
        ([-1], "prompt"),
        ([[5], [400]], "prompt[1]"),
        (["a", "\udc00"], "prompt[1]"),
    ],
)
def test_prompts_of_no_use_are_named(client, error_of, prompt, param):
    assert error_of(ask(client, "/v1/completions", prompt=prompt), 400)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"suffix": "!"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        ({"prompt": ["a"] * 100, "n": 11}, "n"),
    ],
)
def test_combinations_that_cannot_be_honoured(client, error_of, fields, param):
    assert error_of(ask(client, "/v1/completions", **fields), 400)["param"] == param


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, PredictInstance])
@given(data=st.data())
def test_any_json_in_any_field_is_honoured_or_named(kind, data):
    name = data.draw(st.sampled_from(sorted([*kind.model_fields, *kind.neutral])))
    value = data.draw(json_values)
    body = {"prompt": "x"} if "prompt" in kind.model_fields else {"messages": [CHAT_MESSAGE]}
    refusal = None
    try:
        parse(kind, {**body, name: value}, at="instances[0].")
    except RequestError as error:
        refusal = error
    if refusal is not None:
        assert refusal.param.startswith(f"instances[0].{name}")
        assert refusal.status == 400
    elif name in kind.neutral:
        assert value in (None, *kind.neutral[name])


def test_best_of_equal_to_n_changes_nothing(client):
    assert ask(client, "/v1/completions", best_of=2, n=2).status_code == 200


def test_an_unknown_route_and_a_wrong_method_are_json(client, error_of):
    assert "/v1/nothing" in error_of(client.get("/v1/nothing"), 404)["message"]
    response = client.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(client.post("/ping", json={}), 405)


def test_a_bug_is_a_500_that_hides_its_text_and_is_logged(client, engine, error_of, caplog):
    engine.script = lambda _request: 1 / 0
    error = error_of(ask(client, "/v1/completions"), 500)
    assert "division" not in error["message"]
    assert "ZeroDivisionError" in caplog.text


def test_a_vocabulary_larger_than_the_model_s_is_noticed(settings, engine, tokenizer, error_of):
    from dataclasses import replace

    engine.info = replace(engine.ready_info, vocab_size=10)
    client = AppClient(create_app(settings, engine, tokenizer))
    assert "token id" in error_of(ask(client, "/v1/completions", prompt="hello"), 400)["message"]
