"""The file in which a stage records what its link decides."""

import contextlib
import logging
import re
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

#: Bytes that are kept until they are worth a write.
_BLOCK = 16 * 1024


class RecordFile:
    """Takes whole lines; one that can't be written is a warning, never the end of a stage."""

    def __init__(self, folder: Path, pipeline: str, stage: int, epoch: int) -> None:
        """A recording of the same name is overwritten: it is of a worker that has gone."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", pipeline)[:100]
        self.path = folder / f"link-{name}-{stage}-{epoch}.jsonl"
        self._waiting = bytearray()
        self._file: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            log.warning("can't record to %s: %s", self.path, error)

    def write(self, line: bytes) -> None:
        """Take the next line; what is on disk always ends with a whole one."""
        if self._file is not None:
            self._waiting += line
            if len(self._waiting) >= _BLOCK:
                self._flush()

    def close(self) -> None:
        """Write the rest."""
        self._flush()
        if self._file is not None:
            self._close(self._file)

    def _flush(self) -> None:
        if self._file is None or not self._waiting:
            return
        end = self._file.tell()
        try:
            if self._file.write(self._waiting) != len(self._waiting):
                raise OSError("no room for it")
        except OSError as error:
            log.warning("can't record to %s any more: %s", self.path, error)
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            self._close(self._file)
        self._waiting.clear()

    def _close(self, file: BinaryIO) -> None:
        self._file = None
        # What can't be written any more may be found out only now.
        with contextlib.suppress(OSError):
            file.close()
