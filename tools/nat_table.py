"""Which way PCs behind each pair of routers connect, how soon, and how fast they serve.

    python -m tools.nat_table [--kinds open,port-cone,symmetric] [--row symmetric] [--delay-ms 10]
        [--out docs/results/homes.json]
    python -m tools.nat_table --render
    python -m tools.nat_table --lead-from-home

For each pair two PCs serve the demo model together, four layers each, beside a third without layers
and a rendezvous at port 443, which have IPv4 and IPv6 and no router (Linux, root, nftables;
:mod:`tools.wan.homes`). A cell says how the first PC reaches the second and back, in how many
seconds after it has learnt of it, and the tokens per second of one stream; or the reason why the
two don't serve. With ``--lead-from-home`` there is no third: the first PC of each pair leads.
``--out`` records each cell as soon as it is measured, and ``--render`` makes the document's table
from that.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tools.serving.document import replace_table
from tools.serving.process import ENDPOINT, INVITE, OPENED, wait_for
from tools.wan import Node, RigError
from tools.wan.homes import KINDS, Homes, Kind, homes_unavailable

_ROOT = Path(__file__).resolve().parents[1]
#: How long a pair may take from the start of its second PC to the first answer, in seconds.
_SERVE_S = 150.0
_REACHED = re.compile(r"(\S+): reached .* in (\d+\.\d+) s")
#: The rendezvous's host name, and the address that it prints.
_MEETING, _RENDEZVOUS = "meet.example", re.compile(r"--rendezvous (\S+)")
_LEFT = re.compile(r"(\S+): left the relay after (\d+\.\d+) s")
RESULTS, DOCUMENT = Path("docs/results/homes.json"), Path("docs/performance.md")
#: Goal for the time to connect, in seconds.
_GOAL_S = 3.0


@dataclass(frozen=True, slots=True)
class Cell:
    """The result for a pair.

    ``seconds`` are the times of the two to reach each other, ``moves`` those of their connections
    to leave the relay.
    """

    ways: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()
    moves: tuple[float, ...] = ()
    rate: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        ways = "/".join(dict.fromkeys(self.ways))
        if self.failure:
            return self.failure
        return f"{ways}, {max(self.seconds, default=0.0):.1f} s, {self.rate:.0f}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two kinds of homes, and what was measured between them."""

    first: Kind
    second: Kind
    cell: Cell


def read_pairs(file: Path) -> list[Pair]:
    """Read a results file, if there is one."""
    return msgspec.json.decode(file.read_bytes(), type=list[Pair]) if file.exists() else []


def record_pair(file: Path, pair: Pair) -> None:
    """Add a pair to a results file, or replace the same one."""
    kinds = pair.first, pair.second
    kept = [one for one in read_pairs(file) if (one.first, one.second) != kinds]
    data = msgspec.json.encode([*kept, pair])
    file.write_bytes(msgspec.json.format(data, indent=1) + b"\n")


