"""Parameters that are larger on the devices than in the checkpoint.

Tensor parallelism deals out whole KV heads and as many rows of the vocabulary to each device
(``hexllm.model.sharding.shard_config``): KV heads are repeated for that, one after another, and the
vocabulary gets rows of zeros at its end, which no token names and whose logits nobody sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    import jax

    from hexllm.model.config import ModelConfig
    from hexllm.model.specs import ParamSpec


@dataclass(frozen=True)
class Widening:
    """How the first dimension of a parameter is made from the checkpoint's.

    Attributes:
        stored: Rows that the checkpoint has.
        rows: Rows that the parameter has.
        unit: Rows repeated together, those of a head; 0 where zeros are added at the end.
    """

    stored: int
    rows: int
    unit: int = 0

    def parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where the rows from ``start`` to ``stop`` are in the checkpoint.

        Args:
            start: A multiple of ``unit``.
            stop: Likewise.

        Returns:
            Runs of (the parameter's first row, the checkpoint's first row, how many). Rows of no
            run are zeros.
        """
        if not self.unit:
            return [(start, start, min(stop, self.stored) - start)] if start < self.stored else []
        repeats = self.rows // self.stored
        return [
            (row, row // self.unit // repeats * self.unit, self.unit)
            for row in range(start, stop, self.unit)
        ]

    def apply(self, stored: jax.Array) -> jax.Array:
        """Return the parameter from all that the checkpoint has of it."""
        if not self.unit:
            padding = ((0, self.rows - self.stored), *((0, 0),) * (stored.ndim - 1))
            return jnp.pad(stored, padding)
        heads = stored.reshape(-1, self.unit, *stored.shape[1:])
        return jnp.repeat(heads, self.rows // self.stored, axis=0).reshape(-1, *stored.shape[1:])


def find_widening(
    path: str, stored: ParamSpec, spec: ParamSpec, cfg: ModelConfig
) -> Widening | None:
    """Return how a parameter is made from the checkpoint's; None where they are the same.

    Args:
        path: Its name, for messages.
        stored: As the checkpoint has it.
        spec: As the devices have it.
        cfg: The model as the checkpoint has it.

    Raises:
        ValueError: They differ in a dimension that is neither of KV heads nor of the vocabulary.
    """
    if stored.shape == spec.shape:
        return None
    (old, *rest), (new, *others) = stored.shape, spec.shape
    if rest == others and spec.axes[0] == "vocab":
        return Widening(old, new)
    if rest == others and spec.axes[0] == "kv_heads":
        return Widening(old, new, unit=old // cfg.num_key_value_heads)
    raise ValueError(
        f"{path} has the shape {spec.shape} on several devices and {stored.shape} on one, and only "
        f"a first dimension of the logical axis kv_heads or vocab can differ; its axes are "
        f"{spec.axes}. Give it the right axes in the family's specs."
    )
