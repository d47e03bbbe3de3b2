"""The tests that every model family must pass, as a class to inherit."""

from __future__ import annotations

import copy
import inspect
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexllm.core.errors import CheckpointError, UnsupportedConfigError
from hexllm.model.hf_config import HfConfig
from hexllm.model.loading import load_params
from hexllm.model.sharding import make_mesh
from hexllm.ops import kv_cache
from hexllm.testing import golden
from hexllm.testing.checkpoints import FilesCheckpoint, write_checkpoint
from hexllm.testing.references import transformers_reference
from hexllm.testing.steps import BLOCK_SIZE, Driver, build_step, num_programs, quick_compiles
from hexllm.testing.synthetic import make_tensors, write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hexllm.model.config import ModelConfig
    from hexllm.model.family import DecoderFamily
    from hexllm.testing.references import Logits

#: float32 logits of the reference and ours, and ours of two ways, differ by less.
TOLERANCE = 1e-4
#: The same computation in another batch differs by less: products of another shape round anew.
ROUNDING = 3e-5
#: Tests of what no key of a configuration has a say in: run for the first one alone.
ONCE = frozenset(
    [
        "test_a_mixed_step_equals_its_parts",
        "test_bfloat16_in_bfloat16_out",
        "test_neighbours_and_padding_change_nothing",
        "test_one_program_a_shape",
    ]
)


class Case:
    """One configuration under test: made up, loaded, and compared with at most once.

    Attributes:
        family: The family.
        name: The configuration's.
        config: ``config.json``.
        directory: Where its files are.
    """

    def __init__(
        self,
        family: DecoderFamily,
        name: str,
        config: dict[str, Any],
        directory: Path,
        reference: Callable[[Path], Logits | None],
    ) -> None:
        self.family = family
        self.name = name
        self.config = config
        self.directory = directory
        self._reference = reference

    @cached_property
    def cfg(self) -> ModelConfig:
        """The model."""
        return self.read(self.config)

    @cached_property
    def checkpoint(self) -> FilesCheckpoint:
        """Its made-up checkpoint."""
        return write_model(self.family, self.cfg, self.config, self.directory)

    @cached_property
    def params(self) -> Any:
        """Its parameters, in float32."""
        return self.load(self.checkpoint)

    @cached_property
    def reference(self) -> Logits | None:
        """The reference's logits of a prompt."""
        assert self.checkpoint
        return self._reference(self.directory)

    @property
    def steady_length(self) -> int:
        """A length up to which no token's rotation depends on how long its sequence gets."""
        rope = self.cfg.rope
        if rope.rope_type == "longrope":
            return min(23, rope.original_max_position_embeddings)
        return min(23, rope.max_position_embeddings) if rope.rope_type == "dynamic" else 23

    def read(self, config: dict[str, Any]) -> ModelConfig:
        """Return what the family makes of a ``config.json``."""
        return self.family.config(HfConfig(copy.deepcopy(config), "config.json"))

    def load(self, checkpoint: FilesCheckpoint, dtype: Any = jnp.float32) -> Any:
        """Return the parameters of a checkpoint."""
        return load_params(self.family, self.cfg, checkpoint, dtype=dtype, mesh=make_mesh())

    def drive(self, num_seqs: int = 1, **options: Any) -> Driver:
        """Return a driver of the model."""
        return Driver(self.family, self.cfg, self.params, num_seqs=num_seqs, **options)

    def tokens(self, length: int, seed: int = 0) -> list[int]:
        """Return a random prompt."""
        rng = np.random.default_rng(seed)
        return [int(token) for token in rng.integers(0, self.cfg.vocab_size, length)]

    def changed(self, **changes: Any) -> dict[str, Any]:
        """Return ``config.json`` with keys of the language model's part set, or None to remove."""
        config = copy.deepcopy(self.config)
        part = config.get("text_config", config)
        for key, value in changes.items():
            part.pop(key, None)
            if value is not None:
                part[key] = value
        return config


