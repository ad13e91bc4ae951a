"""``molink logs``: show the logs of all processes in order of time."""

import json
import logging
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from molink.errors import Unavailable, UsageError
from molink.plaintext import printable
from molinkd.cli.daemon_client import find_daemon
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.home import Home

#: A record in :data:`molink.plaintext.LOG_FORMAT`.
_RECORD = re.compile(
    r"(?P<time>[\d-]{10} [\d:]{8},\d{3}) (?P<level>[A-Z]+) (?P<logger>\S+): (?P<text>.*)"
)
#: Poll interval for new lines, in seconds.
_POLL_INTERVAL_S = 0.5

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A log record. ``process`` is the log's name; ``time`` is empty without a header."""

    time: str
    process: str
    level: str
    logger: str
    text: str


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow new records until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines to show.")
    ] = 50,
    process: Annotated[
        str | None,
        typer.Option(help="Only this process: daemon, worker, coordinator.  [default: all]"),
    ] = None,
    level: Annotated[Level, typer.Option(help="Minimum level.")] = "debug",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one record per line.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Show this PC's logs."""
    found = find_daemon(Home.find_home(home))
    folder = (found.home if found is not None else Home.find_home(home)).logs
    least = logging.getLevelNamesMapping()[level.upper()]

    def wanted(record: LogRecord) -> bool:
        named = process is None or record.process.startswith(process)
        return named and logging.getLevelNamesMapping().get(record.level, logging.INFO) >= least

    ends = {path: path.stat().st_size for path in _log_files(folder)}
    if not ends and not follow:
        raise Unavailable(f"no logs yet (in {folder})")
    everything = read_records(folder)
    if process is not None and not follow:
        _check_process(process, everything)
    records = [one for one in everything if wanted(one)]
    for record in records[len(records) - lines :] if lines < len(records) else records:
        _print_record(record, as_json=as_json)
    while follow:
        time.sleep(_POLL_INTERVAL_S)
        for record in _new_records(folder, ends):
            if wanted(record):
                _print_record(record, as_json=as_json)


def _check_process(name: str, records: Iterable[LogRecord]) -> None:
    """Reject the name of an unknown process."""
    known = sorted({one.process for one in records})
    if not any(one.startswith(name) for one in known):
        there = ", ".join(known) or "none"
        raise UsageError(f"no logs of process {name!r}; available: {there}")


def read_records(folder: Path) -> list[LogRecord]:
    """Read all records of a folder, oldest first."""
    found = [
        one
        for path in _log_files(folder)
        for one in parse_records(_process_name(path), _read_lines(path, 0))
    ]
    return sorted(found, key=lambda one: one.time)


def parse_records(process: str, lines: Iterable[str]) -> Iterator[LogRecord]:
    """Parse one log; continuation lines, such as tracebacks, belong to their record."""
    record = LogRecord("", process, "INFO", "", "")
    started = False
    for line in lines:
        match = _RECORD.fullmatch(line)
        if match is None:
            text = f"{record.text}\n{line}" if started else line
            record, started = replace(record, text=text), True
            continue
        if started:
            yield record
        record, started = LogRecord(process=process, **match.groupdict()), True
    if started:
        yield record


def _new_records(folder: Path, ends: dict[Path, int]) -> list[LogRecord]:
    """Read records after the offsets in ``ends`` and update these."""
    found: list[LogRecord] = []
    for path in _log_files(folder):
        size, end = path.stat().st_size, ends.get(path, 0)
        if size < end:
            end = 0  # the log was rotated
        if size > end and path.suffix == ".log":
            found += parse_records(_process_name(path), _read_lines(path, end))
        ends[path] = size
    return sorted(found, key=lambda one: one.time)


def _log_files(folder: Path) -> list[Path]:
    """Return the logs of each process, rotated part first."""
    return sorted(folder.glob("*.log*"), key=lambda path: (_process_name(path), -len(path.name)))


def _process_name(path: Path) -> str:
    return path.name.partition(".log")[0]


def _read_lines(path: Path, start: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", "replace").splitlines()


def _print_record(record: LogRecord, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(record)), flush=True)
        return
    begin = f"{record.time} " if record.time else ""
    named = f"{record.logger}: " if record.logger else ""
    text = f"{begin}{record.process} {record.level} {named}{record.text}"
    print(printable(text, keep="\n\t"), flush=True)
