"""transformers' models with random weights, and the directories that a user of them would have.

Everything that needs torch imports it when called: these modules are collected without it too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.e2e import reference

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

#: Ids of <pad>, <s> and </s>; every other token is the word "t" and its number.
SPECIAL = ["<pad>", "<s>", "</s>"]

#: A linear's output over its input, in size.
GAIN = 1.2


def make_model(architecture: str, config: Any, seed: int = 0) -> Any:
    """Return a model in float32 whose norms and biases are not their defaults.

    Its weights are as wide as a linear needs to keep a normed input's size: logits then differ by
    far more than the tolerance, and float32's rounding, transformers' too, stays far below it.
    """
    import torch

    torch.manual_seed(seed)
    config = type(config).from_dict(config.to_dict())
    text = config.get_text_config()
    config.initializer_range = text.initializer_range = GAIN * text.hidden_size**-0.5
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one wants sizes that divide by 4
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                value.add_(0.3 * torch.randn_like(value))
    return model


def text_model(model: Any) -> Any:
    """Return the part that generates text: Llama-4's whole model cannot without an image."""
    is_llama4 = type(model).__name__ == "Llama4ForConditionalGeneration"
    return model.language_model if is_llama4 else model


def vocab_size(config: Any) -> int:
    """Return V of a model, which a multimodal configuration keeps one level down."""
    return int(config.get_text_config().vocab_size)


def save_model(model: Any, directory: Path) -> None:
    """Write config.json, safetensors files, generation_config.json and a tokenizer."""
    transformers.logging.disable_progress_bar()
    model.save_pretrained(directory, max_shard_size="100KB")
    write_tokenizer(directory, vocab_size(model.config))


def write_tokenizer(directory: Path, size: int) -> None:
    """Write a tokenizer of ``size`` words; each id has a text of its own."""
    words = [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), size))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, bos, eos = SPECIAL
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos
    ).save_pretrained(directory)


def token_id(text: str) -> int:
    """Return the id of a token's text."""
    text = text.strip()
    return SPECIAL.index(text) if text in SPECIAL else int(text.removeprefix("t"))


def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """Return transformers' greedy tokens and the log-probabilities at each, [count, V]."""
    return reference.greedy(text_model(model), prompt, count)


def full_logprobs(model: Any, tokens: list[int]) -> np.ndarray:
    """Return transformers' log-probabilities at every token, from one pass without a cache."""
    import torch

    with torch.inference_mode():
        logits = text_model(model)(torch.tensor([tokens]), use_cache=False).logits[0]
    rows: np.ndarray = logits.double().log_softmax(dim=-1).numpy()
    return rows


def read_config(directory: Path) -> dict[str, Any]:
    """Return the directory's config.json."""
    return dict(json.loads((directory / "config.json").read_text()))
