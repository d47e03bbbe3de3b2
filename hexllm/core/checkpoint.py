"""What a weight loader gives: small files, tensor headers, and only the slices asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's header, known without reading its data.

    Attributes:
        shape: Its dimensions as the model family sees them (Hugging Face order).
        dtype: numpy's name of what ``read`` returns: ``float32``, ``bfloat16``, ``int8``, …
        file: The file that holds it, for error messages.
        nbytes: Size of what ``read`` returns for the whole tensor, in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    nbytes: int


@runtime_checkable
class Checkpoint(Protocol):
    """An opened checkpoint in Hugging Face's names, wherever and in whichever format it is stored.

    Opening one must not fetch weights: the server process opens checkpoints for their tokenizer.
    """

    uri: str

    def directory(self) -> Path:
        """Return a local directory holding every small file (config, tokenizer, templates)."""
        ...

    def file(self, name: str) -> Path | None:
        """Return the local path of one small file such as ``config.json``, None when absent."""
        ...

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor's header by its Hugging Face name.

        Raises:
            CheckpointError: A weight file is missing, truncated or not readable.
        """
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return one tensor, or the slice ``index`` of it, reading no more than needed.

        Raises:
            CheckpointError: The tensor is absent or its file does not hold what its header says.
        """
        ...


@runtime_checkable
class WeightLoader(Protocol):
    """Opens checkpoints of one or more URI schemes."""

    def open(self, uri: str, revision: str | None = None) -> Checkpoint:
        """Open ``uri`` (with its scheme, or as the user wrote it when the scheme was implied).

        Raises:
            CheckpointError: Nothing usable is there; the message says what was looked for.
        """
        ...
