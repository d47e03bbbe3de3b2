"""The class that a model family is: pure functions over a config and a tree of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from hexllm.model import blocks
from hexllm.model.config import KVSpec, ModelConfig
from hexllm.model.linear import dense_leaf
from hexllm.model.rope import share_tables
from hexllm.model.rules import DROP_BUFFERS, DropCopy, Rename, Rule
from hexllm.model.specs import LinearSpec, ParamSpec, Specs, norm_spec
from hexllm.ops.matmul import linear

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hexllm.model.hf_config import HfConfig
    from hexllm.model.rope_config import RopeConfig
    from hexllm.ops.kv_cache import LayerKV
    from hexllm.ops.step import Step


class LayerNorms(NamedTuple):
    """Names of a layer's norms; None where the family has none.

    Attributes:
        before_attention: Of what goes into attention.
        after_attention: Of what attention gives, before it is added to the residual stream.
        before_mlp: Of what goes into the MLP.
        after_mlp: Of what the MLP gives, before it is added.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class DecoderFamily:
    """A family of decoder-only models. Subclass it and override what differs.

    As it stands it is the pre-norm decoder of Llama and its kin; a subclass must give ``name`` and
    ``read_config``. Instances hold nothing, so that they can be static arguments of ``jax.jit``.
    A layer is put together from ``norm``, ``attention_options`` and ``mlp``; ``layer`` itself is
    for families that put it together in another way.

    Attributes:
        name: The family's name in messages.
        ignored_keys: Keys of ``config.json`` known to be without effect in this family.
        norms: Which norms a layer has.
    """

    name: ClassVar[str]
    norms: ClassVar[LayerNorms] = LayerNorms()
    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    def read_config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration, reading every key that matters. Override it."""
        raise NotImplementedError(f"{type(self).__name__} has no read_config")

    def config(self, hf: HfConfig) -> ModelConfig:
        """Return the model's configuration once nothing in ``config.json`` is passed over.

        Args:
            hf: The model's ``config.json``.

        Raises:
            UnsupportedConfigError: A key's value cannot be honoured, or nobody read it.
        """
        cfg = self.read_config(hf)
        hf.check(self.ignored_keys, family=self.name)
        return cfg

    def kv_spec(self, cfg: ModelConfig, i: int) -> KVSpec:
        """Return what layer ``i`` keeps in the KV cache."""
        return KVSpec(cfg.num_key_value_heads, cfg.head_dim, cfg.windows[i])

    def ropes(self, cfg: ModelConfig) -> tuple[RopeConfig, ...]:
        """Return the rotary embeddings that the layers use, so that each is computed once."""
        return (cfg.rope,)

    def norm_spec(self, size: int) -> Specs:
        """Return the specs of one of the family's norms."""
        return norm_spec(size)

    def attention_specs(self, cfg: ModelConfig, i: int) -> Specs:
        """Return the specs of layer ``i``'s attention."""
        del i
        return blocks.attention_specs(cfg)

    def mlp_specs(self, cfg: ModelConfig, i: int) -> Specs:
        """Return the specs of layer ``i``'s MLP, under the name that it has in the layer."""
        del i
        return {"mlp": blocks.gated_mlp_specs(cfg)}

    def layer_specs(self, cfg: ModelConfig, i: int) -> Specs:
        """Return the specs of layer ``i``, under Hugging Face's names."""
        norms = {name: self.norm_spec(cfg.hidden_size) for name in self.norms if name}
        return {"self_attn": self.attention_specs(cfg, i), **self.mlp_specs(cfg, i), **norms}

    def specs(self, cfg: ModelConfig) -> Specs:
        """Return the specs of all parameters, under Hugging Face's names."""
        V, D = cfg.vocab_size, cfg.hidden_size
        specs: Specs = {
            "model": {
                "embed_tokens": {"weight": ParamSpec((V, D), ("vocab", "embed"))},
                "layers": {str(i): self.layer_specs(cfg, i) for i in range(cfg.num_hidden_layers)},
                "norm": self.norm_spec(D),
            }
        }
        if not cfg.tie_word_embeddings:
            specs["lm_head"] = LinearSpec(D, V, axes=("vocab", "embed"), out_dtype="float32")
        return specs

    def linear(self, path: str, spec: LinearSpec) -> Any:
        """Return the leaf of specs of a linear that no quantizer claims."""
        return dense_leaf(path, spec)

    def weight_rules(self, cfg: ModelConfig) -> Sequence[Rule]:
        """Return how the checkpoint's names differ from the specs'; empty for Llama's kin."""
        del cfg
        return ()

    def all_weight_rules(self, cfg: ModelConfig) -> tuple[Rule, ...]:
        """Return ``weight_rules`` and what all families share.

        A decoder saved without its head has no ``model.`` prefix; computed buffers and, where it
        is tied, the head's copy of the embeddings are dropped on purpose.
        """
        shared: tuple[Rule, ...] = (
            Rename(r"^(?=(embed_tokens|layers|norm)\.)", "model."),
            DROP_BUFFERS,
        )
        if cfg.tie_word_embeddings:
            shared += (DropCopy("lm_head.weight", of="model.embed_tokens.weight"),)
        return (*self.weight_rules(cfg), *shared)

    def embed(self, cfg: ModelConfig, params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        """Return the embeddings of ``tokens`` [T]: [T, D]."""
        del cfg
        return blocks.embed(params["model"]["embed_tokens"]["weight"], tokens)

    def norm(self, cfg: ModelConfig, p: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Return x [T, D], normed by ``p``, which is as ``norm_spec`` says."""
        return blocks.rms_norm(x, p["weight"], cfg.rms_norm_eps)

    def attention_options(self, cfg: ModelConfig, i: int) -> dict[str, Any]:
        """Return what :func:`hexllm.model.blocks.attention` is told in layer ``i``."""
        kv = self.kv_spec(cfg, i)
        return {
            "head_dim": cfg.head_dim,
            "rope": cfg.rope,
            "scale": cfg.head_dim**-0.5,
            "window": kv.window,
            "chunk": kv.chunk,
        }

    def mlp(
        self, cfg: ModelConfig, i: int, p: Mapping[str, Any], x: jax.Array, step: Step
    ) -> jax.Array:
        """Return what layer ``i``'s MLP makes of x [T, D]; ``p`` has all the layer's parameters."""
        del i
        return blocks.gated_mlp(p["mlp"], x, step, hidden_act=cfg.hidden_act)

    def layer(
        self,
        cfg: ModelConfig,
        i: int,
        p: Mapping[str, Any],
        x: jax.Array,
        kv: LayerKV,
        step: Step,
    ) -> tuple[jax.Array, LayerKV]:
        """Run layer ``i``.

        Args:
            cfg: The model.
            i: The layer's number.
            p: Its parameters.
            x: [T, D].
            kv: Its cache.
            step: The batch.

        Returns:
            [T, D], and the new cache.
        """

        def normed(name: str | None, x: jax.Array) -> jax.Array:
            return x if name is None else self.norm(cfg, p[name], x)

        with jax.named_scope("self_attn"):
            h = normed(self.norms.before_attention, x)
            options = self.attention_options(cfg, i)
            h, kv = blocks.attention(p["self_attn"], h, kv, step, **options)
            x = x + normed(self.norms.after_attention, h)
        with jax.named_scope("mlp"):
            h = normed(self.norms.before_mlp, x)
            h = self.mlp(cfg, i, p, h, step)
            x = x + normed(self.norms.after_mlp, h)
        return x, kv

    def final_norm(self, cfg: ModelConfig, params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Return the last layer's output [T, D], normed."""
        return self.norm(cfg, params["model"]["norm"], x)

    def forward(
        self,
        cfg: ModelConfig,
        params: Mapping[str, Any],
        tokens: jax.Array,
        kv: tuple[LayerKV, ...],
        step: Step,
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Run the model over a step's tokens.

        Layers are unrolled: a scan over them costs time on TPU and can copy the whole cache.

        Args:
            cfg: The model.
            params: Its parameters.
            tokens: [T] int32.
            kv: Each layer's cache; donate them.
            step: The batch.

        Returns:
            The normed hidden states [T, D], and the new caches.
        """
        with jax.named_scope("rope"):
            step = share_tables(self.ropes(cfg), step)
        with jax.named_scope("embed"):
            x = self.embed(cfg, params, tokens)
        caches = []
        for i in range(cfg.num_hidden_layers):
            with jax.named_scope(f"layer_{i}"):
                p = params["model"]["layers"][str(i)]
                x, cache = self.layer(cfg, i, p, x, kv[i], step)
                caches.append(cache)
        with jax.named_scope("final_norm"):
            x = self.final_norm(cfg, params, x)
        return x, tuple(caches)

    def logits(self, cfg: ModelConfig, params: Mapping[str, Any], hidden: jax.Array) -> jax.Array:
        """Return the logits of normed hidden states.

        Args:
            cfg: The model.
            params: Its parameters.
            hidden: [S, D], rows of ``forward``'s result.

        Returns:
            [S, V] float32.
        """
        with jax.named_scope("lm_head"):
            if cfg.tie_word_embeddings:
                weight = params["model"]["embed_tokens"]["weight"]
                return linear(hidden, weight, out_dtype=jnp.float32)
            logits: jax.Array = params["lm_head"](hidden, None)
            return logits
