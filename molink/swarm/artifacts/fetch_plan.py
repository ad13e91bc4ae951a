"""Plans which parts of a model to fetch for a stage, and their layout on disk.

A stage needs few of the model's tensors, and a later assignment needs others. Each *group*
(``embed``, ``vision``, ``layer-0007``, ``adapters-0007``, ``final``) becomes one safetensors file,
so local files are reused and never fetched twice. Adapters have separate groups, so that a layer's
file doesn't change with them. A model in shards (:mod:`molink.checkpoint.manifest`) keeps its files
unchanged, since hashes are known only for whole shards.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from molink.checkpoint.adapters import is_adapter_tensor
from molink.checkpoint.config import ModelConfig
from molink.checkpoint.low_bit import LowBitScheme
from molink.checkpoint.manifest import CHUNK_BYTES, HashedEntry, Manifest, ManifestEntry, ShardEntry
from molink.checkpoint.prequantized import required_tensors
from molink.checkpoint.safetensors_header import TensorRequirement, TensorSpec, encode_header
from molink.checkpoint.tensor_layout import (
    EMBEDDING_NAME,
    TensorShapes,
    layer_tensors,
    stage_tensors,
    vision_tensors,
)
from molink.errors import BrokenModel
from molink.facts.layer_range import format_layers
from molink.facts.model import Quantize

#: Chunks of a shard (3 MB) requested from the hub together, since each request takes a round trip.
RUN_CHUNKS = 16

T = TypeVar("T", bound=TensorSpec)


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """``count`` chunks of ``part`` from ``index`` on, stored at byte ``offset`` of a local file."""

    part: ManifestEntry
    index: int
    offset: int
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(map(self.part.chunk_length, range(self.index, self.index + self.count)))

    def split_chunks(self) -> Iterator["ChunkRun"]:
        """Split the run into single chunks."""
        for number in range(self.count):
            offset = self.offset + number * CHUNK_BYTES
            yield replace(self, index=self.index + number, offset=offset, count=1)

    def check_data(self, data: bytes) -> None:
        """Verify ``data`` against these chunks; raises as ``part.verify_chunk``."""
        for number in range(self.count):
            chunk = data[number * CHUNK_BYTES :]
            last = number == self.count - 1
            self.part.verify_chunk(self.index + number, chunk if last else chunk[:CHUNK_BYTES])


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A file to write: its header, then ``parts`` one after another; ``nbytes`` in total.

    Alternatively the file is a ``shard``, its only part.
    """

    file: str
    header: bytes
    parts: tuple[ManifestEntry, ...]
    nbytes: int
    shard: ShardEntry | None = None

    def chunk_runs(self) -> Iterator[ChunkRun]:
        """Yield the runs of chunks that fill the file, in order."""
        for part, offset in self.part_offsets():
            yield from split_part(part, offset)

    def part_offsets(self) -> Iterator[tuple[ManifestEntry, int]]:
        """Yield each part with its offset in the file."""
        offset = len(self.header)
        for part in self.parts:
            yield part, offset
            offset += part.nbytes


def group_tensors(config: ModelConfig, first: int, last: int) -> dict[str, TensorShapes]:
    """Return tensors and their shapes by group, for layers ``first … last - 1``.

    Raises:
        BrokenModel: the model has no such layers.
    """
    if not 0 <= first < last <= config.layers:
        raise BrokenModel(
            f"the model has layers 1-{config.layers}, not {format_layers((first, last))}"
        )
    groups: dict[str, TensorShapes] = {}
    ends = stage_tensors(config, first, last)
    for layer in range(first, last):
        for name, shape in layer_tensors(config, layer).items():
            kind = "adapters" if is_adapter_tensor(name) else "layer"
            groups.setdefault(f"{kind}-{layer:04d}", {})[name] = shape
            ends.pop(name)
    if EMBEDDING_NAME in ends:
        groups["embed"] = {EMBEDDING_NAME: ends.pop(EMBEDDING_NAME)}
    if seen := {name: ends.pop(name) for name in vision_tensors(config) if name in ends}:
        groups["vision"] = seen
    if ends:
        groups["final"] = ends
    return groups


def group_file(group: str) -> str:
    """Return the file name of a group."""
    return f"{group}.safetensors"


def plan_files(config: ModelConfig, manifest: Manifest, first: int, last: int) -> list[GroupPlan]:
    """Plan the files of a stage with layers ``first … last - 1``.

    Raises:
        BrokenModel: the model has no such layers, or as :func:`plan_group`.
        UnsupportedModel: see :func:`plan_group`.
    """
    config = config.drop_absent_mtp(manifest.placed if manifest.shards else manifest.tensors)
    groups = group_tensors(config, first, last)
    stored = config.quantized, config.low_bit
    if not manifest.shards:
        return [
            plan_group(group, shapes, manifest.tensors, *stored) for group, shapes in groups.items()
        ]
    shapes = {name: shape for group in groups.values() for name, shape in group.items()}
    wanted = required_tensors(shapes, config.quantized, manifest.placed, config.low_bit)
    for name, one in wanted.items():
        _check_tensor(name, manifest.placed.get(name), one)
    return [
        GroupPlan(shard.name, b"", (shard,), shard.nbytes, shard)
        for shard in manifest.find_shards(wanted)
    ]


def plan_group(
    group: str,
    shapes: TensorShapes,
    tensors: Mapping[str, HashedEntry],
    quantized: Quantize = "none",
    low_bit: LowBitScheme | None = None,
) -> GroupPlan:
    """Plan a group's file, in the storage format of the config (``quantized`` or ``low_bit``).

    Raises:
        BrokenModel: a tensor is missing or contradicts the config.
        UnsupportedModel: the weights' quantization is not implemented.
    """
    wanted = required_tensors(shapes, quantized, tensors, low_bit)
    parts = {
        name: _check_tensor(name, tensors.get(name), stored) for name, stored in wanted.items()
    }
    header = encode_header(parts)
    nbytes = len(header) + sum(part.nbytes for part in parts.values())
    return GroupPlan(group_file(group), header, tuple(parts.values()), nbytes)


def split_part(part: ManifestEntry, offset: int = 0) -> Iterator[ChunkRun]:
    """Split a part into its chunks, or a shard into runs of chunks."""
    together = RUN_CHUNKS if isinstance(part, ShardEntry) else 1
    for index in range(0, part.chunk_count, together):
        count = min(together, part.chunk_count - index)
        yield ChunkRun(part, index, offset + index * CHUNK_BYTES, count)


def _check_tensor(name: str, found: T | None, stored: TensorRequirement) -> T:
    """Check a tensor against the config, the only bound of its size."""
    if found is None:
        raise BrokenModel(f"the model has no tensor {name}")
    if not stored.accepts_shape(found.shape) or found.dtype not in stored.dtypes:
        raise BrokenModel(
            f"the model's tensor {name} is {found.dtype} {list(found.shape)}, not "
            f"{list(stored.shape)} in one of {', '.join(stored.dtypes)}"
        )
    return found
