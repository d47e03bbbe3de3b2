"""Loading: every tensor in its place, bounded memory, and errors that name tensor and file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec as P

from hexllm.core.errors import CheckpointError, ConfigError
from hexllm.model.config import ModelConfig, read_model_config
from hexllm.model.family import DecoderFamily
from hexllm.model.hf_config import HfConfig
from hexllm.model.linear import Dense
from hexllm.model.loading import init_dummy_params, load_params, param_specs
from hexllm.model.rules import Drop, Rename, Rule, Split, Stack
from hexllm.model.sharding import make_mesh, tree_shardings
from hexllm.model.specs import LinearSpec, ParamSpec, flatten, map_linears
from hexllm.plugins.models.mixtral import Mixtral
from hexllm.testing.checkpoints import FilesCheckpoint, write_checkpoint
from hexllm.testing.synthetic import write_model
from tests.families.small import small

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_bias": True,
}


class Plain(DecoderFamily):
    name = "plain"

    def read_config(self, hf: HfConfig) -> ModelConfig:
        return read_model_config(hf, tie_word_embeddings=False)


class Fused(Plain):
    """Its checkpoints fuse q, k and v, and keep a stack of experts apart."""

    name = "fused"

    def layer_specs(self, cfg: ModelConfig, i: int) -> dict[str, Any]:
        experts = {"weight": ParamSpec((3, 4, 8), ("expert", None, "embed"))}
        return {**super().layer_specs(cfg, i), "experts": experts}

    def weight_rules(self, cfg: ModelConfig) -> list[Rule]:
        names = tuple(f"self_attn.{x}_proj" for x in "qkv")
        return [
            Rename(r"^transformer\.", "model."),
            Split("self_attn.qkv", names, (8, 8, 8)),
            Stack("e.*.w", "experts.weight"),
        ]


def read(family: DecoderFamily, **changes: Any) -> ModelConfig:
    return family.config(HfConfig({**CONFIG, **changes}, "config.json"))


def random_tensors(family: DecoderFamily, cfg: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        path: rng.standard_normal(spec.shape).astype(np.float32)
        for path, spec in flatten(param_specs(family, cfg)).items()
    }


def load(family: DecoderFamily, cfg: ModelConfig, checkpoint: Any, **kwargs: Any) -> Any:
    kwargs = {"dtype": jnp.float32, "mesh": make_mesh(), **kwargs}
    return load_params(family, cfg, checkpoint, **kwargs)


def test_every_parameter_gets_its_tensor(tmp_path: Path) -> None:
    family = Plain()
    cfg = read(family)
    tensors = random_tensors(family, cfg)
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    calls: list[tuple[int, int, str]] = []
    checkpoint = write_checkpoint(tmp_path, {**tensors, **extras})
    params = load(family, cfg, checkpoint, progress=lambda *call: calls.append(call))
    loaded = flatten(params)
    assert loaded.keys() == tensors.keys()
    for path, array in tensors.items():
        np.testing.assert_array_equal(loaded[path], array)
    assert isinstance(params["model"]["layers"]["1"]["mlp"]["up_proj"], Dense)
    assert isinstance(loaded["lm_head.weight"].sharding, jax.sharding.NamedSharding)

    total = sum(array.nbytes for array in tensors.values())
    assert [call[1] for call in calls] == [total] * len(tensors)
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == total
    assert {call[2] for call in calls} == set(tensors)
    # each tensor read once, whole, and the buffer not at all
    assert sorted(checkpoint.reads) == sorted((name, None) for name in tensors)


class WithoutImages(Plain):
    name = "without-images"

    def weight_rules(self, cfg: ModelConfig) -> list[Rule]:
        del cfg
        return [
            Drop(r"vision\..*", reason="images are not served"),
            Rename(r"^text\.", ""),
            Drop(r"model\.silent\..*"),
        ]


def test_what_is_dropped_for_a_reason_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = WithoutImages()
    cfg = read(family)
    tensors = {f"text.{name}": array for name, array in random_tensors(family, cfg).items()}
    for i in range(3):
        tensors[f"vision.{i}.weight"] = np.ones((250, 100), np.float32)
    tensors["text.model.silent.weight"] = np.ones(3, np.float32)
    checkpoint = write_checkpoint(tmp_path, tensors)
    with caplog.at_level("INFO", logger="hexllm"):
        load(family, cfg, checkpoint)
    assert [record.getMessage() for record in caplog.records] == [
        f"Checkpoint {tmp_path}: 3 tensors of 0.3 MB in all are left out: images are not served."
    ]
    assert not [name for name, _ in checkpoint.reads if name.startswith("vision")]


def test_splits_and_stacks_read_their_slices(tmp_path: Path) -> None:
    family = Fused()
    cfg = read(family)
    expected = random_tensors(family, cfg)
    stored: dict[str, np.ndarray] = {}
    for path, array in expected.items():
        name = path.replace("model.", "transformer.", 1)
        if ".experts." in path:
            prefix = name.removesuffix(".experts.weight")
            stored |= {f"{prefix}.e.{i}.w": array[i] for i in range(3)}
        elif ".q_proj." in path:
            parts = [expected[path.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            stored[name.replace("q_proj", "qkv")] = np.concatenate(parts)
        elif ".k_proj." not in path and ".v_proj." not in path:
            stored[name] = array
    done = []
    checkpoint = write_checkpoint(tmp_path, stored)
    params = load(family, cfg, checkpoint, progress=lambda *call: done.append(call))
    for path, array in flatten(params).items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)
    assert done[-1][0] == done[-1][1] == sum(array.nbytes for array in stored.values())


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_dtypes_are_cast(tmp_path: Path, stored: str, wanted: str) -> None:
    family = Plain()
    cfg = read(family)
    tensors = {
        path: array.astype(jnp.dtype(stored)) for path, array in random_tensors(family, cfg).items()
    }
    loaded = flatten(load(family, cfg, write_checkpoint(tmp_path, tensors), dtype=wanted))
    for path, array in tensors.items():
        assert loaded[path].dtype == wanted
        np.testing.assert_array_equal(loaded[path], array.astype(jnp.dtype(wanted)))


def test_parameters_never_alias_what_the_loader_gave(tmp_path: Path) -> None:
    """A loader may give views of a file or of one buffer; big aligned arrays would be aliased."""
    family = Plain()
    cfg = read(family, vocab_size=4096, hidden_size=64)
    tensors = random_tensors(family, cfg)

    class Reusing(FilesCheckpoint):
        raw = np.empty(4096 * 64 * 4 + 64, np.uint8)
        offset = -raw.ctypes.data % 64

        def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
            array = super().read(name, index)
            self.raw[:] = 0xFF
            view = self.raw[self.offset : self.offset + array.nbytes].view(array.dtype)
            view = view.reshape(array.shape)
            view[...] = array
            return view

    write_checkpoint(tmp_path, tensors)
    loaded = flatten(load(family, cfg, Reusing(tmp_path)))
    for path, array in tensors.items():
        np.testing.assert_array_equal(loaded[path], array, err_msg=path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), ["1 parameter missing (model.norm.weight)"]),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones((12, 8))}),
            ["1 tensor unused (model.layers.2.mlp.up_proj.weight)"],
        ),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.up_prj.weight": t.pop("model.layers.0.mlp.up_proj.weight")}
            ),
            [
                "1 parameter missing (model.layers.0.mlp.up_proj.weight)",
                "1 tensor unused (model.layers.0.mlp.up_prj.weight)",
                "Is model.layers.0.mlp.up_prj.weight meant to be",
            ],
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": np.ones((10, 8), np.float32)}),
            ["tensor model.embed_tokens.weight in model.safetensors", "[10, 8]", "[11, 8]"],
        ),
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight", "tie_word_embeddings"]),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Any, words: list[str]) -> None:
    family = Plain()
    cfg = read(family)
    tensors = random_tensors(family, cfg)
    change(tensors)
    checkpoint = write_checkpoint(tmp_path, {k: v.astype(np.float32) for k, v in tensors.items()})
    with pytest.raises(CheckpointError) as caught:
        load(family, cfg, checkpoint)
    for word in ["'plain'", str(tmp_path), *words]:
        assert word in str(caught.value)
    assert checkpoint.reads == []  # refused from the headers, before any weight is read


def test_a_tied_head_in_the_file_is_dropped_if_it_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hexllm.model.loading.COMPARED_BYTES", 70)  # two rows at a time
    family = Plain()
    tensors = random_tensors(family, read(family))
    cfg = read(family, tie_word_embeddings=True)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert "lm_head.weight" not in flatten(load(family, cfg, write_checkpoint(tmp_path, tensors)))

    head[-1, -1] += 1
    message = r"lm_head\.weight in model\.safetensors differs.*tie_word_embeddings to false"
    with pytest.raises(CheckpointError, match=message):
        load(family, cfg, write_checkpoint(tmp_path, tensors))
    tensors["lm_head.weight"] = head[:-1]
    with pytest.raises(CheckpointError, match=message):
        load(family, cfg, write_checkpoint(tmp_path, tensors))


def test_a_read_of_another_shape_names_tensor_and_file(tmp_path: Path) -> None:
    class Short(FilesCheckpoint):
        def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
            return super().read(name, index)[:-1]

    family = Plain()
    cfg = read(family)
    write_checkpoint(tmp_path, random_tensors(family, cfg))
    with pytest.raises(CheckpointError, match=r"reading .* from model\.safetensors gave shape"):
        load(family, cfg, Short(tmp_path))


def test_dummy_parameters_are_the_same_tree_seeded_and_finite(tmp_path: Path) -> None:
    family = Plain()
    cfg = read(family)
    loaded = load(family, cfg, write_checkpoint(tmp_path, random_tensors(family, cfg)))
    make = lambda seed: init_dummy_params(  # noqa: E731
        family, cfg, dtype=jnp.float32, mesh=make_mesh(), seed=seed
    )
    first, again, other = make(3), make(3), make(4)
    assert jax.tree.structure(first) == jax.tree.structure(loaded)
    for a, b, c in zip(*map(jax.tree.leaves, (first, again, loaded)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.shape, a.dtype, a.sharding) == (c.shape, c.dtype, c.sharding)
    q = [flatten(p)["model.layers.0.self_attn.q_proj.weight"] for p in (first, other)]
    assert np.abs(q[0] - q[1]).max() > 0
    k = flatten(first)["model.layers.0.self_attn.k_proj.weight"]
    assert np.abs(q[0] - k).max() > 0  # equal shapes do not share values
    assert np.all(flatten(first)["model.norm.weight"] == 1)


def test_a_quantizer_and_an_adapter_replace_leaves_without_the_family_knowing(
    tmp_path: Path,
) -> None:
    @struct.dataclass
    class Adapted:
        base: Any
        a: Any

        def __call__(self, x: jax.Array, step: Any) -> jax.Array:
            return self.base(x, step) + x @ self.a

    class Adapting(Plain):
        def linear(self, path: str, spec: LinearSpec) -> Any:
            leaf = super().linear(path, spec)
            if not path.endswith(".o_proj"):
                return leaf
            slots = ParamSpec(
                (spec.in_features, spec.out_features), (None, None), init="zeros", is_loaded=False
            )
            return Adapted(base=leaf, a=slots)

    family = Adapting()
    cfg = read(family)
    plain = random_tensors(Plain(), cfg)
    params = load(family, cfg, write_checkpoint(tmp_path, plain))  # paths do not show the wrapping
    leaf = params["model"]["layers"]["0"]["self_attn"]["o_proj"]
    name = "model.layers.0.self_attn.o_proj.weight"
    np.testing.assert_array_equal(leaf.base.weight, plain[name])
    assert not np.any(leaf.a)
    assert leaf(jnp.ones((1, 8)), None).shape == (1, 8)


def test_linears_are_rewritten_by_path() -> None:
    seen = {}
    specs = {"m": {"up": LinearSpec(2, 3, bias=True, axes=("mlp", "embed"))}}
    tree = map_linears(specs, lambda path, spec: seen.setdefault(path, Dense.from_spec(path, spec)))
    assert list(seen) == ["m.up"]
    assert list(flatten(tree)) == ["m.up.weight", "m.up.bias"]
    assert flatten(tree)["m.up.bias"].axes == ("mlp",)


def test_every_parameter_has_a_sharding_and_heads_are_dealt_out() -> None:
    family = Plain()
    cfg = read(family)
    shardings = flatten(tree_shardings(param_specs(family, cfg), make_mesh()))
    layer = "model.layers.0."
    assert shardings.keys() == flatten(param_specs(family, cfg)).keys()
    assert shardings[layer + "self_attn.q_proj.weight"].spec == P("tensor", None)
    assert shardings[layer + "self_attn.q_proj.bias"].spec == P("tensor")
    assert shardings[layer + "self_attn.o_proj.weight"].spec == P(None, "tensor")
    assert shardings[layer + "mlp.down_proj.weight"].spec == P(None, "tensor")
    assert shardings["model.norm.weight"].spec == P(None)


def test_too_few_devices_are_named() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=99 needs as many devices"):
        make_mesh(99)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_stack_of_experts_lies_in_a_tpus_memory_as_its_products_read_it(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Mixtral()
    cfg = family.config(
        HfConfig(small("MixtralForCausalLM", "mixtral", num_local_experts=3), "config.json")
    )
    checkpoint = write_model(family, cfg, {}, tmp_path)

    def load_all() -> dict[str, jax.Array]:
        kwargs: Any = {"dtype": jnp.float32, "mesh": make_mesh()}
        if load_format == "dummy":
            return flatten(init_dummy_params(family, cfg, seed=0, **kwargs))
        return flatten(load_params(family, cfg, checkpoint, **kwargs))

    usual = load_all()
    monkeypatch.setattr("hexllm.model.sharding.platform", lambda: "tpu")
    on_tpu = load_all()
    for path, array in on_tpu.items():
        order = array.format.layout.major_to_minor  # type: ignore[union-attr]
        assert order == ((0, 2, 1) if ".experts." in path else tuple(range(array.ndim)))
        np.testing.assert_array_equal(array, usual[path])


def run_script(script: str, *args: str, **env: str) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", script, *args],
        cwd=root,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


TWO_DEVICES = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from hexllm.core.errors import ConfigError
from hexllm.model.loading import load_params
from hexllm.model.sharding import make_mesh
from hexllm.model.specs import flatten
from hexllm.testing.checkpoints import FilesCheckpoint
from tests.model.test_loading import Plain, random_tensors, read
family = Plain()
cfg = read(family, vocab_size=12)
checkpoint = FilesCheckpoint(sys.argv[1])
params = flatten(load_params(family, cfg, checkpoint, dtype=jnp.float32, mesh=make_mesh(2)))
expected = random_tensors(family, cfg)
equal = all(np.array_equal(params[k], v) for k, v in expected.items())
o_proj = [r[1] for r in checkpoint.reads if r[0] == "model.layers.0.self_attn.o_proj.weight"]
norms = [r for r in checkpoint.reads if r[0] == "model.norm.weight"]
try:
    load_params(
        family, read(family, vocab_size=12, num_attention_heads=1), checkpoint,
        dtype=jnp.float32, mesh=make_mesh(2),
    )
except ConfigError as error:
    message = str(error)
print(json.dumps({
    "equal": equal,
    "o_proj": sorted([[s.start, s.stop] for s in index] for index in o_proj),
    "norms": len(norms),
    "message": message,
}))
"""


