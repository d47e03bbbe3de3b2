"""What the TPU compiler makes of a step that is spread over chips: what travels, what is copied."""

import importlib.util

import pytest

from hexllm.engine.buckets import StepShape
from hexllm.engine.programs import Programs
from hexllm.model.hf_config import HfConfig
from hexllm.model.sharding import make_mesh
from hexllm.plan.collectives import collective_of
from hexllm.plan.hlo import parse_module
from hexllm.plan.topology import devices, parse_topology
from hexllm.plugins.models.llama import Llama
from hexllm.plugins.models.mixtral import Mixtral
from tests.families.small import small

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

#: Two layers of Llama-3.1-8B, and of Mixtral-8x7B.
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MODELS = {
    "llama": (Llama, small("LlamaForCausalLM", "llama", **SIZES, vocab_size=128_256)),
    # Two KV heads for four chips, biases, and a vocabulary that no number of chips divides.
    "llama-odd": (
        Llama,
        small(
            "LlamaForCausalLM",
            "llama",
            **{**SIZES, "num_key_value_heads": 2, "attention_bias": True},
            vocab_size=32_001,
            tie_word_embeddings=True,
        ),
    ),
    "mixtral": (Mixtral, small("MixtralForCausalLM", "mixtral", **SIZES, vocab_size=32_000)),
}
LAYERS = 2
DECODE = StepShape(tokens=64, seqs=64, blocks=32, max_query_len=1)
PREFILL = StepShape(tokens=512, seqs=1, blocks=16, max_query_len=512)
#: Chunked prefill's: sequences that decode beside pieces of prompts, each of up to 8,192 tokens.
MIXED = StepShape(tokens=768, seqs=64, blocks=256, max_query_len=768)


def compile_step(name, topology, shape):
    family, config = MODELS[name]
    cfg = family().config(HfConfig(config, "config.json"))
    chips = devices(parse_topology(topology))
    mesh = make_mesh(len(chips), chips)
    programs = Programs(family(), cfg, mesh, "bfloat16", block_size=32, num_slots=64)
    kv = programs.kv_shapes(DECODE.seqs * DECODE.blocks)
    return parse_module(programs.lower_step(shape, programs.param_shapes(), kv).compile().as_text())


@pytest.mark.parametrize(
    ("name", "topology", "shape"),
    [
        ("llama", "v5e:2x2", DECODE),
        ("llama", "v5e:2x2", PREFILL),
        ("llama", "v5e:2x2", MIXED),
        ("llama-odd", "v5e:2x2", DECODE),
        ("mixtral", "v5e:2x4", DECODE),
        ("mixtral", "v6e:2x2", PREFILL),
    ],
)
def test_two_sums_of_activations_a_layer_travel_and_no_weight_is_copied(name, topology, shape):
    module = compile_step(name, topology, shape)
    found = [collective_of(module, each) for each in module]
    found = [each for each in found if each is not None]
    # The embedding's, and of each layer attention's and the MLP's, in bfloat16.
    assert [each.kind for each in found] == ["all-reduce"] * (1 + 2 * LAYERS)
    activations = shape.tokens * SIZES["hidden_size"] * 2
    assert {each.num_bytes for each in found} == {activations}
    # What is only moved between memories (copy-start) keeps its order: that is no copy.
    copies = [each for each in module if each.opcode == "copy"]
    assert max((each.num_bytes for each in copies), default=0) <= activations
