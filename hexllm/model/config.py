"""What a family knows of a model once its ``config.json`` is understood: frozen and hashable."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from hexllm.model.blocks import ACTIVATIONS
from hexllm.model.rope_config import RopeConfig, read_rope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hexllm.model.hf_config import HfConfig

C = TypeVar("C", bound="ModelConfig")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps in the KV cache.

    Attributes:
        num_kv_heads: K.
        head_dim: H.
        window: A token sees itself and the ``window - 1`` tokens before it; None sees all.
        chunk: A token sees only tokens whose position divided by ``chunk`` is its own; None, all.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder's configuration, under Hugging Face's keys. Families may subclass it.

    Attributes:
        source: Where the configuration came from, for error messages.
        windows: Each layer's attention window (``KVSpec.window``).
        rope: The rotary embedding.
    """

    source: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig


def read_model_config(
    hf: HfConfig,
    *,
    tie_word_embeddings: bool,
    windows: tuple[int | None, ...] | None = None,
    rope: RopeConfig | None = None,
    is_partial_rotary: bool = False,
    hidden_act: str = "silu",
    hidden_act_key: str = "hidden_act",
    head_dim: int | None = None,
    max_position_embeddings: int = 2048,
    rms_norm_eps: float = 1e-6,
    rope_theta: float = 10_000.0,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> ModelConfig:
    """Read the keys that dense decoders share, and refuse sizes that do not fit one another.

    Args:
        hf: The model's ``config.json``. Of a multimodal one the language model's part is read.
        tie_word_embeddings: The family's default in transformers, as the ones below.
        windows: Of each layer, from :func:`read_windows`; by default no layer has one.
        rope: From ``read_rope``, by a family that reads it in a way of its own.
        is_partial_rotary: Whether the family rotates only ``partial_rotary_factor`` of a head.
        hidden_act: Default.
        hidden_act_key: The key of the activation's name.
        head_dim: Default; None is ``hidden_size / num_attention_heads``.
        max_position_embeddings: Default.
        rms_norm_eps: Default.
        rope_theta: Default.
        sizes: Defaults of vocab_size, num_attention_heads and num_key_value_heads, of a family
            whose files leave them out.

    Raises:
        UnsupportedConfigError: A value is missing, of the wrong type, unknown or contradictory;
            the message names its key.
    """
    outer, hf = hf, hf.language_model()
    # A multimodal model ties by its own key, whatever its language model's says.
    is_tied = hf.boolean("tie_word_embeddings", tie_word_embeddings)
    is_tied = outer.boolean("tie_word_embeddings", is_tied)

    def size(key: str) -> int:
        return int(hf.integer(key, sizes[key]) if key in sizes else hf.integer(key))

    D = hf.integer("hidden_size")
    N = size("num_attention_heads")
    K = hf.integer("num_key_value_heads", sizes.get("num_key_value_heads", N))
    if N % K:
        hf.refuse("num_key_value_heads", f"it does not divide num_attention_heads={N}.")
    H = hf.integer("head_dim", head_dim)
    if H is None:
        if D % N:
            hf.refuse(
                "hidden_size",
                f"num_attention_heads={N} does not divide it and there is no head_dim.",
            )
        H = D // N
    if H % 2:
        reason = "rotary embeddings need an even head_dim."
        if hf.get("head_dim") is not None:
            hf.refuse("head_dim", reason)
        hf.refuse("hidden_size", f"with num_attention_heads={N} it gives head_dim {H}; {reason}")
    act = hf.text(hidden_act_key, hidden_act)
    if act not in ACTIVATIONS:
        hf.refuse(hidden_act_key, f"known activations are {', '.join(sorted(ACTIVATIONS))}.")
    L = hf.integer("num_hidden_layers")
    limit = hf.integer("max_position_embeddings", max_position_embeddings)
    return ModelConfig(
        source=hf.source,
        vocab_size=size("vocab_size"),
        hidden_size=D,
        intermediate_size=hf.integer("intermediate_size"),
        num_hidden_layers=L,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        hidden_act=act,
        max_position_embeddings=limit,
        rms_norm_eps=hf.number("rms_norm_eps", rms_norm_eps),
        tie_word_embeddings=is_tied,
        attention_bias=hf.boolean("attention_bias", False),
        mlp_bias=hf.boolean("mlp_bias", False),
        windows=read_windows(hf, None) if windows is None else windows,
        rope=rope
        or read_rope(
            hf,
            head_dim=H,
            max_position_embeddings=limit,
            default_theta=rope_theta,
            is_partial=is_partial_rotary,
        ),
    )


def extend(cls: type[C], cfg: ModelConfig, **fields: Any) -> C:
    """Return ``cfg`` as the subclass ``cls``, with the fields that the subclass adds."""
    return cls(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}, **fields)


def read_windows(
    hf: HfConfig,
    window: int | None,
    *,
    is_sliding: Callable[[int], bool] = lambda i: True,
) -> tuple[int | None, ...]:
    """Read each layer's attention window.

    Args:
        hf: The model's ``config.json``, or the language model's part of it.
        window: Of the layers that have one; None when the model has none.
        is_sliding: Whether layer i has one, where no ``layer_types`` says.

    Raises:
        UnsupportedConfigError: A kind of layer is unknown, or sliding without a window, or there
            are not ``num_hidden_layers`` of them.
    """
    kinds = {"full_attention": None} | ({} if window is None else {"sliding_attention": window})
    sliding = "full_attention" if window is None else "sliding_attention"
    return read_layer_kinds(hf, kinds, lambda i: sliding if is_sliding(i) else "full_attention")


def read_layer_kinds(
    hf: HfConfig, known: Mapping[str, V], default: Callable[[int], str]
) -> tuple[V, ...]:
    """Read what ``layer_types`` says of each layer.

    Args:
        hf: The model's ``config.json``, or the language model's part of it.
        known: What each kind of layer means.
        default: The kind of layer i where the file does not say.

    Raises:
        UnsupportedConfigError: A kind is unknown, or there are not ``num_hidden_layers`` of them.
    """
    L = hf.integer("num_hidden_layers")
    kinds = hf.get("layer_types")
    if kinds is None:
        kinds = [default(i) for i in range(L)]
    if not isinstance(kinds, list | tuple) or len(kinds) != L:
        hf.refuse("layer_types", f"a list of num_hidden_layers={L} names is needed.")
    for i, kind in enumerate(kinds):
        if kind not in known:
            hf.refuse(
                "layer_types",
                f"layer {i} is of kind {kind!r}; this family implements {', '.join(known)}.",
            )
    return tuple(known[kind] for kind in kinds)
