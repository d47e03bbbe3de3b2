"""The API key that a request comes with reaches scheduling policies as a digest, by every route."""

from __future__ import annotations

import hashlib

import pytest

from hexllm.engine.request import Request

HI = [{"role": "user", "content": "Hi"}]
ROUTES = [
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/chat/completions", {"messages": HI}),
    ("/generate", {"prompt": "Hi"}),
    ("/generate", {"messages": HI}),
    ("/generate", {"instances": [{"prompt": "Hi"}]}),
    ("/generate", {"instances": [{"messages": HI}]}),
]
SECRET = "sk-très-secret"
DIGEST = "key-" + hashlib.sha256("sk-très-secret".encode()).hexdigest()[:16]


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer ", "Basic"])
def test_every_route_passes_its_digest_on(client, engine, route, body, scheme):
    headers = {b"authorization": f"{scheme} {SECRET} ".encode("latin-1")}
    assert client.post(route, json=body, headers=headers).status_code == 200
    (request,) = engine.requests
    assert request.api_key == DIGEST
    assert SECRET not in repr(request)
    # What a policy sees of it.
    assert (Request(request, 128).view().api_key, Request(request, 128).view().tenant) == (
        DIGEST,
        DIGEST,
    )


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize("headers", [{}, {"authorization": ""}, {"authorization": "Bearer "}])
def test_without_a_key_there_is_no_digest(client, engine, route, body, headers):
    assert client.post(route, json=body, headers=headers).status_code == 200
    assert [request.api_key for request in engine.requests] == [None]
    assert Request(engine.requests[0], 128).view().tenant == ""


def test_the_user_field_is_the_tenant_before_the_key(client, engine):
    body = {"prompt": ["Hi", "Ho"], "user": "ann", "n": 2, "max_tokens": 2}
    client.post("/v1/completions", json=body, headers={"authorization": "Bearer one"})
    views = [Request(request, 128).view() for request in engine.requests]
    assert [view.tenant for view in views] == ["ann"] * 4
    client.post("/v1/completions", json=body, headers={"authorization": "Bearer two"})
    keys = {request.api_key for request in engine.requests}
    assert len(keys) == 2
