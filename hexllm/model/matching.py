"""Where each parameter of a model is in a checkpoint, with both ends checked."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from hexllm.core.errors import CheckpointError
from hexllm.model.rules import Piece

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hexllm.core.checkpoint import TensorInfo
    from hexllm.model.rules import Rule
    from hexllm.model.specs import ParamSpec


def match_tensors(
    rules: Sequence[Rule],
    tensors: Mapping[str, TensorInfo],
    params: Mapping[str, ParamSpec],
    *,
    uri: str,
    family: str,
) -> dict[str, tuple[Piece, ...]]:
    """Find where each parameter comes from, and check that nothing is left at either end.

    Args:
        rules: The family's, in order.
        tensors: The checkpoint's headers.
        params: The specs to fill, by path.
        uri: The checkpoint's, for messages.
        family: The family's name, for messages.

    Returns:
        Each parameter's pieces, by path: one, or one for each place of a stacked parameter.

    Raises:
        CheckpointError: A parameter is missing, doubled or of another shape, or a tensor is
            neither used nor dropped on purpose.
    """
    found: dict[str, list[Piece]] = {}
    for tensor, info in tensors.items():
        pieces: tuple[Piece, ...] = (Piece.whole(tensor, info.shape),)
        for rule in rules:
            pieces = tuple(out for piece in pieces for out in rule.apply(piece))
        for piece in pieces:
            found.setdefault(piece.name, []).append(piece)

    missing = [path for path in params if path not in found]
    unused = [piece for path in found if path not in params for piece in found[path]]
    _check_ends(missing, unused, uri=uri, family=family)
    for path, spec in params.items():
        _check_pieces(path, spec, found[path], tensors, uri=uri, family=family)
    return {path: tuple(sorted(found[path], key=lambda p: p.position or 0)) for path in params}


def _check_ends(missing: list[str], unused: list[Piece], *, uri: str, family: str) -> None:
    if not missing and not unused:
        return
    tensors = list(dict.fromkeys(piece.tensor for piece in unused))
    problems = []
    if missing:
        problems.append(f"{_count(missing, 'parameter')} missing ({_first(missing)})")
    if tensors:
        problems.append(f"{_count(tensors, 'tensor')} unused ({_first(tensors)})")
    hints = []
    names = [piece.name for piece in unused]
    for fused in ("gate_up_proj", "qkv_proj", "query_key_value", "experts"):
        if any(fused in name for name in names):
            hints.append(f"The checkpoint has {fused} tensors: choose a family that reads them.")
            break
    else:
        for path in missing[:3]:
            close = difflib.get_close_matches(path, names[:1000], n=1, cutoff=0.8)
            hints += [f"Is {name} meant to be {path}?" for name in close]
    if "lm_head.weight" in missing:
        hints.append("Set tie_word_embeddings in config.json if the model has no head of its own.")
    message = f"Checkpoint {uri} does not fit family {family!r}: {', '.join(problems)}."
    raise CheckpointError(" ".join([message, *hints]))


def _check_pieces(
    path: str,
    spec: ParamSpec,
    pieces: list[Piece],
    tensors: Mapping[str, TensorInfo],
    *,
    uri: str,
    family: str,
) -> None:
    is_stacked = any(piece.position is not None for piece in pieces)
    shape = spec.shape[1:] if is_stacked else spec.shape
    for piece in pieces:
        if piece.shape != shape:
            raise CheckpointError(
                f"Checkpoint {uri} does not fit family {family!r}: tensor {piece.tensor} in "
                f"{tensors[piece.tensor].file} gives {path} the shape {list(piece.shape)}, but "
                f"config.json asks for {list(shape)}."
            )
    places = [piece.position for piece in pieces]
    expected = list(range(spec.shape[0])) if is_stacked else [None]
    if sorted(places, key=lambda place: -1 if place is None else place) != expected:
        gaps = [str(place) for place in expected if place not in places]
        lacking = f"; number {_first(gaps)} is missing" if is_stacked and gaps else ""
        raise CheckpointError(
            f"Checkpoint {uri} does not fit family {family!r}: {path} takes "
            f"{_count(expected, 'tensor')}, and {len(pieces)} came "
            f"({_first([piece.tensor for piece in pieces])}){lacking}."
        )


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _first(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
