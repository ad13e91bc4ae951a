"""Parts of a model on the Hugging Face hub: chunk by chunk, without its files, or of its files.

A stage needs few tensors, and the hub gives any range of a file. Nothing of this is kept in the
hub's cache: whoever asks checks what comes and keeps it where chunks of peers are kept too.

Models on the Hugging Face hub whose shards stay there until a stage needs them.

Of one commit the hub says which files there are, and the SHA-256 of each large one. The heads of
the shards say which tensors they hold: some MB, read by range. So a model can be placed before any
of its weights is here, and whoever holds layers of it fetches their shards alone
(:mod:`molink.checkpoint.manifest`, version 2).
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from molink.checkpoint import hub
from molink.checkpoint.hub import (
    is_refusal,
    network_errors,
    raise_if_stopped,
    translate_hub_errors,
)
from molink.checkpoint.manifest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    SHARD_SUFFIX,
    HashedEntry,
    Manifest,
    ShardEntry,
)
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.multimodal import extract_text_tensors
from molink.checkpoint.safetensors_header import TensorSpan, header_length, parse_header
from molink.errors import BrokenModel, Unavailable
from molink.files import is_plain

#: Seconds until a silent line is given up: a peer may be asked instead.
READ_TIMEOUT_S = 10.0
#: For so many seconds a file is asked for where the hub sent us for it: such addresses expire.
_REDIRECT_TTL_S = 300.0


@dataclass(frozen=True, slots=True)
class _Redirect:
    url: str
    expires_at: float


@dataclass(slots=True)
class HubReader:
    """A model on the hub at one commit. Blocks; may be used from several threads."""

    repository: str
    commit: str
    _spans: dict[str, TensorSpan] | None = None
    _redirects: dict[str, _Redirect] = field(default_factory=dict)
    _spans_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open_place(cls, place: str) -> "HubReader":
        """``place`` is ``OWNER/NAME@COMMIT``."""
        repository, _, commit = place.partition("@")
        return cls(repository, commit)

    def read_chunk(
        self, entry: str, index: int, begin: int = 0, length: int = CHUNK_BYTES
    ) -> bytes:
        """Bytes of a tensor's chunk from ``begin`` on; at most ``length``, and as many as it has.

        Or of a whole shard, named in place of a tensor, and then of the chunks that follow too.

        Raises:
            ModelError: the hub doesn't have it, or not for us.
            Unavailable: the hub can't be reached, or sends something else.
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
        """Where all tensors lie: read once, from the heads of the files."""
        with self._spans_lock:
            if self._spans is None:
                found: dict[str, TensorSpan] = {}
                for file in hub.query_repository(self.repository, self.commit).weight_files:
                    if file.name.endswith(".safetensors"):
                        found |= self.read_header(file)
                self._spans = found
            return self._spans

    def read_header(self, file: hub.HubFile) -> dict[str, TensorSpan]:
        """The tensors of a file, of a text model only; raises what the hub's library does too.

        Raises:
            BrokenModel: it is no safetensors file.
            Unavailable: the hub sends something else.
        """
        path = PurePosixPath(file.name)
        length = header_length(self.read_range(file.name, 0, 8), file.nbytes, path)
        found = parse_header(path, self.read_range(file.name, 8, length), file.nbytes)
        return extract_text_tensors(found, file.name)

    def read_range(self, file: str, first: int, length: int) -> bytes:
        """``length`` bytes of a file, fewer only where it ends; raises as :meth:`read_header`."""
        data = self._request_range(file, first, length)
        if data is None:  # where it was before, it is no more
            self._redirects.pop(file, None)
            data = self._request_range(file, first, length)
        if data is None:
            raise Unavailable(f"the hub gives no part of {file} of {self.repository}")
        return data

    def _request_range(self, file: str, first: int, length: int) -> bytes | None:
        """One request; ``None`` if it was answered with something else."""
        from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils._headers import build_hf_headers

        moved = self._redirects.get(file)
        known = moved is not None and time.monotonic() < moved.expires_at
        url = hf_hub_url(self.repository, file, revision=self.commit, endpoint=constants.ENDPOINT)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={first}-{first + length - 1}"}
        if not known:  # a user's token is for the hub alone
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
            for piece in response.iter_bytes():
                found += piece
                if len(found) > length:
                    return None
            went = str(response.url)
        if urlsplit(went).netloc != urlsplit(url).netloc:
            self._redirects[file] = _Redirect(went, time.monotonic() + _REDIRECT_TTL_S)
        return bytes(found)


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
