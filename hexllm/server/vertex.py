"""The predict route: Hex-LLM's ``/generate`` as Vertex AI and its own clients call it.

It takes completions (``instances``, or one instance as the body), Hex-LLM's and Model Garden
vLLM's streams of them, and chats (``@requestFormat`` on top or inside an instance).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hexllm.core.errors import RequestError
from hexllm.server.answers import CollectedChoice, collect, encode_json
from hexllm.server.body import read_json
from hexllm.server.chat import ChatAnswer, prepare_chat
from hexllm.server.errors import error_json
from hexllm.server.requests import PredictInstance, parse
from hexllm.server.state import DEFAULT_MAX_TOKENS, ServerState, new_id, server_state
from hexllm.server.streaming import Stream, until_disconnect
from hexllm.server.tenant import api_key_digest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from hexllm.server.generation import Generation
    from hexllm.server.sequence import Sequence

_FORMAT = "@requestFormat"
_CHAT = "chatCompletions"

router = APIRouter()


@router.post("/generate", summary="Vertex AI predictions and Hex-LLM's own requests")
async def generate_route(request: Request) -> Response:
    """Answer a predict request in any of its forms."""
    state = server_state(request)
    # Any type: Hex-LLM's clients include `curl -d` without a header.
    limit = state.settings.max_request_bytes
    body = await read_json(request, limit, any_content_type=True)
    return await answer_predict(state, request, body)


def shared_route(
    answer: Callable[[ServerState, Request, dict[str, Any]], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler for an OpenAI route that AIP_PREDICT_ROUTE names too.

    Args:
        answer: Answers what is not Vertex AI's.
    """

    async def route(request: Request) -> Response:
        state = server_state(request)
        body = await read_json(request, state.settings.max_request_bytes)
        is_predict = "instances" in body or _FORMAT in body
        return await (answer_predict if is_predict else answer)(state, request, body)

    return route


async def answer_predict(state: ServerState, request: Request, body: dict[str, Any]) -> Response:
    """Answer the predict request in ``body``.

    Raises:
        RequestError: Something in it cannot be honoured.
    """
    if "instances" not in body:
        return await _answer_bare(state, request, body)
    for name in body:
        if name not in ("instances", "parameters", _FORMAT):
            raise RequestError(
                f"Unknown field {name}: beside instances only parameters may stand.", param=name
            )
    instances = body["instances"]
    if not isinstance(instances, list) or not instances:
        raise RequestError("instances must be a list with at least one object.", param="instances")
    merged = []
    for i, instance in enumerate(instances):
        if not isinstance(instance, Mapping):
            raise RequestError(f"instances[{i}] must be an object.", param=f"instances[{i}]")
        defaults = {_FORMAT: body[_FORMAT]} if _FORMAT in body else {}
        merged.append({**defaults, **_parameters(body), **instance})

    chats = [i for i, instance in enumerate(merged) if _is_chat(instance, f"instances[{i}].")]
    if chats:
        if len(chats) > 1:
            raise RequestError(
                "One predict request can carry one chat, because its predictions are that chat's "
                "answer. Send several requests.",
                param="instances",
            )
        at = f"instances[{chats[0]}]."
        chat = await _prepare_chat(state, request, merged[chats[0]], at=at)
        if chat.is_streamed:
            return Stream(chat.events())
        whole = await until_disconnect(request.receive, chat.whole())
        return _json({"predictions": whole})

    # Google's clients send instances that hold parameters alone beside the one with the prompt.
    prompts = [(i, instance) for i, instance in enumerate(merged) if "prompt" in instance]
    if not prompts:
        raise RequestError("No instance has a prompt.", param="instances[0].prompt")
    return await _answer_instances(
        state, request, [(f"instances[{i}].", instance) for i, instance in prompts]
    )


async def _answer_bare(state: ServerState, request: Request, body: dict[str, Any]) -> Response:
    instance = {**_parameters(body), **body}
    instance.pop("parameters", None)
    if not _is_chat(instance, ""):
        return await _answer_instances(state, request, [("", instance)])
    chat = await _prepare_chat(state, request, instance, at="")
    if chat.is_streamed:
        return Stream(chat.events())
    return _json(await until_disconnect(request.receive, chat.whole()))


