"""What the routes share, and the way from a validated request to sequences for the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hexllm.core.errors import RequestError
from hexllm.engine.messages import SamplingParams
from hexllm.server.admission import Admission, Exchanges
from hexllm.server.generation import Generation, Seeds, build_sequences
from hexllm.server.metrics import ServerMetrics
from hexllm.server.notifier import Notifier
from hexllm.server.sequence import Sequence, TextOptions

if TYPE_CHECKING:
    from fastapi import Request

    from hexllm.core.plugins import Plugins
    from hexllm.core.settings import Settings
    from hexllm.engine.client import EngineClient
    from hexllm.engine.messages import EngineInfo
    from hexllm.server.requests import SamplingFields
    from hexllm.server.tokenizer import Tokenizer

#: What /v1/completions and the predict route generate when a request does not say (OpenAI's).
DEFAULT_MAX_TOKENS = 16
#: The most sequences that one request may ask for: its prompts times ``n``.
MAX_SEQUENCES = 1024
#: Longer texts are tokenized in a thread, so that other streams go on meanwhile.
_INLINE_CHARACTERS = 8192
#: Below this a temperature is greedy: the logits would overflow when divided by it.
_GREEDY_TEMPERATURE = 1e-5


@dataclass
class ServerState:
    """The parts of a running server.

    Attributes:
        settings: What it runs with.
        client: The engine.
        tokenizer: None until it is loaded.
        plugins: For the notify hooks; None for none.
        is_stopping: Set once the server takes no more requests.
        started: Seconds since the epoch.
    """

    settings: Settings
    client: EngineClient
    tokenizer: Tokenizer | None = None
    plugins: Plugins | None = None
    is_stopping: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    metrics: ServerMetrics = field(init=False)
    notifier: Notifier = field(init=False)
    admission: Admission = field(init=False)
    exchanges: Exchanges = field(default_factory=Exchanges)
    seeds: Seeds = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self.settings, self.client)
        self.metrics = ServerMetrics(self.client, self.admission, self.settings.served_model_name)
        self.notifier = Notifier(self.plugins)
        self.seeds = Seeds(self.settings.seed)

    @property
    def is_ready(self) -> bool:
        """Whether requests are served now."""
        return (
            self.tokenizer is not None
            and self.client.is_ready
            and not self.is_stopping
            and not self.is_hung
        )

    @property
    def is_hung(self) -> bool:
        """Whether the engine has been silent too long while it owes an answer."""
        limit = self.settings.hung_engine_seconds
        return limit is not None and self.client.silence > limit

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself; only asked for once it is ready."""
        assert self.client.info is not None
        return self.client.info

    @property
    def ready_tokenizer(self) -> Tokenizer:
        """The tokenizer; only asked for once it is loaded."""
        assert self.tokenizer is not None
        return self.tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer: the tokenizer's, the chat template's, the configs'."""
        ids = (*self.ready_tokenizer.eos_token_ids, *self.info.eos_token_ids)
        return tuple(dict.fromkeys(ids))

    def check_model_name(self, name: str) -> None:
        """Check the ``model`` field of a request to ``/v1``.

        Raises:
            RequestError: It names a model that is not served here (404).
        """
        served = {"", "hexllm", self.settings.served_model_name, self.settings.model}
        if name not in served:
            raise RequestError(
                f"There is no model {name!r} here; this server has "
                f"{self.settings.served_model_name!r}.",
                param="model",
                status=404,
            )

    async def encode(self, text: str, *, param: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            RequestError: The text is certainly over the model's length, or has no tokens.
        """
        tokenizer = self.ready_tokenizer
        if len(text) > self.info.max_model_len * tokenizer.max_token_length:
            raise RequestError(
                f"{param} has {len(text)} characters, more than fit into the model's "
                f"{self.info.max_model_len} tokens of prompt and output.",
                param=param,
            )
        if len(text) <= _INLINE_CHARACTERS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    def check_prompt(self, token_ids: list[int], *, param: str) -> tuple[int, ...]:
        """Return a prompt that the engine can take.

        Raises:
            RequestError: It is empty, leaves no room for output, or has an id out of range.
        """
        if not token_ids:
            raise RequestError(f"{param} has no tokens: send some text.", param=param)
        longest = self.info.max_model_len - 1
        if len(token_ids) > longest:
            raise RequestError(
                f"{param} has {len(token_ids)} tokens; this server takes at most {longest}, so "
                f"that one of its {self.info.max_model_len} (max_model_len) is left for output.",
                param=param,
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.info.vocab_size:
            raise RequestError(
                f"{param} has token id {low if low < 0 else high}; this model's go from 0 to "
                f"{self.info.vocab_size - 1}.",
                param=param,
            )
        return tuple(token_ids)

    def sampling(
        self,
        fields: SamplingFields,
        *,
        max_tokens: int,
        logprobs: int | None,
        mask_unscaled: bool = False,
    ) -> SamplingParams:
        """Return how one prompt's choices are sampled; ``seed`` is still to be folded per choice.

        Raises:
            RequestError: A stop token lies beyond the model's vocabulary.
        """
        vocab_size = self.info.vocab_size
        beyond = [token_id for token_id in fields.stop_token_ids if token_id >= vocab_size]
        if beyond:
            raise RequestError(
                f"stop_token_ids has {beyond[0]}; this model's tokens go from 0 to "
                f"{vocab_size - 1}.",
                param="stop_token_ids",
            )
        # -1 asks for a seed of the server's choice, as in vLLM and llama.cpp.
        is_seeded = fields.seed is not None and fields.seed != -1
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if fields.temperature < _GREEDY_TEMPERATURE else fields.temperature,
            top_k=max(0, min(fields.top_k, vocab_size)),
            top_p=fields.top_p,
            min_p=fields.min_p,
            seed=fields.seed if is_seeded and fields.seed is not None else self.seeds.next(),
            logprobs=logprobs,
            stop_token_ids=fields.stop_token_ids,
            ignore_eos=fields.ignore_eos,
            mask_unscaled=mask_unscaled,
        )

    def room_for_output(
        self, prompt: tuple[int, ...], wanted: int | None, *, default: int | None, param: str
    ) -> int:
        """Return how many tokens to generate after ``prompt``.

        Args:
            prompt: Its token ids.
            wanted: What the request asked for, None when it did not say.
            default: What it gets when it did not say; None is all that fits.
            param: The field that says it.

        Raises:
            RequestError: It asked for more than fits.
        """
        room = self.info.max_model_len - len(prompt)
        if wanted is None:
            return room if default is None else min(default, room)
        if wanted > room:
            raise RequestError(
                f"{param}={wanted} and a prompt of {len(prompt)} tokens are more than the "
                f"{self.info.max_model_len} tokens of this server (max_model_len): ask for at "
                f"most {room}.",
                param=param,
            )
        return wanted

    def sequences(
        self,
        fields: SamplingFields,
        prompts: list[tuple[int, ...]],
        samplings: list[SamplingParams],
        *,
        request_id: str,
        api_key: str | None,
        index: int = 0,
    ) -> list[Sequence]:
        """Return the sequences for ``fields.n`` choices of each prompt.

        Args:
            fields: What the request asked for.
            prompts: Token ids of each prompt.
            samplings: One per prompt.
            request_id: The response's id.
            api_key: A digest of the key that the request came with.
            index: The first sequence's number.

        Raises:
            RequestError: They are more than one request may have.
        """
        if len(prompts) * fields.n + index > MAX_SEQUENCES:
            raise RequestError(
                f"{len(prompts)} prompts with n={fields.n} are more than the {MAX_SEQUENCES} "
                f"sequences one request may have. Send them in several requests.",
                param="n",
            )
        return build_sequences(
            prompts,
            samplings,
            n=fields.n,
            request_id=request_id,
            eos_token_ids=self.eos_token_ids,
            priority=fields.priority,
            user=fields.user,
            cache_salt=fields.cache_salt,
            api_key=api_key,
            tokenizer=self.ready_tokenizer,
            options=TextOptions(
                stop=fields.stop,
                include_stop=fields.include_stop_str_in_output,
                skip_special_tokens=fields.skip_special_tokens,
            ),
            index=index,
        )

    def generation(
        self, request_id: str, route: str, sequences: list[Sequence], *, n: int, user: str | None
    ) -> Generation:
        """Return what runs ``sequences`` as one HTTP request."""
        return Generation(
            self.client,
            self.metrics,
            self.notifier,
            self.admission,
            timeout=self.settings.request_timeout_seconds,
            request_id=request_id,
            route=route,
            n=n,
            user=user,
            sequences=sequences,
        )


def new_id(prefix: str) -> str:
    """Return a fresh response id such as ``cmpl-…``."""
    return f"{prefix}-{uuid.uuid4().hex}"


def server_state(request: Request) -> ServerState:
    """Return the state of the server that ``request`` came to."""
    state: ServerState = request.app.state.server
    return state
