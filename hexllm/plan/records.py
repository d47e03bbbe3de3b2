"""What ``hexllm plan`` found, as plain records that reports are written from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from hexllm.core.settings import Settings
    from hexllm.engine.buckets import StepShape
    from hexllm.model.config import ModelConfig
    from hexllm.model.family import DecoderFamily
    from hexllm.plan.floors import Work
    from hexllm.plan.schedule import Estimate
    from hexllm.plan.topology import Topology


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    Attributes:
        name: As the user wrote it.
        family: Its pure functions.
        family_name: The family's name among the plugins.
        cfg: Its configuration; ``max_position_embeddings`` is that of ``--max_model_len`` if given.
        parameters: Numbers in its checkpoint.
    """

    name: str
    family: DecoderFamily
    family_name: str
    cfg: ModelConfig
    parameters: int


@dataclass(frozen=True)
class Options:
    """What to plan.

    Attributes:
        settings: Those of ``hexllm serve``.
        tensor_parallel_size: None takes all devices of the topology that the model divides into.
        context: Tokens of each sequence of the timed decode, and of the timed prefill's prompt.
        seqs: Sequences of the timed decode; None takes as many as fit.
        chip_price: US dollars a chip and hour, or None.
        all_buckets: Whether to compile every shape that a server would.
        dump_hlo: Where to write each program's scheduled HLO, or None.
    """

    settings: Settings
    tensor_parallel_size: int | None = None
    context: int | None = None
    seqs: int | None = None
    chip_price: float | None = None
    all_buckets: bool = False
    dump_hlo: Path | None = None


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        title: What it does, in words.
        kind: ``prefill``, ``decode`` or ``sample``.
        shape: Of a step; None for a sampler.
        seqs: S.
        num_blocks: Of the KV pool that it was compiled with.
        lower_s: Seconds that tracing and lowering took.
        compile_s: Seconds that the compiler took.
        argument_bytes: Weights, KV and inputs, on each device; so are the following.
        temporary_bytes: Scratch memory.
        code_bytes: The program itself.
        total_bytes: All that it needs while it runs.
        estimate: Its times.
    """

    title: str
    kind: str
    shape: StepShape | None
    seqs: int
    num_blocks: int
    lower_s: float
    compile_s: float
    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    total_bytes: int
    estimate: Estimate


@dataclass(frozen=True)
class Timed:
    """A step's times, for a batch that is said.

    Attributes:
        seqs: Sequences in it.
        context: Tokens of each.
        tokens: That come out of it (decode) or go into it (prefill).
        work: What it must do on each device.
        floor_us: Nothing can be faster.
        step: The step's program.
        sampling: The sampler that runs after it; None where it is too little to count (prefill).
    """

    seqs: int
    context: int
    tokens: int
    work: Work
    floor_us: float
    step: Program
    sampling: Program | None

    @property
    def roof_us(self) -> float:
        """The step by its schedule, and the sampling of a batch that draws nothing."""
        greedy = self.sampling.estimate.cheapest_roof_us if self.sampling else 0
        return self.step.estimate.roof_us + greedy

    @property
    def xla_us(self) -> float:
        """Both with XLA's own cycles."""
        greedy = self.sampling.estimate.cheapest_xla_us if self.sampling else 0
        return self.step.estimate.xla_us + greedy

    @property
    def tokens_per_s(self) -> float:
        """The ceiling: the batch's tokens over ``roof_us``."""
        return self.tokens / self.roof_us * 1e6


@dataclass(frozen=True)
class Memory:
    """What each device's HBM is used for, in bytes.

    Attributes:
        hbm: What a program may use.
        weights: Of this device.
        temporaries: The most that a step needs.
        code: Of all programs that a server loads.
        kv: The pool.
        num_programs: That a server compiles.
        bytes_per_block: Of a KV block.
        num_blocks: In the pool.
        block_size: Tokens a block.
        is_measured: Whether temporaries and code are those of compiled programs; else they are
            estimated.
    """

    hbm: int
    weights: int
    temporaries: int
    code: int
    kv: int
    num_programs: int
    bytes_per_block: int
    num_blocks: int
    block_size: int
    is_measured: bool

    @property
    def used(self) -> int:
        """All of it."""
        return self.weights + self.temporaries + self.code + self.kv

    def holds(self, tokens: int) -> bool:
        """Return whether all of it fits, and the pool holds a sequence of so many tokens."""
        return self.used <= self.hbm and self.num_blocks * self.block_size >= tokens

    def seqs_of(self, tokens: int) -> int:
        """Return how many sequences of so many tokens the pool holds."""
        return self.num_blocks // -(-tokens // self.block_size)


@dataclass(frozen=True)
class Remedy:
    """What would make a model fit.

    Attributes:
        kind: ``precision``, ``topology`` or ``max_model_len``.
        value: ``int4``, ``v5e:4x4``, or a number of tokens.
        text: The same in a sentence.
    """

    kind: str
    value: str | int
    text: str


@dataclass(frozen=True)
class Plan:
    """What a model needs and how fast it can be on a topology.

    Attributes:
        model: The model.
        topology: The chips.
        options: What was asked.
        dtype: numpy's name of the weights' and KV's number format.
        tensor_parallel_size: Devices that are used.
        fits: Whether a server with these settings starts.
        reason: Why not; None when it does.
        max_model_len: Planned for.
        model_limit: What ``config.json`` says, or ``--max_model_len``.
        memory: None when not even the weights fit.
        weight_bytes: Of each device.
        decode: The timed decode; None when it does not fit.
        prefill: The timed prefill; likewise.
        programs: All that were compiled.
        flags: To start a server with.
        remedies: What would fit.
        notes: What else to know, in sentences.
    """

    model: Model
    topology: Topology
    options: Options
    dtype: str
    tensor_parallel_size: int
    fits: bool
    reason: str | None
    max_model_len: int
    model_limit: int
    memory: Memory | None
    weight_bytes: int
    decode: Timed | None
    prefill: Timed | None
    programs: tuple[Program, ...]
    flags: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]

    def cost_per_million(self, timed: Timed | None) -> float | None:
        """Return US dollars for a million tokens at a step's ceiling, on all chips, if known."""
        price = self.options.chip_price
        if price is None or timed is None:
            return None
        return price * self.topology.num_chips / 3600 / timed.tokens_per_s * 1e6


#: JSON's own types.
Json = dict[str, Any]
