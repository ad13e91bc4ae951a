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
from molink.checkpoint.hub_errors import translate_hub_errors
from molink.checkpoint.manifest import CHUNK_BYTES, SHARD_SUFFIX
from molink.checkpoint.multimodal import extract_text_tensors
from molink.checkpoint.safetensors_header import TensorSpan, header_length, parse_header
from molink.errors import BrokenModel, Unavailable

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