def _parameters(body: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = body.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise RequestError("parameters must be an object.", param="parameters")
    return parameters


def _is_chat(instance: Mapping[str, Any], at: str) -> bool:
    kind = instance.get(_FORMAT)
    if kind not in (None, "", _CHAT):
        raise RequestError(
            f"{at}{_FORMAT}={kind!r} is not known: it is {_CHAT!r} or absent.",
            param=f"{at}{_FORMAT}",
        )
    return kind == _CHAT or ("messages" in instance and "prompt" not in instance)


async def _prepare_chat(
    state: ServerState, request: Request, instance: Mapping[str, Any], *, at: str
) -> ChatAnswer:
    chat = {key: value for key, value in instance.items() if key != _FORMAT}
    if "messages" not in chat and isinstance(chat.get("prompt"), str):
        # A Google notebook sends chats this way.
        chat["messages"] = [{"role": "user", "content": chat.pop("prompt")}]
    return await prepare_chat(
        state,
        chat,
        route=state.settings.predict_route,
        check_model=False,
        api_key=api_key_digest(request),
        at=at,
    )


async def _answer_instances(
    state: ServerState, request: Request, instances: list[tuple[str, Mapping[str, Any]]]
) -> Response:
    parsed = [
        parse(PredictInstance, {k: v for k, v in instance.items() if k != _FORMAT}, at=at)
        for at, instance in instances
    ]
    with_raw = any(fields.raw_response for fields in parsed)
    request_id = new_id("gen")
    sequences: list[Sequence] = []
    for (at, _), fields in zip(instances, parsed, strict=True):
        sequences += await _sequences(
            state,
            fields,
            at=at,
            request_id=request_id,
            api_key=api_key_digest(request),
            index=len(sequences),
            with_raw=with_raw,
        )
    # Each sequence counts as a prompt of its own here (n=1): instances can differ in n.
    generation = state.generation(
        request_id, state.settings.predict_route, sequences, n=1, user=parsed[0].user
    )
    if any(fields.stream or fields.streaming_tokens for fields in parsed):
        return _stream(parsed, instances[0][0], generation)
    choices = await until_disconnect(request.receive, collect(generation))
    owners = [fields for fields in parsed for _ in range(fields.n)]
    body: dict[str, Any] = {
        "predictions": [
            _prediction(fields, choice) for fields, choice in zip(owners, choices, strict=True)
        ]
    }
    if with_raw:
        body["output_token_counts"] = [sequence.num_tokens for sequence in sequences]
        body["cumulative_logprobs"] = [sequence.cumulative_logprob for sequence in sequences]
    return _json(body)


async def _sequences(
    state: ServerState,
    fields: PredictInstance,
    *,
    at: str,
    request_id: str,
    api_key: str | None,
    index: int,
    with_raw: bool,
) -> list[Sequence]:
    param = f"{at}prompt"
    prompt = state.check_prompt(await state.encode(fields.prompt, param=param), param=param)
    room = state.info.max_model_len - len(prompt)
    wanted = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    sampling = state.sampling(
        fields,
        max_tokens=min(wanted, room) if wanted else room,
        logprobs=0 if with_raw else None,
        mask_unscaled=True,
    )
    return state.sequences(
        fields, [prompt], [sampling], request_id=request_id, api_key=api_key, index=index
    )


def _prediction(fields: PredictInstance, choice: CollectedChoice) -> str:
    if fields.raw_response:
        return choice.text
    # What Hex-LLM's clients cut the answer out of.
    return f"Prompt:\n{fields.prompt.strip()}\nOutput:\n" + choice.text.strip("\n")


def _stream(parsed: list[PredictInstance], at: str, generation: Generation) -> Response:
    fields = parsed[0]
    name = "stream" if fields.stream else "streaming_tokens"
    if len(generation.sequences) > 1:
        raise RequestError(
            f"{at}{name} streams one answer: send one prompt with n=1.", param=f"{at}{name}"
        )
    if fields.stream and fields.streaming_tokens:
        raise RequestError(
            f"{at}stream and {at}streaming_tokens ask for different streams: send one of them.",
            param=f"{at}streaming_tokens",
        )
    # Model Garden vLLM ends each object with a NUL, Hex-LLM each HTTP chunk with an object.
    end = "\0" if fields.stream else ""
    return Stream(
        _pieces(generation, max(1, fields.streaming_tokens), end),
        media_type="application/json",
        on_error=lambda error: error_json(error) + end,
    )


async def _pieces(
    generation: Generation, tokens_per_piece: int, end: str
) -> AsyncGenerator[str, None]:
    text, num_tokens, num_pieces = "", 0, 0
    async for delta in generation.deltas():
        text += delta.text
        num_tokens += delta.num_tokens
        is_last = delta.finish_reason is not None
        if not is_last and (num_tokens < tokens_per_piece or not text):
            continue
        if text or not num_pieces:
            yield encode_json({"predictions": [text]}) + end
            num_pieces += 1
        text, num_tokens = "", 0


def _json(body: Mapping[str, Any]) -> Response:
    return Response(encode_json(body), media_type="application/json")
