"""Reads parts of a model on the Hugging Face hub without downloading it.

A stage needs few tensors, and the hub serves any range of a file. Nothing is kept in the hub's
cache: the caller verifies chunks and stores them with those from peers.

Shard headers tell which tensors a shard holds, so a model can be placed before any weights are
downloaded; a peer then fetches only the shards of its layers (:mod:`molink.checkpoint.manifest`,
version 2).
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from molink.checkpoint import hub
from molink.checkpoint.hub import is_refusal, network_errors, raise_if_stopped, translate_hub_errors
from molink.checkpoint.manifest import (
    CHUNK_BYTES,
    SHARD_SUFFIX,
    HashedEntry,
    Manifest,
    ShardEntry,
)
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.multimodal import rename_tensors
from molink.checkpoint.safetensors_header import TensorSpan, header_length, parse_header
from molink.errors import BrokenModel, Unavailable
from molink.files import is_plain

#: Seconds without data after which a read fails; a peer may then be the source instead.
READ_TIMEOUT_S = 10.0
#: Seconds for which a redirect is reused; signed URLs expire.
_REDIRECT_TTL_S = 300.0


@dataclass(frozen=True, slots=True)
class _Redirect:
    url: str
    expires_at: float


@dataclass(slots=True)
class HubReader:
    """Reads a model at one commit. Blocking and thread-safe."""

    repository: str
    commit: str
    _spans: dict[str, TensorSpan] | None = None
    _redirects: dict[str, _Redirect] = field(default_factory=dict)
    _spans_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open_place(cls, place: str) -> "HubReader":
        """Open ``OWNER/NAME@COMMIT``."""
        repository, _, commit = place.partition("@")
        return cls(repository, commit)

    def read_chunk(
        self, entry: str, index: int, begin: int = 0, length: int = CHUNK_BYTES
    ) -> bytes:
        """Read at most ``length`` bytes of a tensor's chunk from ``begin`` on.

        If ``entry`` names a shard, the read may extend into the following chunks.

        Raises:
            ModelError: the hub lacks it or denies access.
            Unavailable: the hub is unreachable or sends something else.
        """
        first = index * CHUNK_BYTES + begin
        with translate_hub_errors(self.repository):
            if entry.endswith(SHARD_SUFFIX):
                return self.read_range(entry, first, length)
            length = min(length, CHUNK_BYTES - begin)
            span = self._locate_tensors().get(entry)
            if span is None:
                raise BrokenModel(f"{self.repository} on the hub has no tensor {entry}")
            return self.read_range(span.file, span.offset + first, min(length, span.nbytes - first))

    def _locate_tensors(self) -> dict[str, TensorSpan]:
        """Locate all tensors by the files' headers, read once."""
        with self._spans_lock:
            if self._spans is None:
                found: dict[str, TensorSpan] = {}
                for file in hub.query_repository(self.repository, self.commit).weight_files:
                    if file.name.endswith(".safetensors"):
                        found |= self.read_header(file)
                self._spans = found
            return self._spans

    def read_header(self, file: hub.HubFile) -> dict[str, TensorSpan]:
        """Read the tensors of a file; also raises what the hub's library raises.

        Raises:
            BrokenModel: not a safetensors file.
            Unavailable: unexpected response.
        """
        path = PurePosixPath(file.name)
        length = header_length(self.read_range(file.name, 0, 8), file.nbytes, path)
        found = parse_header(path, self.read_range(file.name, 8, length), file.nbytes)
        return rename_tensors(found, file.name)

    def read_range(self, file: str, first: int, length: int) -> bytes:
        """Read ``length`` bytes of a file, fewer at its end; raises as :meth:`read_header`."""
        data = self._request_range(file, first, length)
        if data is None:  # the redirect expired
            self._redirects.pop(file, None)
            data = self._request_range(file, first, length)
        if data is None:
            raise Unavailable(f"the hub sent no part of {file} of {self.repository}")
        return data

    def _request_range(self, file: str, first: int, length: int) -> bytes | None:
        """Send one request; ``None`` for an unexpected response."""
        from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils._headers import build_hf_headers

        moved = self._redirects.get(file)
        known = moved is not None and time.monotonic() < moved.expires_at
        url = hf_hub_url(self.repository, file, revision=self.commit, endpoint=constants.ENDPOINT)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={first}-{first + length - 1}"}
        if not known:  # the token must not leak to other hosts
            headers |= build_hf_headers()
        at = moved.url if known and moved is not None else url
        found = bytearray()
        session = get_session()
        with session.stream(
            "GET", at, headers=headers, timeout=READ_TIMEOUT_S, follow_redirects=True
        ) as response:
            if not known:
                hf_raise_for_status(response)
            if response.status_code != 206:
                return None
            for data in response.iter_bytes():
                found += data
                if len(found) > length:
                    return None
            went = str(response.url)
        if urlsplit(went).netloc != urlsplit(url).netloc:
            self._redirects[file] = _Redirect(went, time.monotonic() + _REDIRECT_TTL_S)
        return bytes(found)


_MAX_CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model at ``place`` (``OWNER/NAME@COMMIT``) whose ``shards`` are on the hub.

    ``folder`` in the hub's cache has everything else; ``tensors`` are those of the shards.
    """

    folder: Path
    place: str
    shards: tuple[ShardEntry, ...]
    tensors: dict[str, TensorSpan] = field(repr=False)

    def open_folder(self) -> ModelFolder:
        """Check that the model can be served; reads what is needed from the hub.

        Raises as :meth:`ModelFolder.open`, and:
            Unavailable: the hub is unreachable.
        """
        reader = HubReader.open_place(self.place)

        def read(span: TensorSpan) -> bytes:
            with translate_hub_errors(reader.repository):
                return reader.read_range(span.file, span.offset, span.nbytes)

        return ModelFolder.open_remote(self.folder, self.tensors, read)

    def build_manifest(self, files: Sequence[HashedEntry]) -> Manifest:
        """Build the manifest from the shards and ``files``."""
        tensors = {name: (span.file, span) for name, span in self.tensors.items()}
        return Manifest.build_sharded(files, self.place, self.shards, tensors)


def find_shards(
    repository: str, counter: hub.ByteCounter, stop: threading.Event
) -> HubModel | None:
    """Return a repository's model without its shards; ``None`` if it must be downloaded whole.

    The latter holds for a single weight file, a shard without SHA-256 or with an unportable name,
    and a tensor in two shards.

    Raises as :func:`hub.pull_model`.
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
    fits = file.sha256 and is_plain(file.name) and file.nbytes > 0
    return ShardEntry(file.name, file.nbytes, bytes.fromhex(file.sha256)) if fits else None


def _merge_tensors(
    reader: HubReader, files: Sequence[hub.HubFile], stop: threading.Event
) -> dict[str, TensorSpan] | None:
    """Merge the files' tensors; ``None`` if one is in two files."""
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
    """Read a file's tensors; retry after network failures."""
    for pause in hub.RETRY_DELAYS_S:
        raise_if_stopped(reader.repository, stop)
        try:
            return reader.read_header(file)
        except network_errors() as error:
            if is_refusal(error):
                raise
            stop.wait(pause)
    return reader.read_header(file)
