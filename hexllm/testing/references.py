"""Independent implementations to compare with: transformers, or a plugin author's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: Token ids -> float32 logits [tokens, V].
Logits: TypeAlias = "Callable[[Sequence[int]], np.ndarray]"


def transformers_reference(directory: Path) -> Logits | None:
    """Load a model as transformers does, from its files; None where torch is not installed.

    Raises:
        AssertionError: transformers misses tensors in the files, or finds some it does not know.
    """
    try:
        import torch
        import transformers
    except ImportError:
        return None
    config = transformers.AutoConfig.from_pretrained(directory)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one wants sizes that 4 divides
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, info = getattr(transformers, architecture).from_pretrained(
        directory, config=config, dtype=torch.float32, output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = [key for key in info[problem] if key != "lm_head.weight"]
        assert not found, f"transformers finds {problem} in the made-up checkpoint: {found}"
    model.eval()

    def logits(tokens: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            out: Any = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return np.asarray(out.float().numpy())

    return logits
