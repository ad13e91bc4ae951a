"""The file in which a stage records what its link decides."""

import contextlib
import logging
import re
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

#: Bytes that are kept until they are worth a write.
_BUFFER_BYTES = 16 * 1024


class RecordFile:
    """Takes whole lines; one that can't be written is a warning, never the end of a stage."""

    def __init__(self, folder: Path, pipeline: str, stage: int, epoch: int) -> None:
        """A recording of the same name is overwritten: it is of a worker that has gone."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", pipeline)[:100]
        self.path = folder / f"link-{name}-{stage}-{epoch}.jsonl"
        self._buffer = bytearray()
        self._file: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            log.warning("can't record to %s: %s", self.path, error)

    def write_line(self, line: bytes) -> None:
        """Take the next line; what is on disk always ends with a whole one."""
        if self._file is not None:
            self._buffer += line
            if len(self._buffer) >= _BUFFER_BYTES:
                self._flush_buffer()

    def close(self) -> None:
        """Write the rest."""
        self._flush_buffer()
        if self._file is not None:
            self._close_file(self._file)

    def _flush_buffer(self) -> None:
        if self._file is None or not self._buffer:
            return
        end = self._file.tell()
        try:
            if self._file.write(self._buffer) != len(self._buffer):
                raise OSError("no room for it")
        except OSError as error:
            log.warning("can't record to %s any more: %s", self.path, error)
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            self._close_file(self._file)
        self._buffer.clear()

    def _close_file(self, file: BinaryIO) -> None:
        self._file = None
        # What can't be written any more may be found out only now.
        with contextlib.suppress(OSError):
            file.close()
