"""SmolLM2 in transformers, from the same GGUF by another way than ours."""

from __future__ import annotations

import numpy as np

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def load_reference(gguf):
    """Return transformers' LlamaForCausalLM in float32 with the file's weights, written down from
    the file's metadata by hand and not by any code of hexllm."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    state = {}
    for tensor in GGUFReader(gguf).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):  # llama.cpp keeps rotary pairs side by side
                heads = 9 if part == "attn_q" else 3
                values = values.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(values.shape)
        state[name] = torch.from_numpy(np.ascontiguousarray(values))
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


def greedy(model, prompt, count):
    """Return ``count`` greedy tokens and the log-probabilities at each, [count, V]."""
    import torch

    with torch.inference_mode():
        inputs = torch.tensor([prompt])
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    rows = torch.cat(out.logits).double().log_softmax(dim=-1)
    return out.sequences[0, len(prompt) :].tolist(), rows.numpy()