class Pc:
    """A PC of a home."""

    def __init__(self, homes: Homes, index: int, name: str, kind: Kind, folder: Path) -> None:
        self.name = name
        #: IPv4 and IPv6 if there is no router.
        self._host = "::" if kind in ("open", "only-ipv6") else "0.0.0.0"
        self._homes, self._index = homes, index
        self.home, self._log = folder / name, folder / f"{name}.log"
        self._process: subprocess.Popen[Any] | None = None

    def start(self, *arguments: str) -> None:
        """Run ``molink up`` or ``join`` with these arguments, and no more threads than one."""
        self.run(*arguments, "--name", self.name, "--threads", "1", "--device", "cpu")

    def run(self, *arguments: str) -> None:
        """Run ``molink`` with these arguments."""
        with self._log.open("wb") as output:
            self._process = self._run(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _run(self, arguments: Sequence[str], **popen: Any) -> "subprocess.Popen[Any]":
        own = {"MOLINK_HOME": str(self.home), "MOLINK_STANDBY_WORKER": "false"}
        own |= {"MOLINK_HOST": self._host, "MOLINK_NUM_SPECULATIVE_TOKENS": "off"}
        own |= {"MOLINK_REPLICATE_MODELS": "false", "PYTHONPATH": f"{_ROOT}:{_ROOT / 'daemon'}"}
        command = [sys.executable, "-m", "molinkd", *arguments]
        return self._homes.run(self._index, command, env={**os.environ, **own}, **popen)

    def wait_for(self, pattern: "re.Pattern[str]") -> str:
        """Wait until it prints ``pattern``; returns its group."""
        assert self._process is not None
        return wait_for(self._log, pattern, self._process)

    def ask(self, *arguments: str) -> str:
        """The output of a command there; empty if it fails."""
        process = self._run(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return str(process.communicate(timeout=60)[0].decode()).strip()

    @property
    def log(self) -> str:
        """Its daemon's log."""
        return (self.home / "logs" / "daemon.log").read_text("utf-8", "replace")

    def stream(self, tokens: int) -> float:
        """Tokens per second of one stream at its endpoint.

        Raises:
            RuntimeError: it did not answer.
        """
        url = f"http://127.0.0.1:{self.wait_for(ENDPOINT)}"
        load = {"requests": 1, "rate": 1.0, "prompt_tokens": 8, "output_tokens": tokens, "seed": 0}
        command = [sys.executable, "-m", "tools.bench_rival", "client", url, json.dumps(load)]
        asking = self._homes.run(self._index, command, stdout=subprocess.PIPE, cwd=_ROOT)
        output = asking.communicate(timeout=_SERVE_S)[0]
        if asking.returncode != 0:
            raise RuntimeError(f"{self.name} did not answer")
        (sample,) = json.loads(output)
        times = sample["piece_times"]
        return (len(times) - 1) / (times[-1] - times[0])

    def stop(self) -> None:
        """Stop it as a user would."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None


class Table:
    """A hub that all PCs can reach, and two homes of each kind; one PC of each runs at a time."""

    def __init__(
        self, folder: Path, kinds: Sequence[Kind], delay_ms: float, *, leads_from_home: bool
    ) -> None:
        """``leads_from_home``: the first PC of each pair leads, and the hub does nothing."""
        self._kinds, self._leads_from_home = kinds, leads_from_home
        behind: list[Kind] = ["open", "open", *kinds, *kinds]
        nodes = [Node(f"home{index}", delay_ms=delay_ms) for index in range(len(behind))]
        self._homes = Homes(nodes, behind)
        names = ["hub", "meeting"]
        names += [f"{part}-{kind}" for part in ("first", "second") for kind in kinds]
        self._pcs = [
            Pc(self._homes, index, name, kind, folder)
            for index, (name, kind) in enumerate(zip(names, behind, strict=True))
        ]
        self._leader = self._pcs[0]
        self._token = self._address = ""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Start the hub."""
        with self._homes:
            self._homes.name_host(1, _MEETING)
            hub, meeting = self._pcs[:2]
            meeting.run("rendezvous", "--port", "443", "--advertise", _MEETING)
            self._address = meeting.wait_for(_RENDEZVOUS)
            if not self._leads_from_home:
                self._found_swarm(hub, "none")
            yield

    def _found_swarm(self, leader: Pc, stage: str) -> None:
        leader.start("up", "--stage", stage, "--rendezvous", self._address)
        leader.wait_for(OPENED)
        self._leader, self._token = leader, leader.ask(*INVITE[3:])

    @contextlib.contextmanager
    def _run_first(self, index: int, stage: str) -> Iterator[Pc]:
        """Run the first PC of pairs, as a member or as the leader."""
        if not self._leads_from_home:
            with self.join(index, stage) as pc:
                yield pc
            return
        pc = self._pcs[index]
        try:
            self._found_swarm(pc, stage)
            yield pc
        finally:
            pc.stop()

    @contextlib.contextmanager
    def join(self, index: int, stage: str) -> Iterator[Pc]:
        """Run a PC with fixed layers, as a member."""
        pc = self._pcs[index]
        if self._leads_from_home:
            shutil.rmtree(pc.home, ignore_errors=True)  # a member of the last leader's swarm
        pc.start("join", self._token, "--stage", stage)
        try:
            yield pc
        finally:
            pc.stop()

    def measure(self, tokens: int, rows: Sequence[Kind]) -> Iterator[Pair]:
        """Every pair of kinds of which the first is in ``rows``, each once."""
        count = len(self._kinds)
        for row, first_kind in enumerate(self._kinds):
            if first_kind not in rows:
                continue
            with self._run_first(2 + row, "1-4") as first:
                for column in range(row, count):
                    with self.join(2 + count + column, "5-8") as second:
                        cell = self._measure_pair(first, second, tokens)
                        yield Pair(first_kind, self._kinds[column], cell)

    def _measure_pair(self, first: Pc, second: Pc, tokens: int) -> Cell:
        until = time.monotonic() + _SERVE_S
        status: dict[str, Any] = {}
        while time.monotonic() < until:
            status = json.loads(self._leader.ask("status", "--json") or "{}")
            ids = {one["name"]: one["id"] for one in status.get("peers", ())}
            pair = ids.get(first.name, ""), ids.get(second.name, "")
            rings = status.get("pipelines", ())
            if all(pair) and any(one["ready"] and len(one["stages"]) == 2 for one in rings):
                break
            time.sleep(1.0)
        else:
            return Cell(failure=_explain(status, second.name))
        try:
            rate = first.stream(tokens)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return Cell(failure=str(error))
        status = json.loads(self._leader.ask("status", "--json") or "{}")
        ways = tuple(_find_way(status, *ends) for ends in (pair, pair[::-1]))
        logs = [(first.log, pair[1]), (second.log, pair[0])]
        reached, moved = (
            [dict(reversed(pattern.findall(text))).get(peer) for text, peer in logs]  # the first
            for pattern in (_REACHED, _LEFT)
        )
        return Cell(ways, _floats(reached), _floats(moved), rate)


def _floats(found: Sequence[str | None]) -> tuple[float, ...]:
    return tuple(float(one) for one in found if one is not None)


def _find_way(status: dict[str, Any], source: str, target: str) -> str:
    for one in status.get("relays", ()):
        if (one["from"], one["to"]) == (source, target):
            if one["punched"]:
                return "punched"
            if one["through"].startswith(_MEETING):
                return "rendezvous"
            return "reverse" if one["through"] == source else "relay"
    return "direct"


def _explain(status: dict[str, Any], name: str) -> str:
    """Why a swarm has no ring, in one line."""
    peers = [one["name"] for one in status.get("peers", ())]
    if name not in peers:
        return "does not join"
    problems = [one.get("problem") or "" for one in status.get("pipelines", ())]
    return next(filter(None, problems), "no ring")


def format_table(pairs: Sequence[Pair]) -> str:
    """The cells as Markdown, and how long it took to connect."""
    found = {(pair.first, pair.second): pair.cell for pair in pairs}
    kinds = [kind for kind in KINDS if any(kind in pair for pair in found)]
    rows = [kind for kind in kinds if any(kind == first for first, _ in found)]
    lines = [f"| | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for first in rows:
        row = kinds.index(first)
        cells = [str(found.get((first, second), "–")) for second in kinds[row:]]
        lines.append(f"| {first} | {' | '.join([''] * row + cells)} |")
    reached = sorted(one for pair in pairs for one in pair.cell.seconds)
    moved = sorted(one for pair in pairs for one in pair.cell.moves)
    for what, seconds in (("Reached", reached), ("Left the relay", moved)):
        if seconds:
            last = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
            soon = sum(one <= _GOAL_S for one in seconds) / len(seconds)
            lines += [
                "",
                f"{what} within {statistics.median(seconds):.1f} s (median), {last:.1f} s (99 %);"
                f" {soon:.0%} within {_GOAL_S:g} s.",
            ]
    return "\n".join(lines)


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--row", choices=KINDS, help="only pairs of which this is the first")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="one way, of each home")
    parser.add_argument("--tokens", type=int, default=48, help="of the measured stream")
    parser.add_argument("--lead-from-home", action="store_true", help="no PC is outside")
    parser.add_argument("--out", type=Path, help="results file; other pairs in it are kept")
    parser.add_argument(
        "--render", action="store_true", help=f"only make the table of {DOCUMENT} from {RESULTS}"
    )
    options = parser.parse_args()
    if options.render:
        replace_table(DOCUMENT, "homes", format_table(read_pairs(RESULTS)))
        return 0
    reason = homes_unavailable()
    if reason is not None:
        raise RigError(reason)
    kinds: list[Kind] = [kind for kind in KINDS if kind in options.kinds.split(",")]
    rows: list[Kind] = [options.row] if options.row else kinds
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder), kinds, options.delay_ms, leads_from_home=options.lead_from_home)
        with table.open():
            for pair in table.measure(options.tokens, rows):
                pairs.append(pair)
                took = " ".join(f"{one:.2f}" for one in (*pair.cell.seconds, *pair.cell.moves))
                print(f"{pair.first}, {pair.second}: {pair.cell}; {took}", file=sys.stderr)
                if options.out is not None:
                    record_pair(options.out, pair)
    print(format_table(pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