def test_on_two_devices_each_reads_its_slice_and_shared_ones_are_read_once(tmp_path: Path) -> None:
    family = Plain()
    write_checkpoint(tmp_path, random_tensors(family, read(family, vocab_size=12)))
    answer = run_script(
        TWO_DEVICES, str(tmp_path), XLA_FLAGS="--xla_force_host_platform_device_count=2"
    )
    assert answer["equal"]
    assert answer["o_proj"] == [[[0, 8], [0, 4]], [[0, 8], [4, 8]]]
    assert answer["norms"] == 1
    assert "tensor_parallel_size=2 does not divide num_attention_heads=1" in answer["message"]
    assert "Use 1." in answer["message"]


MEMORY = """
import json, sys
import jax, jax.numpy as jnp
from hexllm.model.loading import load_params
from hexllm.model.sharding import make_mesh
from hexllm.testing.checkpoints import FilesCheckpoint
from tests.model.test_loading import Plain, memory_config
family = Plain()
cfg = memory_config()
checkpoint = FilesCheckpoint(sys.argv[1])
mesh = make_mesh()
# Start the runtime before measuring: what it takes is not the loader's.
warm = jax.device_put(jnp.ones(1000), mesh.devices.flat[0]).block_until_ready()
def resident(field):  # getrusage's peak would be the parent's where that was larger
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
start, before = resident("VmRSS"), resident("VmHWM")
params = load_params(family, cfg, checkpoint, dtype=sys.argv[2], mesh=mesh)
peak = resident("VmHWM")
sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
print(json.dumps({"start": start, "before": before, "peak": peak, "params": sum(sizes),
                  "largest": max(sizes)}))
"""


