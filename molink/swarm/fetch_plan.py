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
from molink.checkpoint.layout import EMBEDDING, Shapes, layer_tensors, stage_tensors
from molink.checkpoint.low_bit import LowBit
from molink.checkpoint.manifest import CHUNK_BYTES, Part
from molink.checkpoint.prequantized import stored_tensors
from molink.checkpoint.stored import Stored
from molink.errors import BrokenModel
from molink.facts.model import Quantize

#: Bytes that the data of a safetensors file is aligned to.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunk ``index`` of ``part`` belongs at byte ``target`` of a file here."""

    part: Part
    index: int
    target: int

    @property
    def length(self) -> int:
        """Its bytes."""
        return self.part.length(self.index)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One file to be written: its header, then ``parts`` in a row. ``nbytes`` is its size."""

    file: str
    header: bytes
    parts: tuple[Part, ...]
    nbytes: int

    def pieces(self) -> Iterator[Piece]:
        """The chunks that fill the file, in order."""
        for part, offset in self.offsets():
            yield from cut(part, offset)

    def offsets(self) -> Iterator[tuple[Part, int]]:
        """Where each part begins in the file."""
        offset = len(self.header)
        for part in self.parts:
            yield part, offset
            offset += part.nbytes


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
    tensors: Mapping[str, Part],
    quantized: Quantize = "none",
    low_bit: LowBit | None = None,
) -> GroupPlan:
    """Lay out the file of a group, stored as the config says: ``quantized``, or ``low_bit``.

    Raises:
        BrokenModel: the model lacks one of the tensors, or it isn't what the config says.
        UnsupportedModel: weights quantized in a way that isn't implemented.
    """
    wanted = stored_tensors(shapes, quantized, tensors, low_bit)
    entries: dict[str, object] = {}
    end = 0
    for name, stored in wanted.items():
        part = tensors.get(name)
        if part is None:
            raise BrokenModel(f"the model has no tensor {name}")
        _check(part, stored)
        entries[name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [end, end + part.nbytes],
        }
        end += part.nbytes
    header = _header(entries)
    placed = tuple(tensors[name] for name in wanted)
    return GroupPlan(group_file(group), header, placed, len(header) + end)


def cut(part: Part, target: int = 0) -> Iterator[Piece]:
    """A part in its chunks."""
    for index in range(part.chunks):
        yield Piece(part, index, target + index * CHUNK_BYTES)


def _check(part: Part, stored: Stored) -> None:
    """What a tensor takes is bounded by the config alone, whatever its maker says of it."""
    if not stored.fits(part.shape) or part.dtype not in stored.dtypes:
        raise BrokenModel(
            f"the model's tensor {part.name} is {part.dtype} {list(part.shape)}, not "
            f"{list(stored.shape)} in one of {', '.join(stored.dtypes)}"
        )


def _header(entries: dict[str, object]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
