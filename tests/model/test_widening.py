from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hexllm.model.hf_config import HfConfig
from hexllm.model.specs import ParamSpec
from hexllm.model.widening import Widening, find_widening
from hexllm.plugins.models.llama import Llama
from tests.families.small import small

CFG = Llama().config(HfConfig(small("LlamaForCausalLM", "llama"), "config.json"))  # K is 2


def filled(widening: Widening, stored: np.ndarray, shards: int) -> np.ndarray:
    """Return what the shards read of ``stored``, put together."""
    rows = widening.rows // shards
    shape = (rows, *stored.shape[1:])
    parts = [np.zeros(shape, stored.dtype) for _ in range(shards)]
    for i, part in enumerate(parts):
        for row, source, count in widening.parts(i * rows, (i + 1) * rows):
            at = row - i * rows
            part[at : at + count] = stored[source : source + count]
    return np.concatenate(parts)


@pytest.mark.parametrize("shape", [(6, 5), (6,)])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_heads_are_repeated_one_after_another(shape: tuple[int, ...], shards: int) -> None:
    stored = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    widening = Widening(stored=6, rows=12, unit=3)
    a, b = stored[:3], stored[3:]
    expected = np.concatenate([a, a, b, b])
    np.testing.assert_array_equal(filled(widening, stored, shards), expected)
    np.testing.assert_array_equal(widening.apply(jnp.asarray(stored)), expected)


@pytest.mark.parametrize(("rows", "shards"), [(8, 2), (8, 4), (8, 8), (12, 4)])
def test_a_vocabulary_gets_zeros_at_its_end(rows: int, shards: int) -> None:
    stored = np.arange(1, 15, dtype=np.float32).reshape(7, 2)
    widening = Widening(stored=7, rows=rows)
    expected = np.concatenate([stored, np.zeros((rows - 7, 2), np.float32)])
    np.testing.assert_array_equal(filled(widening, stored, shards), expected)
    np.testing.assert_array_equal(widening.apply(jnp.asarray(stored)), expected)


def test_axes_say_which_it_is() -> None:
    def find(axis: str | None, stored: tuple[int, ...], rows: int) -> Widening | None:
        axes = (axis, "embed")[: len(stored)]
        old, new = ParamSpec(stored, axes), ParamSpec((rows, *stored[1:]), axes)
        return find_widening("a.b", old, new, CFG)

    assert find("heads", (8, 4), 8) is None
    assert find("kv_heads", (8, 4), 16) == Widening(8, 16, unit=4)
    assert find("kv_heads", (8,), 16) == Widening(8, 16, unit=4)
    assert find("vocab", (97, 4), 100) == Widening(97, 100)
    with pytest.raises(ValueError, match=r"a\.b has the shape \(16, 4\) .* axes are \(None, 'em"):
        find(None, (8, 4), 16)
