"""``molink logs``."""

import json
from pathlib import Path

import pytest

from molinkd.cli import logs
from molinkd.cli.main import run

DAEMON = """\
2026-01-02 10:00:00,000 INFO molinkd.peer: begins
2026-01-02 10:00:02,500 ERROR molinkd.peer: it broke
Traceback (most recent call last):
  File "x.py", line 1
"""
WORKER = "2026-01-02 10:00:01,000 WARNING molinkd.worker: slow\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "daemon.log").write_text(DAEMON, encoding="utf-8")
    (folder / "daemon.log.1").write_text(
        "2026-01-01 09:00:00,000 INFO molinkd.peer: older\n", encoding="utf-8"
    )
    (folder / "worker-p1-0.log").write_text(WORKER, encoding="utf-8")
    (folder / "background.log").write_text("\x1b[2Jno record\n", encoding="utf-8")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], home: Path, *options: str) -> list[str]:
    assert run(["logs", "--home", str(home), *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_logs_of_all_processes_are_merged_by_time(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, home)
    assert lines[0] == r"background INFO \x1b[2Jno record"  # log texts can't control the terminal
    assert [line.rpartition(": ")[2] for line in lines[1:5]] == [
        "older",
        "begins",
        "slow",
        "it broke",
    ]
    assert lines[5:] == ["Traceback (most recent call last):", '  File "x.py", line 1']


def test_limits_and_filters(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, home, "-n", "1", "--process", "worker") == [
        "2026-01-02 10:00:01,000 worker-p1-0 WARNING molinkd.worker: slow"
    ]
    assert len(shown(capsys, home, "--level", "warning")) == 4
    assert shown(capsys, home, "-n", "0") == []


def test_json_has_a_traceback_in_its_record(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shown(capsys, home, "--json", "--level", "error")
    record = json.loads(line)
    assert record["process"] == "daemon"
    assert record["level"] == "ERROR"
    assert record["text"].startswith("it broke\nTraceback")


def test_following_a_log(home: Path) -> None:
    folder = home / "logs"
    ends: dict[Path, int] = {}
    logs._new_records(folder, ends)
    assert logs._new_records(folder, ends) == []
    with (folder / "daemon.log").open("a", encoding="utf-8") as file:
        file.write("2026-01-02 10:00:03,000 INFO molinkd.peer: goes on\n")
    (one,) = logs._new_records(folder, ends)
    assert one.text == "goes on"
    # The log was rotated.
    (folder / "daemon.log").replace(folder / "daemon.log.1")
    (folder / "daemon.log").write_text(WORKER, encoding="utf-8")
    (one,) = logs._new_records(folder, ends)
    assert one.text == "slow"


def test_no_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "--home", str(tmp_path)]) == 6
    assert "no logs yet" in capsys.readouterr().err


def test_an_unknown_process(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "--home", str(home), "--process", "nosuch"]) == 2
    assert "available: background, daemon, worker-p1-0" in capsys.readouterr().err
