"""What the attention kernels take to issue, as ``benchmarks/tpu_kernels.py`` counted it.

XLA gives Pallas calls no cost. The figures below were fitted to that script's counts at block 32
(decode of 64 sequences of 1,024 tokens with 1 to 8 KV heads of 128 and 256; prefill of 2,048): they
meet them within a tenth. Those of v4 are v5e's at its clock and over two cores, as v5p's, which
were counted, nearly are. Larger blocks issue up to a tenth faster.
"""

from __future__ import annotations

from typing import NamedTuple

from hexllm.ops.kv_cache import LANES, value_lane

#: Tokens that a kernel multiplies together; see ``hexllm.ops.attention_pallas_tpu.tiling``.
PIECE = 512


class _Issue(NamedTuple):
    """A chip's figures.

    Attributes:
        piece_us: Microseconds of a piece of one sequence's decode.
        head_us: And of each KV head in it.
        prefill: A prefill's issue time over its causal products at the peak.
        prefill_wide: The same with heads of more than 128.
    """

    piece_us: float
    head_us: float
    prefill: float
    prefill_wide: float


_ISSUE = {
    "v4": _Issue(0.104, 0.083, 2.3, 2.2),
    "v5e": _Issue(0.145, 0.116, 1.76, 1.62),
    "v5p": _Issue(0.062, 0.050, 2.32, 2.2),
    "v6e": _Issue(0.120, 0.087, 5.2, 3.1),
    "tpu7x": _Issue(0.150, 0.065, 5.95, 3.7),
}

#: A head of 256 takes so much of one of 128.
_WIDE_HEAD = 1.55


def decode_issue_us(chip: str, seqs: int, context: int, num_kv_heads: int, head_dim: int) -> float:
    """Return the issue time of one layer's decode.

    Args:
        chip: Its name, like ``v5e``.
        seqs: Sequences.
        context: Tokens that each of them sees.
        num_kv_heads: K of a device.
        head_dim: H.
    """
    issue = _ISSUE[chip]
    head_us = issue.head_us * (_WIDE_HEAD if head_dim > LANES else 1)
    return seqs * -(-context // PIECE) * (issue.piece_us + num_kv_heads * head_us)


def prefill_issue_us(chip: str, products_us: float, head_dim: int) -> float:
    """Return the issue time of one layer's prefill.

    Args:
        chip: Its name, like ``v5e``.
        products_us: What its causal products take at the peak.
        head_dim: H; a small one takes the matrix units as long as one of 128.
    """
    issue = _ISSUE[chip]
    padded = max(value_lane(head_dim), LANES) / head_dim
    return products_us * padded * (issue.prefill_wide if head_dim > LANES else issue.prefill)