class ModelFamilyTests:
    """Proves a family. Subclass it, set ``family`` and ``hf_config``, and pytest does the rest.

    A test that for a good reason does not hold for a family is overridden, or set to None, and
    named in ``deviations``; without the reason the class itself is an error.

    Attributes:
        family: The family's class.
        hf_config: A small model's ``config.json``; windows shorter than 20 tokens, and
            ``architectures`` and ``model_type`` as transformers knows them.
        configs: Further models: name -> the keys that differ; None removes one. With a
            ``text_config`` the keys are of that.
        golden: Where logits are kept for machines without the reference; by default
            ``golden/<class>.json`` beside the test's file.
        deviations: Overridden tests, and why.
    """

    family: ClassVar[type[DecoderFamily]]
    hf_config: ClassVar[Mapping[str, Any]]
    configs: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    golden: ClassVar[Path | None] = None
    deviations: ClassVar[Mapping[str, str]] = {}
    _cases: ClassVar[dict[str, Case]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._cases = {}
        own = vars(ModelFamilyTests)
        tests = [name for name in own if name.startswith("test_")]
        # By what the class has in the end: a mixin must not take a test away either.
        overridden = [name for name in tests if getattr(cls, name, None) is not own[name]]
        unexplained = [name for name in overridden if not cls.deviations.get(name)]
        if unexplained:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(unexplained)} of ModelFamilyTests. Give each "
                f"a reason: deviations = {{{unexplained[0]!r}: 'why'}}."
            )
        unknown = sorted(set(cls.deviations) - set(tests))
        if unknown:
            raise TypeError(f"{cls.__name__}.deviations names no test: {', '.join(unknown)}.")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run inherited tests for every configuration, or for ``hf_config`` alone."""
        if "name" in metafunc.fixturenames:
            is_once = metafunc.function.__name__ in ONCE
            metafunc.parametrize("name", ["default"] if is_once else ["default", *self.configs])

    @classmethod
    def teardown_class(cls) -> None:
        """Let the models and their programs go.

        A program takes a dozen mappings of memory, of which Linux gives a process 65,530; past
        them the compiler crashes, and a long run of many families gets there.
        """
        cls._cases.clear()
        jax.clear_caches()  # type: ignore[no-untyped-call]

    @pytest.fixture(autouse=True)
    def compile_quickly(self) -> Iterator[None]:
        """Most of the tests' time is compiling."""
        with quick_compiles():
            yield

    @pytest.fixture
    def case(self, name: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
        """The configuration under test."""
        if name not in self._cases:
            bare = Case(self.family(), name, dict(self.hf_config), Path(), self.reference)
            config = bare.changed(**self.configs.get(name, {}))
            directory = tmp_path_factory.mktemp(name)
            self._cases[name] = Case(self.family(), name, config, directory, self.reference)
        return self._cases[name]

    def reference(self, directory: Path) -> Logits | None:
        """Return what the logits of the model in ``directory`` must equal.

        transformers' by default; override it for a family that it does not have, with something
        written apart from the family.

        Args:
            directory: It has ``config.json`` and ``model.safetensors``.

        Returns:
            A function from token ids to float32 logits [tokens, V]; None where the implementation
            is not installed.
        """
        return transformers_reference(directory)

    # What is read

    def test_a_key_nobody_knows_is_refused(self, case: Case) -> None:
        for key, value in (("attn_twist", 0.5), ("use_attn_twist", True), ("rope_twist", "x")):
            with pytest.raises(UnsupportedConfigError, match=f"{key}={value!r}"):
                case.read(case.changed(**{key: value}))

    def test_unknown_values_are_refused(self, case: Case) -> None:
        heads = case.cfg.num_attention_heads
        for changes in (
            {"hidden_act": "no_such_thing", "hidden_activation": "no_such_thing"},
            {"rope_scaling": {"rope_type": "no_such_thing"}, "rope_parameters": None},
            {"rope_parameters": {"rope_type": "no_such_thing"}, "rope_scaling": None},
        ):
            with pytest.raises(UnsupportedConfigError, match="no_such_thing"):
                case.read(case.changed(**changes))
        with pytest.raises(UnsupportedConfigError, match=f"num_key_value_heads={heads + 1}"):
            case.read(case.changed(num_key_value_heads=heads + 1))

    def test_transformers_own_spelling_reads_the_same(self, case: Case) -> None:
        config = copy.deepcopy(case.config)
        model_type = config.pop("model_type", None)
        if model_type is None:
            pytest.skip("hf_config has no model_type: transformers does not know the family")
        auto = pytest.importorskip("transformers").AutoConfig
        theirs = auto.for_model(model_type, **config).to_dict()
        assert case.read({**theirs, "architectures": config.get("architectures")}) == case.cfg

    def test_the_configuration_is_hashable(self, case: Case) -> None:
        again = case.read(case.config)
        assert (again, hash(again)) == (case.cfg, hash(case.cfg))

    # What is loaded

    def test_a_checkpoint_loads_and_a_wrong_one_is_refused(self, case: Case) -> None:
        assert case.params  # nothing missing, nothing unused
        tensors = make_tensors(case.family, case.cfg)
        victim = next(name for name in tensors if ".layers.1." in f".{name}" and "norm" not in name)
        shape = tensors[victim].shape
        for change, words in (
            ({victim: None}, "missing"),
            ({"model.layers.0.extra.weight": np.ones(3, np.float32)}, "extra.weight"),
            ({victim: np.ones((*shape[:-1], shape[-1] + 1), np.float32)}, victim),
        ):
            wrong = {k: v for k, v in {**tensors, **change}.items() if v is not None}
            directory = case.directory / f"wrong-{words}"
            with pytest.raises(CheckpointError, match=words.replace(".", r"\.")):
                case.load(write_checkpoint(directory, wrong))

    # What is computed

    def test_logits_equal_the_reference(self, case: Case) -> None:
        if case.reference is None:
            pytest.skip("the reference implementation is not installed; the golden stands for it")
        prompts = {i: case.tokens(length, seed=i) for i, length in enumerate((1, 7, 33))}
        ours = case.drive(3).feed(prompts)
        for i, tokens in prompts.items():
            theirs = case.reference(tokens)
            assert np.ptp(theirs) > 1  # or the tolerance would mean nothing
            np.testing.assert_allclose(ours[i], theirs, atol=TOLERANCE)
            assert ours[i].dtype == np.float32

    def test_logits_equal_the_golden(self, case: Case) -> None:
        file = self.golden or Path(inspect.getfile(type(self))).parent / "golden"
        file /= f"{type(self).__name__}.json"
        V = case.cfg.vocab_size
        if golden.is_writing():
            assert case.reference is not None, "a golden is written from the reference"
            logits = golden.kept_logits(case.reference, V)
            golden.write(file, case.name, case.config, logits)
        kept = golden.read(file, case.name, case.config)
        ours = golden.kept_logits(lambda tokens: case.drive().feed({0: list(tokens)})[0], V)
        assert np.ptp(kept) > 1
        np.testing.assert_allclose(ours, kept, atol=TOLERANCE)

    def test_decode_and_chunks_equal_prefill(self, case: Case) -> None:
        tokens = case.tokens(case.steady_length, seed=2)
        whole = case.drive().feed({0: tokens})[0]
        driver = case.drive(2)
        one_by_one = np.concatenate([driver.feed({1: [token]})[1] for token in tokens])
        np.testing.assert_allclose(one_by_one, whole, atol=TOLERANCE)
        driver = case.drive(2)
        third = len(tokens) // 3
        chunks = [tokens[:third], tokens[third : third + 1], tokens[third + 1 :]]
        parts = np.concatenate([driver.feed({0: chunk})[0] for chunk in chunks])
        np.testing.assert_allclose(parts, whole, atol=TOLERANCE)

    def test_a_mixed_step_equals_its_parts(self, case: Case) -> None:
        a, b = case.tokens(case.steady_length, seed=3), case.tokens(5, seed=4)
        driver = case.drive(2)
        driver.feed({0: a[:-1]})
        both = driver.feed({1: b, 0: a[-1:]})  # a prefill beside a decode
        np.testing.assert_allclose(both[0][0], case.drive().feed({0: a})[0][-1], atol=TOLERANCE)
        np.testing.assert_allclose(both[1], case.drive().feed({0: b})[0], atol=TOLERANCE)

    def test_neighbours_and_padding_change_nothing(self, case: Case) -> None:
        tokens = case.tokens(6, seed=6)
        alone = case.drive(3).feed({1: tokens})[1]
        long = case.tokens(31, seed=7)
        beside = case.drive(3).feed({0: long, 1: tokens, 2: long[:5]})[1]
        np.testing.assert_allclose(beside, alone, atol=ROUNDING)

    def test_what_layers_see_ends_where_the_kv_spec_says(self, case: Case) -> None:
        kinds: dict[tuple[int | None, int | None], int] = {}
        for i in range(case.cfg.num_hidden_layers):
            spec = case.family.kv_spec(case.cfg, i)
            kinds.setdefault((spec.window, spec.chunk), i)
        for (window, chunk), i in kinds.items():
            T = 2 * (window or chunk or 10) + 3
            assert T <= 43, "choose a window or chunk of at most 20 tokens for the test's model"
            run = _run_layer(case, i, T)
            x = np.random.default_rng(i).standard_normal((T, case.cfg.hidden_size))
            changed = x.copy()
            changed[1] += 3.0 * np.random.default_rng(1).standard_normal(x.shape[1])
            moved = np.abs(run(changed) - run(x)).max(axis=1)  # [T]
            at = np.arange(T)
            sees = at >= 1
            if window is not None:
                sees &= at - 1 < window
            if chunk is not None:
                sees &= at // chunk == 1 // chunk
            assert (moved[~sees] <= 1e-6).all(), f"layer {i} sees beyond {window=} {chunk=}"
            assert (moved[sees] > 1e-6).all(), f"layer {i} does not see all of {window=} {chunk=}"

    def test_bfloat16_in_bfloat16_out(self, case: Case) -> None:
        params = case.load(case.checkpoint, jnp.bfloat16)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
        driver = Driver(case.family, case.cfg, params, num_seqs=1, dtype=jnp.bfloat16)
        tokens = case.tokens(case.steady_length, seed=8)
        ours = driver.feed({0: tokens})[0]
        assert driver.hidden.dtype == jnp.bfloat16
        assert ours.dtype == np.float32
        exact = case.drive().feed({0: tokens})[0]
        # A router's near tie may send single tokens elsewhere, so it is the median that is near:
        # the built-in families' is 0.001 to 0.01.
        error = np.abs(ours - exact).max(axis=1) / np.ptp(exact)
        assert np.median(error) < 0.02, "bfloat16 is further from float32 than its rounding"

    def test_one_program_a_shape(self, case: Case) -> None:
        driver = case.drive(3)
        driver.feed({0: case.tokens(9)})
        driver.feed({1: case.tokens(1)})
        before = num_programs()
        again = case.read(case.config)
        driver = Driver(case.family, again, case.params, num_seqs=3)
        driver.feed({2: case.tokens(4), 0: case.tokens(23)})
        driver.feed({1: case.tokens(2), 2: case.tokens(3), 0: case.tokens(1)})
        driver.feed({2: case.tokens(1)})
        assert num_programs() == before, "equal shapes were compiled again"


def _empty_kv(case: Case, num_blocks: int) -> Any:
    specs = [case.family.kv_spec(case.cfg, i) for i in range(case.cfg.num_hidden_layers)]
    return tuple(
        kv_cache.allocate(num_blocks, BLOCK_SIZE, s.num_kv_heads, s.head_dim, jnp.float32)
        for s in specs
    )


def _run_layer(case: Case, i: int, T: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return what layer ``i`` alone does to the T tokens x [T, D] of one sequence."""
    num_blocks = -(-T // BLOCK_SIZE)
    step = build_step([(0, T)], [list(range(num_blocks))], num_blocks * BLOCK_SIZE)
    kv = _empty_kv(case, num_blocks)[i]
    p = case.params["model"]["layers"][str(i)]
    layer = jax.jit(lambda x: case.family.layer(case.cfg, i, p, x, kv, step)[0])
    return lambda x: np.asarray(layer(jnp.asarray(x, jnp.float32)))
