"""What to fetch of a model for a stage, and how it is laid out on disk here.

A stage needs few of the model's tensors, and a later assignment others: each *group* (``embed``,
``layer-0007``, ``final``) becomes one safetensors file of its own, so that what is here already is
kept and never fetched twice.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from molink.errors import BrokenModel
from molink.model.config import ModelConfig
from molink.model.header import TensorSpan
from molink.model.layout import EMBEDDING, layer_tensors, stage_tensors

#: Bytes per request; the wire's bound is 192 KiB.
PIECE_BYTES = 192 * 1024
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """``length`` bytes at ``offset`` of the source's ``file`` belong at ``target`` of ours."""

    file: str
    offset: int
    length: int
    target: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One file to be written: its header, then the bytes of the pieces. ``nbytes`` is its size."""

    file: str
    header: bytes
    pieces: tuple[Piece, ...]
    nbytes: int


def group_tensors(config: ModelConfig, first: int, last: int) -> dict[str, list[str]]:
    """Tensor names by group, for a stage of layers ``first … last - 1``."""
    groups: dict[str, list[str]] = {}
    ends = dict(stage_tensors(config, first, last))
    for layer in range(first, last):
        names = list(layer_tensors(config, layer))
        groups[f"layer-{layer:04d}"] = names
        for name in names:
            ends.pop(name)
    if EMBEDDING in ends:
        ends.pop(EMBEDDING)
        groups["embed"] = [EMBEDDING]
    if ends:
        groups["final"] = list(ends)
    return groups


def group_file(group: str) -> str:
    """Name of the file that a group is kept in."""
    return f"{group}.safetensors"


def plan_group(group: str, names: list[str], spans: Mapping[str, TensorSpan]) -> GroupPlan:
    """Lay out the file of a group.

    Raises:
        BrokenModel: the source lacks one of the tensors.
    """
    entries: dict[str, object] = {}
    placed: list[tuple[TensorSpan, int]] = []
    end = 0
    for name in names:
        span = spans.get(name)
        if span is None:
            raise BrokenModel(f"the source has no tensor {name}")
        entries[name] = {
            "dtype": span.dtype,
            "shape": list(span.shape),
            "data_offsets": [end, end + span.nbytes],
        }
        placed.append((span, end))
        end += span.nbytes
    header = _header(entries)
    pieces = [piece for span, at in placed for piece in _pieces(span, len(header) + at)]
    return GroupPlan(group_file(group), header, tuple(pieces), len(header) + end)


def cut(file: str, offset: int, nbytes: int, target: int = 0) -> Iterator[Piece]:
    """A range of a file in pieces of at most :data:`PIECE_BYTES`."""
    for done in range(0, nbytes, PIECE_BYTES):
        length = min(PIECE_BYTES, nbytes - done)
        yield Piece(file, offset + done, length, target + done)


def _pieces(span: TensorSpan, target: int) -> Iterator[Piece]:
    return cut(span.file, span.offset, span.nbytes, target)


def _header(entries: dict[str, object]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
