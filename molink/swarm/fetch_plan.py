"""What to fetch of a model for a stage, and how it is laid out on disk here.

A stage needs few of the model's tensors, and a later assignment others: each *group* (``embed``,
``layer-0007``, ``final``) becomes one safetensors file of its own, so that what is here already is
kept and never fetched twice.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.header import TensorSpan
from molink.checkpoint.layout import EMBEDDING, Shapes, layer_tensors, stage_tensors
from molink.checkpoint.prequantized import Stored, stored_tensors
from molink.errors import BrokenModel
from molink.facts.model import Quantize

#: Bytes per request; the wire's bound is 192 KiB.
PIECE_BYTES = 192 * 1024
#: Bytes that the data of a safetensors file is aligned to.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FilePiece:
    """``length`` bytes at ``offset`` of the source's ``file`` belong at ``target`` of ours."""

    file: str
    offset: int
    length: int
    target: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One file to be written: its header, then ``spans`` in a row. ``nbytes`` is its size."""

    file: str
    header: bytes
    spans: tuple[TensorSpan, ...]
    nbytes: int

    def pieces(self) -> Iterator[FilePiece]:
        """The reads that fill the file, in order."""
        target = len(self.header)
        for span in self.spans:
            yield from cut(span.file, span.offset, span.nbytes, target)
            target += span.nbytes


def group_tensors(config: ModelConfig, first: int, last: int) -> dict[str, Shapes]:
    """Tensors with their shapes by group, for a stage of layers ``first … last - 1``.

    Raises:
        BrokenModel: the model has no such layers.
    """
    if not 0 <= first < last <= config.layers:
        raise BrokenModel(f"the model has layers 0:{config.layers}, not {first}:{last}")
    groups: dict[str, Shapes] = {}
    ends = stage_tensors(config, first, last)
    for layer in range(first, last):
        groups[f"layer-{layer:04d}"] = layer_tensors(config, layer)
        for name in groups[f"layer-{layer:04d}"]:
            ends.pop(name)
    if EMBEDDING in ends:
        groups["embed"] = {EMBEDDING: ends.pop(EMBEDDING)}
    if ends:
        groups["final"] = ends
    return groups


def group_file(group: str) -> str:
    """Name of the file that a group is kept in."""
    return f"{group}.safetensors"


def plan_group(
    group: str,
    shapes: Shapes,
    spans: Mapping[str, TensorSpan],
    quantized: Quantize = "none",
) -> GroupPlan:
    """Lay out the file of a group; ``quantized`` is how the config says that it is stored.

    Raises:
        BrokenModel: the source lacks one of the tensors, or it isn't what the config says.
        UnsupportedModel: weights quantized in a way that isn't implemented.
    """
    wanted = stored_tensors(shapes, quantized, spans)
    entries: dict[str, object] = {}
    end = 0
    for name, stored in wanted.items():
        span = spans.get(name)
        if span is None:
            raise BrokenModel(f"the source has no tensor {name}")
        _check(name, span, stored)
        entries[name] = {
            "dtype": span.dtype,
            "shape": list(span.shape),
            "data_offsets": [end, end + span.nbytes],
        }
        end += span.nbytes
    header = _header(entries)
    placed = tuple(spans[name] for name in wanted)
    return GroupPlan(group_file(group), header, placed, len(header) + end)


def cut(file: str, offset: int, nbytes: int, target: int = 0) -> Iterator[FilePiece]:
    """A range of a file in pieces of at most :data:`PIECE_BYTES`."""
    for done in range(0, nbytes, PIECE_BYTES):
        length = min(PIECE_BYTES, nbytes - done)
        yield FilePiece(file, offset + done, length, target + done)


def _check(name: str, span: TensorSpan, stored: Stored) -> None:
    """What a tensor takes is bounded by the config alone, whatever the source says of it."""
    if not stored.fits(span.shape) or span.dtype not in stored.dtypes:
        raise BrokenModel(
            f"the source's tensor {name} is {span.dtype} {list(span.shape)}, not "
            f"{list(stored.shape)} in one of {', '.join(stored.dtypes)}"
        )


def _header(entries: dict[str, object]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