def memory_config() -> ModelConfig:
    return read(
        Plain(),
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=8,
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(("stored", "wanted"), [("float32", "float32"), ("bfloat16", "float32")])
def test_peak_memory_is_the_parameters_and_one_tensor(
    tmp_path: Path, stored: str, wanted: str
) -> None:
    """On a CPU the parameters are host memory, so the peak counts them and what is in flight.

    Compared: the process's peak resident memory over what it held when loading began, with the
    bytes of the parameters as they are kept plus the largest of them. The checkpoint is read
    without mmap, so no file pages are counted.
    """
    cfg = memory_config()
    rng = np.random.default_rng(0)
    tensors = {
        path: rng.standard_normal(spec.shape, np.float32).astype(jnp.dtype(stored))
        for path, spec in flatten(param_specs(Plain(), cfg)).items()
    }
    write_checkpoint(tmp_path, tensors)
    # glibc keeps up to 64 MB of freed arrays for itself unless its threshold is fixed.
    answer = run_script(MEMORY, str(tmp_path), wanted, MALLOC_MMAP_THRESHOLD_="1000000")
    assert answer["peak"] > answer["before"]  # so the peak is loading's, not an import's
    grown = answer["peak"] - answer["start"]
    slack = 16 << 20  # the allocator's and the interpreter's
    assert answer["params"] > 4 * (answer["largest"] + slack)  # a second copy could not hide
    assert grown < answer["params"] + answer["largest"] + slack
