"""A tiny Llama with random weights, for tests of the engine: a directory, settings, an engine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hexllm.core.plugins import load_plugins
from hexllm.core.settings import load_settings
from hexllm.engine.build import build_engine
from hexllm.engine.messages import GenerateRequest, SamplingParams

#: Shared by all tests of a machine: the programs are the same, and compiling is what takes long.
CACHE = Path(tempfile.gettempdir()) / "hexllm-test-programs"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 5,
}


def write_model(directory, **changes):
    """Write a checkpoint's config.json; its weights are dummies."""
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


def make_settings(directory, *flags):
    """Return settings that serve the tiny model with small buckets."""
    return load_settings(
        [
            f"--model={directory}",
            "--load_format=dummy",
            "--prefill_len_padding=64",
            "--max_running_seqs=8",
            "--num_blocks=256",
            "--block_size=8",
            "--dtype=float32",
            f"--compilation_cache_dir={CACHE}",
            *flags,
        ]
    )


def make_engine(directory, *flags):
    """Return a ready engine in this process."""
    settings = make_settings(directory, *flags)
    return build_engine(settings, load_plugins(settings.plugins), lambda progress: None)


def request(name, prompt, max_tokens=8, *, eos=(5,), **sampling):
    """Return a request for the engine; greedy unless told otherwise."""
    sampling = {"temperature": 0.0, **sampling}
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerateRequest(name, tuple(prompt), params, eos_token_ids=eos)


def drain(engine):
    """Step until nothing is open; return each request's (tokens, logprobs, finish reason)."""
    results = {}
    while engine.has_work:
        engine.advance()
        outputs = engine.take_outputs()
        for output in outputs.outputs if outputs else ():
            tokens, logprobs, _ = results.get(output.request_id, ((), (), None))
            results[output.request_id] = (
                tokens + output.token_ids,
                logprobs + (output.logprobs or ()),
                output.finish_reason,
            )
    return results


def run(engine, *requests):
    """Handle all requests at once and return their results, in order."""
    for message in requests:
        engine.handle(message)
    results = drain(engine)
    return [results[message.request_id] for message in requests]
