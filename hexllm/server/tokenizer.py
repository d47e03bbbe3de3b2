"""The tokenizer as the server needs it: prompts and chats in, bytes of single tokens out."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import CheckpointError, ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: A word no template produces by itself; what follows it closes an assistant's turn.
_PROBE = "hexllmprobe"
#: Talks to see a turn's end in: templates may refuse to end with the assistant's words.
_EXCHANGE = ({"role": "user", "content": "."}, {"role": "assistant", "content": _PROBE})
_EXCHANGES = (_EXCHANGE, (*_EXCHANGE, {"role": "user", "content": "."}))


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte behind each character of a byte-level vocabulary (GPT-2's mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """A Hugging Face tokenizer.

    Attributes:
        special_ids: Ids of its special tokens.
        eos_token_ids: Its end token and the token that closes a turn of its chat template.
        is_byte_level: Whether every token is plain bytes, so that tokens decode independently.
        max_token_length: Characters of its longest token.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._backend = getattr(hf, "backend_tokenizer", None)
        self.special_ids = frozenset(
            token_id for token_id, token in hf.added_tokens_decoder.items() if token.special
        ) | frozenset(hf.all_special_ids)
        self.is_byte_level = self._backend is not None and _is_byte_level(self._backend)
        if self._backend is not None:
            # A prompt is taken whole. Set once, here: changing these while another thread
            # encodes is an error in tokenizers.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.max_token_length = max(map(len, hf.get_vocab()), default=1)
        self._bytes: dict[int, bytes] = {}
        self.eos_token_ids = self._end_tokens()

    @classmethod
    def from_directory(
        cls, directory: Path, *, mode: str = "auto", trust_remote_code: bool = False
    ) -> Tokenizer:
        """Open the tokenizer files in ``directory``.

        Args:
            directory: Holds ``tokenizer.json`` or another of transformers' tokenizer formats.
            mode: ``auto``, or ``slow`` for the pure Python one.
            trust_remote_code: Run the checkpoint's own tokenizer code.

        Raises:
            CheckpointError: No usable tokenizer is there.
        """
        # Set before the first import: without it transformers warns that torch is absent.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(
                str(directory),
                use_fast=mode != "slow",
                trust_remote_code=trust_remote_code,
                local_files_only=True,
            )
        except Exception as error:
            first_line = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise CheckpointError(
                f"No usable tokenizer in {directory}: {first_line} "
                f"Name another checkpoint with --tokenizer."
            ) from error
        if not hf.chat_template:
            hf.chat_template = _processor_template(directory)
        return cls(hf)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, with the tokenizer's own BOS and the like if asked."""
        ids = self._hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return list(ids)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """Return the chat as the model reads it, up to where its answer begins.

        Args:
            messages: Each with ``role`` and ``content`` (text).
            variables: Extra variables for the template (``chat_template_kwargs``).

        Raises:
            RequestError: There is no template, or it refuses these messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "This model's tokenizer has no chat template, so it cannot answer chats. "
                "Send a prompt to /v1/completions instead.",
                param="messages",
            )
        reserved = inspect.signature(self._hf.apply_chat_template).parameters
        for name in variables or {}:
            if name in reserved:
                raise RequestError(
                    f"chat_template_kwargs.{name} is not a variable of the template's own.",
                    param="chat_template_kwargs",
                )
        try:
            text = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **(variables or {})
            )
        except Exception as error:
            # Templates are programs of the checkpoint: whatever one raises is about the messages.
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; ids the tokenizer does not know have none."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return str(
            self._hf.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text (none for an unknown id)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_token_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """Return one token's text; part of a character as OpenAI does, its bytes in hexadecimal."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _compute_token_bytes(self, token_id: int) -> bytes:
        token: str | None
        if self._backend is not None:
            token = self._backend.id_to_token(token_id)
        else:
            token = self._hf.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            if all(char in _ALPHABET for char in token):
                return bytes(_ALPHABET[char] for char in token)
            return token.encode("utf-8", "replace")  # an added token is itself
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode("utf-8", "replace")  # SentencePiece's space

    def _end_tokens(self) -> tuple[int, ...]:
        ends = [] if self._hf.eos_token_id is None else [int(self._hf.eos_token_id)]
        if self.has_chat_template:
            turn_end = self._turn_end()
            if turn_end is not None and turn_end not in ends:
                ends.append(turn_end)
        return tuple(ends)

    def _turn_end(self) -> int | None:
        """Return the token that the chat template puts after an assistant's words.

        It is one that was added to the vocabulary; files do not always call it special.
        """
        added = self._hf.added_tokens_decoder
        for messages in _EXCHANGES:
            try:
                text = str(self._hf.apply_chat_template(list(messages), tokenize=False))
            except Exception as error:
                logger.debug("The chat template refuses a plain exchange: %s", error)
                continue
            _, found, tail = text.rpartition(_PROBE)
            ids = self.encode(tail.lstrip(), add_special_tokens=False) if found else []
            if ids and (ids[0] in added or ids[0] in self.special_ids):
                return ids[0]
        return None


def _processor_template(directory: Path) -> str | None:
    """Return the template of ``chat_template.json``, where older multimodal checkpoints keep it.

    Raises:
        CheckpointError: The file holds no template.
    """
    path = directory / "chat_template.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} holds no chat template ({error!r}). Fetch it again, or remove it to serve "
            f"prompts only."
        ) from error
    return str(template)


def _is_byte_level(backend: Any) -> bool:
    """Return whether the tokenizer decodes with GPT-2's byte alphabet and nothing else."""
    # A decoder's pickled state is its JSON; the whole tokenizer's would be megabytes.
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
    while decoder is not None and decoder.get("type") == "Sequence":
        decoders = decoder.get("decoders", [])
        decoder = decoders[0] if len(decoders) == 1 else None
    return decoder is not None and decoder.get("type") == "ByteLevel"


def check_tokenizer_fits(tokenizer: Tokenizer, vocab_size: int, name: str) -> None:
    """Check that the model has a row for what the tokenizer writes at its ends.

    Raises:
        ConfigError: An end token lies beyond the model's vocabulary.
    """
    beyond = [token_id for token_id in tokenizer.eos_token_ids if token_id >= vocab_size]
    if beyond:
        raise ConfigError(
            f"Tokenizer {name} has end token {beyond[0]}, but the model's vocabulary has only "
            f"{vocab_size} tokens. Name the matching checkpoint with --tokenizer."
        )
