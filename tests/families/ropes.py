"""Random rotary embeddings, as transformers 5 spells them, and their older spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


def draw(rng: random.Random, kinds: Sequence[str], *, rotary_dim: int = 0) -> dict[str, Any]:
    """Return ``rope_parameters`` of one of ``kinds``.

    Args:
        rng: The source of choices.
        kinds: Values of ``rope_type``.
        rotary_dim: How many dimensions are rotated, for longrope's lists.
    """
    kind = rng.choice(list(kinds))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([10_000.0, 500_000.0])}
    if kind == "linear":
        rope["factor"] = rng.choice([4.0, 2.5])
    if kind == "llama3":
        rope |= {
            "factor": rng.choice([8.0, 32.0]),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": rng.choice([32, 128]),
        }
    if kind == "yarn":
        rope |= {
            "factor": 4.0,
            "original_max_position_embeddings": rng.choice([32, 128]),
            **rng.choice([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 0.9}]),
            **rng.choice([{}, {"truncate": False}]),
        }
    if kind == "longrope":
        # Rising, as trained ones are; the short list stays near 1.
        rope |= {
            "short_factor": [1.0 + 0.05 * i for i in range(rotary_dim // 2)],
            "long_factor": [1.0 + rng.choice([1.5, 0.7]) * i for i in range(rotary_dim // 2)],
        }
    return rope
