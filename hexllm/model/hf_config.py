"""Reads ``config.json`` and remembers what was read, so that nothing in it is passed over.

A key that a family does not know may change the mathematics of the model; serving it all the same
gives wrong text without an error. So every key is read, known to be without effect, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from hexllm.core.errors import UnsupportedConfigError

#: Keys that never touch a decoder's logits: notes, training, generation and tokenizer settings.
METADATA_KEYS = frozenset(
    [
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chat_template",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "max_length",
        "model_max_length",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_return_dict",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_flash_attn_2_enabled",
        "_from_model_config",
        "_name_or_path",
    ]
)

#: Keys without effect at exactly this value.
NEUTRAL_VALUES: Mapping[str, Any] = {
    "pretraining_tp": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "full_attn_mod": 1,  # Phi-4-mini's: every layer sees all
    "interpolate_factor": 1,
}

_REQUIRED: Any = object()
_TEXT = "text_config."


def is_harmless(key: str, value: Any) -> bool:
    """Tell whether ``key`` can be left unread at ``value`` by any family.

    The rule: the value says "off" in the field's convention (None, False, or an empty string,
    list or mapping), or the key is one of METADATA_KEYS, or it has its value in NEUTRAL_VALUES.
    Zero is not harmless: a multiplier of 0 is a different model.
    """
    off = value is None or value is False or (isinstance(value, str | list | dict) and not value)
    return off or key in METADATA_KEYS or (key in NEUTRAL_VALUES and value == NEUTRAL_VALUES[key])


class HfConfig:
    """A ``config.json``, or one of the mappings nested in it.

    Args:
        data: The mapping as it was read.
        source: Where it came from (a path or URI), for error messages.
    """

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        if not isinstance(data, Mapping):
            raise UnsupportedConfigError(f"{source}: {data!r} is not a mapping of keys to values.")
        self.source = source
        self._data = data
        self._path = ""
        self._read: set[str] = set()
        self._nested: dict[str, HfConfig] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def __getitem__(self, key: str) -> Any:
        """Return a value and count its key as read; a mapping comes as an HfConfig.

        Raises:
            UnsupportedConfigError: The key is absent.
        """
        if key not in self._data:
            raise UnsupportedConfigError(
                f"{self.source}: {self._path}{key} is missing. Add it to the model's config.json."
            )
        self._read.add(key)
        value = self._data[key]
        if not isinstance(value, Mapping):
            return value
        if key not in self._nested:
            nested = HfConfig(value, self.source)
            nested._path = f"{self._path}{key}."
            self._nested[key] = nested
        return self._nested[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return ``hf[key]``, or ``default`` when the key is absent."""
        return self[key] if key in self._data else default

    def raw(self) -> dict[str, Any]:
        """Return a copy of this mapping's values; counts nothing as read."""
        return dict(self._data)

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raise the error of a value that cannot be honoured.

        Args:
            key: The offending key of this mapping.
            reason: A sentence of why, and what would be accepted.

        Raises:
            UnsupportedConfigError: Always; it names the file, key and value.
        """
        value = repr(self._data[key]) if key in self._data else "(absent)"
        raise UnsupportedConfigError(f"{self.source}: {self._path}{key}={value}: {reason}")

    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1) -> Any:
        """Return an integer; None where the file holds null or nothing and ``default`` is None.

        Raises:
            UnsupportedConfigError: It is absent without a default, of another type, or too small.
        """
        value = self._typed(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.refuse(key, f"an integer of at least {minimum} is needed.")
        return value

    def integer_or_null(self, key: str, default: Any) -> Any:
        """Return an integer; None where the file says null, ``default`` where it says nothing.

        Raises:
            UnsupportedConfigError: It is of another type, or too small.
        """
        return self.integer(key, None if key in self else default)

    def number(self, key: str, default: Any = _REQUIRED, *, above: float = 0.0) -> Any:
        """Return a finite float above ``above``; None as for :meth:`integer`.

        Raises:
            UnsupportedConfigError: It is absent without a default, of another type, or too small.
        """
        value = self._typed(key, default)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= above:
            self.refuse(key, f"a finite number above {above:g} is needed.")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0.

        Raises:
            UnsupportedConfigError: It is absent or anything else.
        """
        value = self[key]
        if not isinstance(value, list | tuple) or not all(
            isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf
            for v in value
        ):
            self.refuse(key, "a list of finite numbers above 0 is needed.")
        return tuple(float(v) for v in value)

    def layer_numbers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of layers' numbers; None where it is absent or null.

        Raises:
            UnsupportedConfigError: It is anything else.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(i) is not int for i in value):
            self.refuse(key, "a list of layers' numbers is needed.")
        return tuple(value)

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        """Return a truth value; null counts as the default.

        Raises:
            UnsupportedConfigError: It is absent without a default, or not a truth value.
        """
        value = self._typed(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false is needed.")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a string; None as for :meth:`integer`.

        Raises:
            UnsupportedConfigError: It is absent without a default, or not a string.
        """
        value = self._typed(key, default)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "a string is needed.")
        return value

    def section(self, key: str) -> HfConfig | None:
        """Return the mapping under ``key``; None where it is absent, null or empty.

        Raises:
            UnsupportedConfigError: It is not a mapping.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, HfConfig):
            self.refuse(key, "a mapping is needed.")
        return value if value._data else None

    def language_model(self) -> HfConfig:
        """Return the language model's mapping: ``text_config`` of a multimodal checkpoint."""
        return self.section("text_config") or self

    def check(self, ignored_keys: Collection[str] = (), *, family: str = "this") -> None:
        """Refuse what nobody read.

        Args:
            ignored_keys: Keys of the outermost mapping, and of the language model's, that the
                family knows to be without effect.
            family: The family's name, for the message.

        Raises:
            UnsupportedConfigError: A key was not read, is not ignored and is not harmless
                (:func:`is_harmless`); the message names each such key and its value.
        """
        unknown = [
            f"{path}={value!r:.80}"
            for path, value in self._unread()
            if path.removeprefix(_TEXT) not in ignored_keys
            and not is_harmless(path.removeprefix(_TEXT), value)
        ]
        if unknown:
            raise UnsupportedConfigError(
                f"{self.source}: family {family!r} does not implement {', '.join(unknown)}. "
                f"Serving the model without it could give wrong text; choose a family that "
                f"reads it, or remove it from config.json if it is known to be without effect."
            )

    def _unread(self) -> list[tuple[str, Any]]:
        unread = [(self._path + k, v) for k, v in self._data.items() if k not in self._read]
        for nested in self._nested.values():
            unread += nested._unread()
        return unread

    def _typed(self, key: str, default: Any) -> Any:
        if default is _REQUIRED:
            if self[key] is None:
                self.refuse(key, "a value is needed.")
            return self[key]
        value = self.get(key)
        return default if value is None else value
