"""Every field a request may have, and what becomes of it: honoured, or a 400 that names it.

A field of OpenAI's or vLLM's contract that is not honoured here is still known, and accepted with
the value that changes nothing; clients send those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError
from pydantic_core import PydanticCustomError

from hexllm.core.errors import RequestError
from hexllm.core.wording import suggestion
from hexllm.engine.messages import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

#: OpenAI's limit on choices.
MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
#: The most logprobs of alternatives in /v1/completions, OpenAI's limit.
MAX_COMPLETION_LOGPROBS = 5


def _integer(value: Any) -> Any:
    # Vertex's :predict carries every number as a double: 1.0 is 1.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("integer", "must be a whole number")
    if isinstance(value, float):
        if not value.is_integer():  # also NaN and infinities
            raise PydanticCustomError("integer", "must be a whole number")
        return int(value)
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number", "must be a number")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an integer with hundreds of digits
        is_finite = False
    if not is_finite:
        raise PydanticCustomError("number", "must be a finite number")
    return value


def _stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if not all(stops):
        raise PydanticCustomError("stop", "must not hold an empty string")
    if len(stops) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise PydanticCustomError(
            "stop",
            "must hold at most {count} strings of at most {length} characters",
            {"count": MAX_STOP_STRINGS, "length": MAX_STOP_LENGTH},
        )
    return tuple(stops)


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(type(item) is int for item in value):
            return value
        if all(
            isinstance(item, list) and item and all(type(token) is int for token in item)
            for item in value
        ):
            return value
    raise PydanticCustomError(
        "prompt",
        "must be a string, a list of strings, a list of token ids or a list of such lists, "
        "and none of the lists empty",
    )


Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number)]
Stop = Annotated[tuple[str, ...], BeforeValidator(_stop)]

#: Known fields that are not honoured, and the values that change nothing (null always is one).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "dynamic-lora": ("",),
    "dynamic_lora": ("",),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "metadata": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}


class SamplingFields(BaseModel):
    """What every route's requests share."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = _NEUTRAL

    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1)] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = ()
    stop_token_ids: tuple[Annotated[Integer, Field(ge=0)], ...] = ()
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    stream: StrictBool = False
    user: str | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    include_usage: StrictBool = False
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_NEUTRAL,
        "prompt_embeds": (),
        "suffix": ("",),
    }

    model: str = ""
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_prompt)]
    best_of: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: StrictBool = False
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: StrictBool = True


class TextPart(BaseModel):
    """A part of a message's content. Only text: no model served here sees images yet."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": (),
        "tool_calls": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class ChatRequest(SamplingFields):
    """``POST /v1/chat/completions``, and chats on the predict route."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_NEUTRAL,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    model: str = ""
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PredictInstance(SamplingFields):
    """One instance on Vertex AI's predict route."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_NEUTRAL,
        "best_of": (1,),
        "logprobs": (),
        "multi_modal_data": ({},),
    }

    prompt: str
    # 0 is Hex-LLM's "up to the maximum length".
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    raw_response: StrictBool = False
    streaming_tokens: Annotated[Integer, Field(ge=0)] = 0
    # Hex-LLM shows special tokens: CodeGemma's clients cut at <|file_separator|>.
    skip_special_tokens: StrictBool = False


Fields = TypeVar("Fields", bound=BaseModel)


def parse(kind: type[Fields], body: Mapping[str, Any], *, at: str = "") -> Fields:
    """Return ``body`` as a request of ``kind``.

    Args:
        kind: One of this module's models.
        body: The JSON object; null means absent, as clients write it.
        at: Where in the request's body it stands, to name fields in full.

    Raises:
        RequestError: A field is unknown, of a wrong value, missing, or asks for something that is
            not served; ``param`` names it.
    """
    data = _without_neutral(kind, body, at)
    if kind is ChatRequest and isinstance(data.get("messages"), list):
        data["messages"] = [
            _without_neutral(Message, message, f"{at}messages[{i}].")
            if isinstance(message, Mapping)
            else message
            for i, message in enumerate(data["messages"])
        ]
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _request_error(error, data, at) from None


def _without_neutral(kind: type[BaseModel], body: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return the honoured fields of ``body`` that are not null; refuse the others."""
    neutral: dict[str, tuple[Any, ...]] = getattr(kind, "neutral", {})
    data = {}
    for name, value in body.items():
        if name in kind.model_fields:
            if value is not None:
                data[name] = value
        elif name not in neutral:
            known = [*kind.model_fields, *neutral]
            raise RequestError(
                f"Unknown field {at}{name}.{suggestion(name, known)}", param=f"{at}{name}"
            )
        elif value is not None and not any(_same(value, same) for same in neutral[name]):
            allowed = " or ".join(["leave it out", *(f"send {same!r}" for same in neutral[name])])
            raise RequestError(
                f"{at}{name}={_shown(value)} is not supported by this server: {allowed}.",
                param=f"{at}{name}",
            )
    return data


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _request_error(error: ValidationError, data: Mapping[str, Any], at: str) -> RequestError:
    # Of a union every branch reports; the one that got furthest into the data is the one meant.
    located = [(_locate(each, data), each) for each in error.errors(include_url=False)]
    (path, value), first = max(located, key=lambda pair: len(pair[0][0]))
    place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    name = at + place.lstrip(".")
    if first["type"] == "missing":
        return RequestError(f"{name} is missing.", param=name)
    if first["type"] == "extra_forbidden":
        return RequestError(f"Unknown field {name}.", param=name)
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return RequestError(f"{name}={_shown(value)}: {reason}.", param=name)


def _locate(problem: ErrorDetails, data: Any) -> tuple[tuple[int | str, ...], Any]:
    """Return the path of a problem in ``data``, and what stands there."""
    path: tuple[int | str, ...] = ()
    value = data
    for i, key in enumerate(problem["loc"]):
        try:
            value = value[key]
        except (LookupError, TypeError):
            # Not in the data: a field that is missing, or the name of a branch of a union.
            is_last = i + 1 == len(problem["loc"])
            if not (is_last and problem["type"] == "missing"):
                continue
        path += (key,)
    return path, value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
