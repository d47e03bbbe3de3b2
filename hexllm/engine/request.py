"""One sequence's state in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hexllm.core.policy import RequestView

if TYPE_CHECKING:
    from hexllm.engine.messages import FinishReason, GenerateRequest
    from hexllm.engine.prefix_cache import Key


class Request:
    """A sequence from arrival to end; it keeps its tokens over a preemption.

    Attributes:
        request_id: Its name.
        sampling: How it is sampled.
        tokens: Prompt and output together, as far as they are known.
        num_prompt_tokens: How many of ``tokens`` are prompt.
        num_pending: How many tokens after ``tokens`` are being sampled by steps under way.
        num_computed: How many tokens are in the KV cache once the steps under way are done.
        blocks: The KV blocks it holds, in order.
        slot: The row of the device's table of last tokens it owns; None while it waits.
        keys: The prefix cache's keys of its full blocks, as far as they were needed.
        num_remembered: How many of its blocks the prefix cache has been told of.
        num_cached_tokens: Prompt tokens that the prefix cache had when it was first admitted.
        num_preemptions: How often it lost its blocks.
        is_finished: Whether it is over, so that what is still being sampled for it is dropped.
    """

    __slots__ = (
        "_source",
        "_stop_ids",
        "blocks",
        "is_finished",
        "keys",
        "max_len",
        "num_cached_tokens",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_remembered",
        "request_id",
        "sampling",
        "slot",
        "tokens",
    )

    def __init__(self, source: GenerateRequest, max_model_len: int) -> None:
        self._source = source
        self.request_id = source.request_id
        self.sampling = source.sampling
        self.tokens = list(source.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.max_len = min(self.num_prompt_tokens + source.sampling.max_tokens, max_model_len)
        self.num_pending = 0
        self.num_computed = 0
        self.blocks: list[int] = []
        self.keys: list[Key] = []
        self.num_remembered = 0
        self.num_cached_tokens = 0
        self.slot: int | None = None
        self.num_preemptions = 0
        self.is_finished = False
        ends = () if source.sampling.ignore_eos else source.eos_token_ids
        self._stop_ids = frozenset((*ends, *source.sampling.stop_token_ids))

    @property
    def cache_salt(self) -> str | None:
        """What its blocks may be shared under; only by requests that give the same."""
        return self._source.cache_salt

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Tokens that no step has computed or is computing, the one being sampled included."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def will_end(self) -> bool:
        """Whether the tokens under way reach its length, whatever they turn out to be."""
        return len(self.tokens) + self.num_pending >= self.max_len

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token and say whether it ends the sequence."""
        self.tokens.append(token)
        if token in self._stop_ids:
            return "stop"
        if len(self.tokens) >= self.max_len:
            return "length"
        return None

    def view(self) -> RequestView:
        """Return what a policy may know."""
        source = self._source
        return RequestView(
            request_id=self.request_id,
            arrival_time=source.arrival_time,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            max_tokens=self.sampling.max_tokens,
            num_blocks=len(self.blocks),
            num_preemptions=self.num_preemptions,
            priority=source.priority,
            user=source.user,
            api_key=source.api_key,
        )
