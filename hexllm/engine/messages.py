"""What passes between the server process and the engine process, pickled over a pipe.

Plain frozen records without JAX or numpy, so that the server can import them for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hexllm.core.events import EngineStats

FinishReason = Literal["stop", "length", "abort", "error"]

#: The most logprobs a position can report besides the sampled token's own (OpenAI's limit).
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled. Validated by the server; the engine trusts it.

    Attributes:
        max_tokens: The most tokens to generate, at least 1.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all; 1 is greedy.
        top_p: Keep the likeliest tokens that hold this much probability; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the likeliest; 0 keeps all.
        seed: 32 bits. Token i of the sequence is drawn with the key folded from it and i's
            position, so that a draw depends on nothing else.
        logprobs: How many of the likeliest tokens to report at each position, besides the sampled
            token's own (0 to MAX_TOP_LOGPROBS); None reports nothing.
        stop_token_ids: Tokens that end the sequence even under ``ignore_eos``.
        ignore_eos: Do not end at the model's own end tokens.
        mask_unscaled: Hex-LLM's order: top-k, top-p and min-p are taken on the logits before they
            are divided by the temperature. OpenAI's order (False) is after.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    mask_unscaled: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken always."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate (a request with ``n`` choices is ``n`` of these).

    Attributes:
        request_id: Unique among open requests.
        prompt_token_ids: At least one token; at most ``max_model_len - 1``.
        sampling: How to sample.
        eos_token_ids: The model's own end tokens.
        arrival_time: ``time.monotonic()`` when it came.
        priority: For policies; smaller is more urgent.
        user: For policies.
        api_key: For policies: a digest of the key it came with.
        cache_salt: Blocks of the prefix cache are shared only by requests with the same one.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    user: str | None = None
    cache_salt: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Drop these requests and free their blocks before the next step."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine process cleanly."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated position, of the distribution before sampling.

    Attributes:
        logprob: The sampled token's.
        top: The likeliest tokens and theirs, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one sequence.

    Attributes:
        request_id: Whose.
        token_ids: New tokens, the end token included when there is one.
        logprobs: One per new token, None when not asked for.
        finish_reason: None while it runs. ``stop`` when its last token is an end token (which
            then closes ``token_ids``), ``length`` at ``max_tokens`` or ``max_model_len``.
        num_cached_tokens: Prompt tokens served from the prefix cache.
        error: What went wrong, with ``finish_reason == "error"``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where one step's time went; the two add up to the time between its end and the last one's.

    Attributes:
        host: Planning, laying out, dispatching and taking in results, while nobody waited.
        device: Waiting for the device. Near the whole where the device never waits for the host.
    """

    host: float
    device: float


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What the engine did since it last said so; without outputs it is a sign of life.

    Attributes:
        outputs: What the steps produced.
        stats: The counters as they stand.
        steps: The steps that ended, oldest first.
    """

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats
    steps: tuple[StepSeconds, ...] = ()


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a starting engine is, for the log.

    Attributes:
        phase: ``loading weights`` or ``compiling``.
        done: Units done (bytes or programs).
        total: Units in all.
        detail: What is being done now.
    """

    phase: str
    done: int
    total: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine knows of itself; sent once, when it is ready.

    Attributes:
        max_model_len: The most tokens of prompt and output together.
        num_blocks: KV blocks.
        block_size: Tokens a block.
        max_running_seqs: Sequences decoded at once.
        vocab_size: Rows of the embedding; a token id must be below it.
        eos_token_ids: From config.json and generation_config.json.
        dtype: Of weights and KV, e.g. ``float32``.
        platform: JAX's: ``cpu`` or ``tpu``.
        family: The model family's name.
        device_memory: Bytes by use: ``weights``, ``kv``.
        manifest: The plugin manifest of the engine process.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    max_running_seqs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    platform: str
    family: str
    device_memory: dict[str, int] = field(default_factory=dict)
    manifest: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine is ending because of an error.

    Attributes:
        error: The error's class name, e.g. ``CheckpointError``.
        message: Its text.
        traceback: Empty for a HexllmError (a user's mistake), else the trace.
    """

    error: str
    message: str
    traceback: str = ""


ToEngine = GenerateRequest | AbortRequests | Shutdown
FromEngine = StepOutputs | StartProgress | EngineInfo | EngineFailed
