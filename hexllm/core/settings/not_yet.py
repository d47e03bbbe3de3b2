"""What Hex-LLM's command line has and hexllm refuses, and why.

A known flag is honoured or refused, never ignored. Whoever builds a feature deletes its row.
"""

from __future__ import annotations

from typing import Any

_NO_LORA = "hexllm loads no LoRA adapters so far"

#: Setting -> (the values that work today, why others do not).
NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_hosts": ((1,), "hexllm runs on one host so far"),
    "disagg_topo": ((None,), "hexllm computes prompts and outputs on the same worker so far"),
    "data_parallel_size": ((1,), "hexllm runs one replica so far; run one server a replica"),
    "worker_distributed_method": (("mp",), "hexllm starts its workers without Ray"),
    "enable_lora": ((False,), _NO_LORA),
    "max_lora_rank": ((16,), _NO_LORA),
    "enable_lora_cache": ((True,), _NO_LORA),
    "max_num_mem_cached_lora": ((16,), _NO_LORA),
}

#: Flags of Hex-LLM's first server (``hex_llm.entrypoints.api_server``) -> what to write now.
RETIRED: dict[str, str] = {
    "num_nodes": "Write --num_hosts instead.",
    "use_ray": "Leave it out: workers are started by --worker_distributed_method=mp.",
    "batch_mode": "Leave it out: batching is always continuous.",
    "tokens_pad_multiple": "Write --prefill_len_padding instead.",
    "seqs_pad_multiple": "Write --prefill_seqs_padding and --decode_seqs_padding instead.",
}

#: Values of settings that Hex-LLM's older images took -> what to do now.
RETIRED_VALUES: dict[tuple[str, str], str] = {
    ("load_format", "pt"): (
        "it is of Hex-LLM's first images and read torch's .bin files, and hexllm reads "
        "safetensors and GGUF. Convert the checkpoint and write --load_format=auto."
    ),
}
