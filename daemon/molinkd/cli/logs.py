"""``molink logs``: what the daemon and its processes wrote down, in the order of time."""

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

#: How :data:`molink.plaintext.LOG_FORMAT` writes the beginning of a record.
_RECORD = re.compile(
    r"(?P<time>[\d-]{10} [\d:]{8},\d{3}) (?P<level>[A-Z]+) (?P<logger>\S+): (?P<text>.*)"
)
#: Until new lines are looked for again, in seconds.
_POLL_INTERVAL_S = 0.5

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record. ``process`` is the log's name; a record without a beginning has no ``time``."""

    time: str
    process: str
    level: str
    logger: str
    text: str


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last.")] = 50,
    process: Annotated[
        str | None,
        typer.Option(
            help="Only of the daemon, a worker, the coordinator and so on.  [default: all]"
        ),
    ] = None,
    level: Annotated[Level, typer.Option(help="Only from that level on.")] = "debug",
    as_json: Annotated[bool, typer.Option("--json", help="Print each as JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Show what molink wrote down on this PC."""
    found = find_daemon(Home.find_home(home))
    folder = (found.home if found is not None else Home.find_home(home)).logs
    least = logging.getLevelNamesMapping()[level.upper()]

    def wanted(record: LogRecord) -> bool:
        named = process is None or record.process.startswith(process)
        return named and logging.getLevelNamesMapping().get(record.level, logging.INFO) >= least

    ends = {path: path.stat().st_size for path in _log_files(folder)}
    if not ends and not follow:
        raise Unavailable(f"molink has written nothing down yet (in {folder})")
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
    """Refuse to look for what no process is called."""
    known = sorted({one.process for one in records})
    if not any(one.startswith(name) for one in known):
        there = ", ".join(known) or "of none"
        raise UsageError(f"no process {name!r} wrote anything down; there is: {there}")


def read_records(folder: Path) -> list[LogRecord]:
    """All records of a home's logs, the oldest first."""
    found = [
        one
        for path in _log_files(folder)
        for one in parse_records(_process_name(path), _read_lines(path, 0))
    ]
    return sorted(found, key=lambda one: one.time)


def parse_records(process: str, lines: Iterable[str]) -> Iterator[LogRecord]:
    """Records of one log. What continues one, such as a traceback, belongs to it."""
    record = LogRecord("", process, "INFO", "", "")
    begun = False
    for line in lines:
        match = _RECORD.fullmatch(line)
        if match is None:
            text = f"{record.text}\n{line}" if begun else line
            record, begun = replace(record, text=text), True
            continue
        if begun:
            yield record
        record, begun = LogRecord(process=process, **match.groupdict()), True
    if begun:
        yield record


def _new_records(folder: Path, ends: dict[Path, int]) -> list[LogRecord]:
    """Records after the ``ends`` of what was read before, which become the present ones."""
    found: list[LogRecord] = []
    for path in _log_files(folder):
        size, end = path.stat().st_size, ends.get(path, 0)
        if size < end:
            end = 0  # it was begun anew
        if size > end and path.suffix == ".log":
            found += parse_records(_process_name(path), _read_lines(path, end))
        ends[path] = size
    return sorted(found, key=lambda one: one.time)


def _log_files(folder: Path) -> list[Path]:
    """The logs, with the older part of each first."""
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
