"""``POST /v1/chat/completions``, and the chats that come by the predict route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hexllm.core.errors import RequestError
from hexllm.server.answers import chat_logprobs, collect, encode_json, stream_head
from hexllm.server.body import read_json
from hexllm.server.requests import ChatRequest, Message, parse
from hexllm.server.state import ServerState, new_id, server_state
from hexllm.server.streaming import SSE_DONE, Stream, until_disconnect
from hexllm.server.tenant import api_key_digest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from hexllm.server.generation import Generation
    from hexllm.server.sequence import LogprobEntry

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a chat")
async def chat_route(request: Request) -> Response:
    """Answer an OpenAI chat request, streamed or whole."""
    state = server_state(request)
    body = await read_json(request, state.settings.max_request_bytes)
    return await answer_chat(state, request, body)


async def answer_chat(state: ServerState, request: Request, body: Mapping[str, Any]) -> Response:
    """Answer the chat request in ``body``.

    Raises:
        RequestError: Something in it cannot be honoured.
    """
    chat = await prepare_chat(
        state,
        body,
        route="/v1/chat/completions",
        check_model=True,
        api_key=api_key_digest(request),
    )
    if chat.is_streamed:
        return Stream(chat.events())
    whole = await until_disconnect(request.receive, chat.whole())
    return Response(encode_json(whole), media_type="application/json")


async def prepare_chat(
    state: ServerState,
    body: Mapping[str, Any],
    *,
    route: str,
    check_model: bool,
    api_key: str | None,
    at: str = "",
) -> ChatAnswer:
    """Return the answer, not begun yet, to the chat request in ``body``.

    Args:
        state: The server's.
        body: The request.
        route: The path it came by, for plugins.
        check_model: Whether ``model`` has to be served here; Vertex AI's clients send anything.
        api_key: A digest of the key that the request came with.
        at: Where ``body`` stands in the HTTP request's, to name fields in errors.

    Raises:
        RequestError: Something in it cannot be honoured.
    """
    fields = parse(ChatRequest, body, at=at)
    if check_model:
        state.check_model_name(fields.model)
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError(f"{at}top_logprobs needs logprobs=true.", param=f"{at}top_logprobs")
    if fields.stream_options is not None and not fields.stream:
        raise RequestError(f"{at}stream_options needs stream=true.", param=f"{at}stream_options")
    messages = [_for_template(message) for message in fields.messages]
    try:
        text = state.ready_tokenizer.render_chat(messages, fields.chat_template_kwargs)
    except RequestError as error:
        raise RequestError(str(error), param=f"{at}{error.param}") from error
    param = f"{at}messages"
    # The template has written its own BOS; the tokenizer's would be a second one.
    ids = await state.encode(text, param=param, add_special_tokens=False)
    prompt = state.check_prompt(ids, param=param)
    wanted, wanted_by = _wanted_tokens(fields, at)
    sampling = state.sampling(
        fields,
        max_tokens=state.room_for_output(prompt, wanted, default=None, param=wanted_by),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )
    request_id = new_id("chatcmpl")
    sequences = state.sequences(
        fields, [prompt], [sampling], request_id=request_id, api_key=api_key
    )
    generation = state.generation(request_id, route, sequences, n=fields.n, user=fields.user)
    return ChatAnswer(state, fields, generation)


def _wanted_tokens(fields: ChatRequest, at: str) -> tuple[int | None, str]:
    """Return how many tokens the request asks for, and the field that says so."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"{at}max_tokens={old} and {at}max_completion_tokens={new} contradict each other: "
            f"send one.",
            param=f"{at}max_tokens",
        )
    if new is not None:
        return new, f"{at}max_completion_tokens"
    return old, f"{at}max_tokens"


def _for_template(message: Message) -> dict[str, str]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    # OpenAI's newer name of the same role, which no template knows.
    role = "system" if message.role == "developer" else message.role
    rendered = {"role": role, "content": content}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


class ChatAnswer:
    """One chat's answer, in either form.

    Attributes:
        is_streamed: Whether the request asked for a stream.
    """

    def __init__(self, state: ServerState, fields: ChatRequest, generation: Generation) -> None:
        self.is_streamed = fields.stream
        self._tokenizer = state.ready_tokenizer
        self._model = state.settings.served_model_name
        self._fields = fields
        self._generation = generation

    async def whole(self) -> dict[str, Any]:
        """Generate everything and return the ``chat.completion`` object."""
        choices = await collect(self._generation)
        return {
            "id": self._generation.request_id,
            "object": "chat.completion",
            "created": self._generation.created,
            "model": self._model,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": self._generation.usage(),
        }

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the answer as server-sent events.

        Only the last chunk has usage, and only on request: Google's client takes any chunk with
        usage for the last one, and skips it.
        """
        options = self._fields.stream_options
        with_usage = options is not None and options.include_usage
        head = stream_head(self._generation, "chat.completion.chunk", self._model)
        tail = '],"usage":null}\n\n' if with_usage else "]}\n\n"
        unopened = set(range(len(self._generation.sequences)))
        async for delta in self._generation.deltas():
            index = delta.index
            if index in unopened:
                unopened.remove(index)
                yield (
                    f'{head}{{"index":{index},"delta":{{"role":"assistant","content":""}},'
                    f'"logprobs":null,"finish_reason":null}}{tail}'
                )
            if delta.is_empty:
                continue
            content = f'"content":{encode_json(delta.text)}' if delta.text else ""
            logprobs = encode_json(self._logprobs(delta.logprobs)) if delta.logprobs else "null"
            ending = f'"finish_reason":{encode_json(delta.finish_reason)}'
            if delta.finish_reason is not None:
                ending += f',"stop_reason":{encode_json(delta.stop_reason)}'
            yield (
                f'{head}{{"index":{index},"delta":{{{content}}},"logprobs":{logprobs},'
                f"{ending}}}{tail}"
            )
        if with_usage:
            yield f'{head}],"usage":{encode_json(self._generation.usage())}}}\n\n'
        yield SSE_DONE

    def _logprobs(
        self, entries: list[LogprobEntry] | tuple[LogprobEntry, ...]
    ) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        num_top = self._fields.top_logprobs or 0
        return chat_logprobs(entries, self._tokenizer, num_top=num_top)
