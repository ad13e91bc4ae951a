"""Parts of a model on the Hugging Face hub: chunk by chunk, without its files, or of its files.

A stage needs few tensors, and the hub gives any range of a file. Nothing of this is kept in the
hub's cache: whoever asks checks what comes and keeps it where chunks of peers are kept too.
"""

import threading
import time
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from molink.checkpoint import hub
from molink.checkpoint.header import TensorSpan, header_length, parse_header
from molink.checkpoint.hub_errors import in_words
from molink.checkpoint.manifest import CHUNK_BYTES, SHARD_SUFFIX
from molink.checkpoint.multimodal import text_tensors
from molink.errors import BrokenModel, Unavailable

#: Seconds until a silent line is given up: a peer may be asked instead.
SILENCE_S = 10.0
#: For so many seconds a file is asked for where the hub sent us for it: such addresses expire.
_MOVED_S = 300.0


@dataclass(frozen=True, slots=True)
class _Moved:
    url: str
    until: float


@dataclass(slots=True)
class HubParts:
    """A model on the hub at one commit. Blocks; may be used from several threads."""

    repository: str
    commit: str
    _spans: dict[str, TensorSpan] | None = None
    _moved: dict[str, _Moved] = field(default_factory=dict)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, place: str) -> "HubParts":
        """``place`` is ``OWNER/NAME@COMMIT``."""
        repository, _, commit = place.partition("@")
        return cls(repository, commit)

    def chunk(self, part: str, index: int, begin: int = 0, length: int = CHUNK_BYTES) -> bytes:
        """Bytes of a tensor's chunk from ``begin`` on; at most ``length``, and as many as it has.

        Or of a whole shard, named in place of a tensor, and then of the chunks that follow too.

        Raises:
            ModelError: the hub doesn't have it, or not for us.
            Unavailable: the hub can't be reached, or sends something else.
        """
        first = index * CHUNK_BYTES + begin
        with in_words(self.repository):
            if part.endswith(SHARD_SUFFIX):
                return self.read_range(part, first, length)
            length = min(length, CHUNK_BYTES - begin)
            span = self._tensors().get(part)
            if span is None:
                raise BrokenModel(f"{self.repository} on the hub has no tensor {part}")
            return self.read_range(span.file, span.offset + first, min(length, span.nbytes - first))

    def _tensors(self) -> dict[str, TensorSpan]:
        """Where all tensors lie: read once, from the heads of the files."""
        with self._reading:
            if self._spans is None:
                found: dict[str, TensorSpan] = {}
                for file in hub.look_up(self.repository, self.commit).weights:
                    if file.name.endswith(".safetensors"):
                        found |= self.head(file)
                self._spans = found
            return self._spans

    def head(self, file: hub.HubFile) -> dict[str, TensorSpan]:
        """The tensors of a file, of a text model only; raises what the hub's library does too.

        Raises:
            BrokenModel: it is no safetensors file.
            Unavailable: the hub sends something else.
        """
        path = PurePosixPath(file.name)
        length = header_length(self.read_range(file.name, 0, 8), file.nbytes, path)
        found = parse_header(path, self.read_range(file.name, 8, length), file.nbytes)
        return text_tensors(found, file.name)

    def read_range(self, file: str, first: int, length: int) -> bytes:
        """``length`` bytes of a file, fewer only where it ends; raises as :meth:`head`."""
        data = self._asked(file, first, length)
        if data is None:  # where it was before, it is no more
            self._moved.pop(file, None)
            data = self._asked(file, first, length)
        if data is None:
            raise Unavailable(f"the hub gives no part of {file} of {self.repository}")
        return data

    def _asked(self, file: str, first: int, length: int) -> bytes | None:
        """One request; ``None`` if it was answered with something else."""
        from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils._headers import build_hf_headers

        moved = self._moved.get(file)
        known = moved is not None and time.monotonic() < moved.until
        url = hf_hub_url(self.repository, file, revision=self.commit, endpoint=constants.ENDPOINT)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={first}-{first + length - 1}"}
        if not known:  # a user's token is for the hub alone
            headers |= build_hf_headers()
        at = moved.url if known and moved is not None else url
        found = bytearray()
        session = get_session()
        with session.stream(
            "GET", at, headers=headers, timeout=SILENCE_S, follow_redirects=True
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
            self._moved[file] = _Moved(went, time.monotonic() + _MOVED_S)
        return bytes(found)
