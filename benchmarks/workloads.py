"""The named workloads, so that figures taken months apart are of the same thing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop of requests with exact lengths.

    Attributes:
        requests: Requests a round.
        concurrency: Requests open at once.
        input_len: Prompt tokens of each request that no other request has.
        output_len: Tokens to generate, forced by ``ignore_eos``.
        shared_prefix_len: Prompt tokens before those, the same in every request of a round.
    """

    requests: int
    concurrency: int
    input_len: int
    output_len: int
    shared_prefix_len: int = 0

    @property
    def prompt_len(self) -> int:
        """All prompt tokens of one request."""
        return self.shared_prefix_len + self.input_len

    def describe(self) -> str:
        """Return one line for the head of a table."""
        shared = f"{self.shared_prefix_len} shared + " if self.shared_prefix_len else ""
        return (
            f"{self.requests} requests, {self.concurrency} at once, "
            f"{shared}{self.input_len} tokens in, {self.output_len} out"
        )


#: One stream; a small batch; a full batch; a shared prefix, cold at the start; long prompts.
WORKLOADS = {
    "A": Workload(requests=8, concurrency=1, input_len=128, output_len=128),
    "B": Workload(requests=32, concurrency=8, input_len=256, output_len=128),
    "C": Workload(requests=64, concurrency=32, input_len=256, output_len=64),
    "D": Workload(requests=32, concurrency=8, input_len=64, output_len=32, shared_prefix_len=1024),
    "E": Workload(requests=8, concurrency=4, input_len=2000, output_len=8),
}
