"""Models on the Hugging Face hub whose shards stay there until a stage needs them.

Of one commit the hub says which files there are, and the SHA-256 of each large one. The heads of
the shards say which tensors they hold: some MB, read by range. So a model can be placed before any
of its weights is here, and whoever holds layers of it fetches their shards alone
(:mod:`molink.checkpoint.manifest`, version 2).
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from molink.checkpoint import hub
from molink.checkpoint.hub_errors import (
    is_refusal,
    network_errors,
    raise_if_stopped,
    translate_hub_errors,
)
from molink.checkpoint.hub_reader import HubReader
from molink.checkpoint.manifest import DIGEST_BYTES, SHARD_SUFFIX, HashedEntry, Manifest, ShardEntry
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.safetensors_header import TensorSpan
from molink.files import is_plain

#: Heads that are read at once.
_MAX_CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model whose ``shards`` are on the hub, at ``place`` (``OWNER/NAME@COMMIT``).

    ``folder`` is that of the hub's cache and has all but them; ``tensors`` are those that they
    hold, as :func:`molink.checkpoint.model_folder.scan_tensors` has them.
    """

    folder: Path
    place: str
    shards: tuple[ShardEntry, ...]
    tensors: dict[str, TensorSpan] = field(repr=False)

    def open_folder(self) -> ModelFolder:
        """Check that it can be served: what has to be looked into for that is read from the hub.

        Raises as :meth:`ModelFolder.open_folder`, and:
            Unavailable: the hub can't be reached.
        """
        reader = HubReader.open_place(self.place)

        def read(span: TensorSpan) -> bytes:
            with translate_hub_errors(reader.repository):
                return reader.read_range(span.file, span.offset, span.nbytes)

        return ModelFolder.open_remote(self.folder, self.tensors, read)

    def build_manifest(self, files: Sequence[HashedEntry]) -> Manifest:
        """What it consists of, with ``files`` beside its weights."""
        tensors = {name: (span.file, span) for name, span in self.tensors.items()}
        return Manifest.build_sharded(files, self.place, self.shards, tensors)


def find_shards(
    repository: str, counter: hub.ByteCounter, stop: threading.Event
) -> HubModel | None:
    """The model of a repository without its shards; ``None`` where it has to be fetched whole.

    That is so where there is only one file of weights, where the hub names no SHA-256 of one, where
    one has a name that not every file system takes, or where a tensor is in two of them.

    Raises as :func:`hub.pull`.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with translate_hub_errors(repository):
        found = hub.query_repository(repository)
        files = [file for file in found.files if file.name.endswith(SHARD_SUFFIX)]
        shards = [shard for file in files if (shard := _make_shard(file)) is not None]
        if len(shards) < 2 or len(shards) < len(files):
            return None
        tensors = _merge_tensors(HubReader(repository, found.commit), files, stop)
        if tensors is None:
            return None
        others = [file for file in found.weight_files if file not in files]
        folder = hub.fetch_files(found, others, counter, stop)
    return HubModel(folder, f"{repository}@{found.commit}", tuple(shards), tensors)


def _make_shard(file: hub.HubFile) -> ShardEntry | None:
    try:
        digest = bytes.fromhex(file.sha256)
    except ValueError:
        return None
    fits = len(digest) == DIGEST_BYTES and is_plain(file.name) and file.nbytes > 0
    return ShardEntry(file.name, file.nbytes, digest) if fits else None


def _merge_tensors(
    reader: HubReader, files: Sequence[hub.HubFile], stop: threading.Event
) -> dict[str, TensorSpan] | None:
    """All tensors of these files; ``None`` if one is in two of them."""
    found: dict[str, TensorSpan] = {}
    with ThreadPoolExecutor(_MAX_CONCURRENT_READS, "heads") as pool:
        for head in pool.map(lambda file: _read_header(reader, file, stop), files):
            if not found.keys().isdisjoint(head):
                return None
            found |= head
    return found


def _read_header(
    reader: HubReader, file: hub.HubFile, stop: threading.Event
) -> dict[str, TensorSpan]:
    """The tensors of a file; asked for again where the line is the reason that they don't come."""
    for pause in hub.RETRY_DELAYS_S:
        raise_if_stopped(reader.repository, stop)
        try:
            return reader.read_header(file)
        except network_errors() as error:
            if is_refusal(error):
                raise
            stop.wait(pause)
    return reader.read_header(file)
