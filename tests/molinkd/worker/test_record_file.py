from pathlib import Path
from typing import Any, BinaryIO

import pytest

from molinkd.worker.stage_runtime import RecordFile


def test_whole_lines_under_a_name_that_is_safe(tmp_path: Path) -> None:
    record = RecordFile(tmp_path / "new", "a/../b c", 2, 7)
    assert record.path == tmp_path / "new" / "link-a_.._b_c-2-7.jsonl"
    record.write_line(b"one\n")
    assert record.path.read_bytes() == b""
    record.write_line(b"x" * 20_000 + b"\n")
    assert record.path.read_bytes() == b"one\n" + b"x" * 20_000 + b"\n"
    record.write_line(b"last\n")
    record.close()
    assert record.path.read_bytes().endswith(b"x\nlast\n")
    record.write_line(b"too late\n")
    record.close()


class FullDisk:
    """A file with room for a few bytes more, which says so again when it is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return self._file.write(data[:10])

    def close(self) -> None:
        self._file.close()
        raise OSError("no space left")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_ends_a_recording_after_a_whole_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = RecordFile(tmp_path, "p", 0, 1)
    line = b"x" * 20_000 + b"\n"
    record.write_line(line)
    record._file = FullDisk(record._file)  # type: ignore[arg-type, assignment]
    record.write_line(line)
    record.write_line(line)
    record.close()
    assert record.path.read_bytes() == line
    assert caplog.text.count("can't record") == 1


def test_a_folder_that_can_not_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    record = RecordFile(tmp_path / "file", "p", 0, 1)
    record.write_line(b"line\n")
    record.close()
    assert "can't record to" in caplog.text
