"""``POST /v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hexllm.core.errors import RequestError
from hexllm.server.answers import (
    collect,
    completion_logprobs,
    encode_json,
    stream_head,
)
from hexllm.server.body import read_json
from hexllm.server.requests import CompletionRequest, parse
from hexllm.server.state import DEFAULT_MAX_TOKENS, ServerState, new_id, server_state
from hexllm.server.streaming import SSE_DONE, Stream, until_disconnect
from hexllm.server.tenant import api_key_digest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from hexllm.server.generation import Generation
    from hexllm.server.sequence import LogprobEntry

router = APIRouter()


@router.post("/v1/completions", summary="Continue a text")
async def completions_route(request: Request) -> Response:
    """Answer an OpenAI completion request, streamed or whole."""
    state = server_state(request)
    body = await read_json(request, state.settings.max_request_bytes)
    return await answer_completion(state, request, body)


async def answer_completion(
    state: ServerState, request: Request, body: Mapping[str, Any]
) -> Response:
    """Answer the completion request in ``body``.

    Raises:
        RequestError: Something in it cannot be honoured.
    """
    fields = parse(CompletionRequest, body)
    state.check_model_name(fields.model)
    _check_combinations(fields)
    texts, prompts = await _prompts(state, fields)
    samplings = [
        state.sampling(
            fields,
            max_tokens=state.room_for_output(
                prompt, fields.max_tokens, default=DEFAULT_MAX_TOKENS, param="max_tokens"
            ),
            logprobs=fields.logprobs,
        )
        for prompt in prompts
    ]
    request_id = new_id("cmpl")
    sequences = state.sequences(
        fields, prompts, samplings, request_id=request_id, api_key=api_key_digest(request)
    )
    generation = state.generation(
        request_id, "/v1/completions", sequences, n=fields.n, user=fields.user
    )
    answer = _Answer(state, fields, generation, texts)
    if fields.stream:
        return Stream(answer.events())
    return await until_disconnect(request.receive, answer.whole())


def _check_combinations(fields: CompletionRequest) -> None:
    if fields.best_of is not None and fields.best_of != fields.n:
        raise RequestError(
            f"best_of={fields.best_of} is not supported by this server unless it equals "
            f"n={fields.n}: leave it out.",
            param="best_of",
        )
    if fields.echo and fields.logprobs is not None:
        raise RequestError(
            "echo with logprobs would need the prompt's logprobs, which this server does not "
            "give: leave one of them out.",
            param="echo",
        )
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream=true.", param="stream_options")


async def _prompts(
    state: ServerState, fields: CompletionRequest
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return each prompt's text (only where it is to be echoed) and token ids."""
    prompt: Any = fields.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt, several = [prompt], False
    else:
        several = True
    texts, tokens = [], []
    for i, item in enumerate(prompt):
        param = f"prompt[{i}]" if several else "prompt"
        if isinstance(item, str):
            ids = await state.encode(
                item, param=param, add_special_tokens=fields.add_special_tokens
            )
        else:
            ids = list(item)
        tokens.append(state.check_prompt(ids, param=param))
        if not fields.echo:
            texts.append("")
        elif isinstance(item, str):
            texts.append(item)
        else:
            skip = fields.skip_special_tokens
            texts.append(state.ready_tokenizer.decode(ids, skip_special_tokens=skip))
    return texts, tokens


class _Answer:
    """One request's answer, in either form."""

    def __init__(
        self,
        state: ServerState,
        fields: CompletionRequest,
        generation: Generation,
        echoed: list[str],
    ) -> None:
        self._tokenizer = state.ready_tokenizer
        self._model = state.settings.served_model_name
        self._fields = fields
        self._generation = generation
        self._echoed = echoed

    async def whole(self) -> Response:
        choices = await collect(self._generation)
        body = {
            "id": self._generation.request_id,
            "object": "text_completion",
            "created": self._generation.created,
            "model": self._model,
            "choices": [
                {
                    "index": index,
                    "text": self._echo(index) + choice.text,
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": self._generation.usage(),
        }
        return Response(encode_json(body), media_type="application/json")

    async def events(self) -> AsyncGenerator[str, None]:
        options = self._fields.stream_options
        with_usage = options is not None and options.include_usage
        head = stream_head(self._generation, "text_completion", self._model)
        tail = '],"usage":null}\n\n' if with_usage else "]}\n\n"
        unechoed = set(range(len(self._generation.sequences))) if self._fields.echo else set()
        async for delta in self._generation.deltas():
            text = delta.text
            if delta.index in unechoed:
                unechoed.remove(delta.index)
                text = self._echo(delta.index) + text
            if not text and delta.is_empty:
                continue
            logprobs = encode_json(self._logprobs(delta.logprobs)) if delta.logprobs else "null"
            yield (
                f'{head}{{"index":{delta.index},"text":{encode_json(text)},"logprobs":{logprobs},'
                f'"finish_reason":{encode_json(delta.finish_reason)},'
                f'"stop_reason":{encode_json(delta.stop_reason)}}}{tail}'
            )
        if with_usage:
            yield f'{head}],"usage":{encode_json(self._generation.usage())}}}\n\n'
        yield SSE_DONE

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._fields.n]

    def _logprobs(
        self, entries: list[LogprobEntry] | tuple[LogprobEntry, ...]
    ) -> dict[str, Any] | None:
        if self._fields.logprobs is None:
            return None
        return completion_logprobs(entries, self._tokenizer, num_top=self._fields.logprobs)
