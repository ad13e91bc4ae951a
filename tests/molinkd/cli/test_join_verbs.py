"""Pairing from the command line: choice of the swarm, codes, and confirmation."""

import io
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.errors import PairingRefused, RequestError, Unavailable
from molink.swarm.membership.discovery import PAIRING_PORT, DiscoveredSwarm
from molink.wire.messages.admin import LeaveRequest
from molink.wire.messages.instructions import PendingPairing
from molinkd.cli import daemon_client
from molinkd.cli.daemon_console import DaemonConsole
from molinkd.cli.installation.kinds import Kind
from molinkd.cli.invitation_table import invitation_text
from molinkd.cli.join_verbs import parse_address
from molinkd.cli.main import run
from molinkd.cli.pairing_prompt import PairingPrompt, TypedLines
from molinkd.peer.demo import DemoSwarm
from molinkd.peer.home import Home
from molinkd.peer.launch import Launch, PairingsChangedEvent, SwarmOpenedEvent
from molinkd.peer.membership import host_lookup
from molinkd.peer.membership.membership_record import MembershipRecord, read_membership
from molinkd.peer.membership.pairing_client import PairingCode

ATTIC = DiscoveredSwarm("ab" * 8, "attic", "k" * 40, ("192.168.1.7",), 5479)
CELLAR = DiscoveredSwarm("cd" * 8, "cellar", "l" * 40, ("192.168.1.8",), 5479)
MEMBER = MembershipRecord(
    swarm=ATTIC.swarm, coordinator_key="k" * 40, addresses=("192.168.1.7:5466",)
)


class Network:
    """Fakes of discovery, pairing and starting a daemon; records the attempts and the launches."""

    def __init__(self) -> None:
        self.swarms = [ATTIC]
        self.asked: list[DiscoveredSwarm] = []
        self.launches: list[Launch] = []
        self.refusal: Exception | None = None

    def look_around(self, _host: str) -> list[DiscoveredSwarm]:
        return self.swarms

    async def request(
        self,
        nearby: DiscoveredSwarm,
        _keys: object,
        _name: str,
        show: Callable[[PairingCode], None],
        *,
        join: str,
    ) -> MembershipRecord:
        assert join == "`molink join`"
        self.asked.append(nearby)
        show(PairingCode(ATTIC.swarm, "attic", "4827-1931"))
        if self.refusal is not None:
            raise self.refusal
        return MEMBER

    def run_daemon(self, launch: Launch, _show: object) -> None:
        self.launches.append(launch)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path))
    for name in ("MOLINK_TOKEN", "MOLINK_DISCOVERY"):
        monkeypatch.delenv(name, raising=False)
    return Home(tmp_path)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr("molinkd.peer.membership.discovery.scan_network", network.look_around)
    monkeypatch.setattr("molinkd.peer.membership.pairing_client.request_pairing", network.request)
    monkeypatch.setattr("molinkd.cli.daemon_start.run_daemon", network.run_daemon)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return network


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.168.1.7", ("192.168.1.7", PAIRING_PORT)),
        ("192.168.1.7:99", ("192.168.1.7", 99)),
        ("localhost", ("localhost", PAIRING_PORT)),
        ("attic", ("attic", PAIRING_PORT)),
        ("attic.local", ("attic.local", PAIRING_PORT)),
        ("attic:99", ("attic", 99)),
        ("::1", ("::1", PAIRING_PORT)),
        ("fe80::1%eth0", ("fe80::1%eth0", PAIRING_PORT)),
        ("[fe80::1]", ("fe80::1", PAIRING_PORT)),
        ("[fe80::1%eth0]:99", ("fe80::1%eth0", 99)),
        ("molink-pc.local", ("molink-pc.local", PAIRING_PORT)),
        ("molink-pc:5479", ("molink-pc", PAIRING_PORT)),
        ("molink-AAAA", None),
        ("x" * 64, None),
        ("", None),
        ("a b.c", None),
        ("x.y\n", None),
    ],
)
def test_addresses_are_not_tokens(text: str, address: tuple[str, int] | None) -> None:
    assert parse_address(text) == address


def test_an_unknown_host_name(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(host_lookup, "multicast_addresses", lambda _: ())
    assert run(["join", "attic"]) == 6
    errors = capsys.readouterr().err
    assert "there is no PC named attic here: Name or service not known" in errors
    assert "A token starts with `molink-`" in errors
    assert network.asked == []


def test_a_host_name_has_several_addresses(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ["::1", "127.0.0.1", "127.0.0.1"]

    def resolve(host: str, *_: object, **__: object) -> list[object]:
        assert host == "localhost"
        return [(None, None, None, "", (one, 0)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert run(["join", "localhost:7"]) == 0
    assert network.asked == [DiscoveredSwarm("", "", "", ("127.0.0.1", "::1"), 7)]


def test_a_lookup_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        assert hangs.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(host_lookup, "_LOOKUP_S", 0.05)
    with pytest.raises(Unavailable, match=r"no answer within 0\.05 s"):
        host_lookup.lookup_host("attic.example", "0.0.0.0")
    hangs.set()


def test_the_only_swarm_is_joined(
    network: Network, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["join"]) == 0
    out = capsys.readouterr().out
    assert "Found swarm attic" in out
    assert "    4827-1931\n" in out
    assert "molink approve 4827-1931" in out
    assert network.asked == [ATTIC]
    assert read_membership(home.membership) == MEMBER
    (launch,) = network.launches
    assert (launch.role, launch.token) == ("join", None)
    # This PC is a member now, so ``join`` does not search for swarms.
    network.swarms = []
    assert run(["join"]) == 0
    assert run(["join", "192.168.1.7"]) == 2
    assert run(["join", "--swarm", "attic"]) == 2
    assert len(network.asked) == 1


def test_a_pc_with_its_own_swarm_is_told_how_to_join_another(
    network: Network, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    msgspec.structs.replace(MEMBER, is_founder=True).save(home.create_folders().membership)
    for arguments in (["join"], ["join", "192.168.1.7"]):
        assert run(arguments) == 2
        error = capsys.readouterr().err
        assert "this PC has its own swarm: `molink up` starts it" in error
        assert "To join another swarm, run `molink leave` first" in error
    assert network.asked == []


def test_pairing_with_an_address(network: Network) -> None:
    network.swarms = []
    assert run(["join", "192.168.1.7"]) == 0
    (nearby,) = network.asked
    assert (nearby.addresses, nearby.port) == (("192.168.1.7",), PAIRING_PORT)


def test_ports_of_addresses(network: Network, home: Home) -> None:
    assert run(["join", "[fe80::1]:70000"]) == 2
    assert run(["join", "[fe80::1]:7"]) == 0
    assert (network.asked[0].addresses, network.asked[0].port) == (("fe80::1",), 7)


def test_several_swarms(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network.swarms = [ATTIC, CELLAR]
    assert run(["join"]) == 2
    assert "--swarm" in capsys.readouterr().err
    assert run(["join", "--swarm", "cellar"]) == 0
    assert network.asked == [CELLAR]
    network.asked.clear()
    Home.find_home().membership.unlink()
    monkeypatch.setattr(sys, "stdin", Terminal("0\n2\ny\n"))
    assert run(["join"]) == 0
    assert network.asked == [CELLAR]


def test_no_swarm(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network.swarms = []
    assert run(["join"]) == 6
    assert "molink join HOST" in capsys.readouterr().err
    network.swarms = [ATTIC]
    assert run(["join", "--swarm", "cellar"]) == 6
    monkeypatch.setattr("typer.prompt", lambda *_, **__: "molink-typed")
    monkeypatch.setattr(sys, "stdin", Terminal())
    network.swarms = []
    assert run(["join"]) == 0
    assert network.launches[-1].token == "molink-typed"


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 10), ("\n", 10)])
def test_an_impostor_may_approve(
    network: Network, home: Home, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    """Only the user knows whether the swarm's own PC showed the code."""
    said: list[tuple[MembershipRecord, object]] = []

    def ask(_home: Home, member: MembershipRecord, message: object) -> None:
        said.append((member, message))

    monkeypatch.setattr(daemon_client, "request_coordinator", ask)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert run(["join"]) == code
    # A rejected swarm is left; otherwise this PC would remain an offline member of it.
    assert said == ([] if code == 0 else [(MEMBER, LeaveRequest(ref=0))])
    assert home.membership.exists() is (code == 0)
    assert bool(network.launches) is (code == 0)


def test_a_rejected_pairing(
    network: Network, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    network.refusal = PairingRefused("the swarm refused this PC")
    assert run(["join"]) == 10
    assert "refused" in capsys.readouterr().err
    network.refusal = KeyboardInterrupt()  # type: ignore[assignment]
    assert run(["join"]) == 130
    assert not home.membership.exists()
    network.refusal = None
    assert run(["join"]) == 0, "the folder is unlocked again"


def test_approving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Home
) -> None:
    request = {"name": "p\x1bc", "code": "4827-1931", "address": "10.0.0.1", "since": 1.0}
    pairings: list[dict[str, Any]] = [request]
    judged: list[tuple[str, bool]] = []

    def judge(_: Home, code: str, *, refuse: bool) -> str:
        judged.append((code, refuse))
        return "p\x1bc"

    monkeypatch.setattr(daemon_client, "fetch_pairings", lambda _: pairings)
    monkeypatch.setattr(daemon_client, "decide_pairing", judge)
    assert run(["approve"]) == 0
    out = capsys.readouterr().out
    assert '4827-1931  "pc" (10.0.0.1)' in out
    assert run(["approve", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == pairings
    assert run(["approve", "4827-1931"]) == 0
    assert capsys.readouterr().out == '"pc" joined.\n'
    assert run(["approve", "4827-1931", "--refuse", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "p\x1bc", "admitted": False}
    assert judged == [("4827-1931", False), ("4827-1931", True)]
    assert run(["approve", "--refuse"]) == 2
    capsys.readouterr()
    assert run(["approve", "482719"]) == 2
    assert "a code has 8 digits" in capsys.readouterr().err
    assert len(judged) == 2, "no request for an invalid code"
    pairings.clear()
    assert run(["approve"]) == 0
    assert "No PC is waiting" in capsys.readouterr().out


class Lines(TypedLines):
    """Lines typed by the user."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.read = threading.Event()

    def next(self, patience: float) -> str | None:
        if self.lines:
            return self.lines.pop(0)
        self.read.set()
        raise EOFError


def test_codes_are_read_while_requests_are_pending() -> None:
    said: list[str] = []

    def approve(code: str) -> str:
        if code != "4827-1931":
            raise RequestError(f"no PC that waits shows {code}")
        return "pc"

    lines = Lines("", "1111-1111\n", "4827-1931\n")
    bell = PairingPrompt(approve, said.append, lines)
    bell.set_pending(pending=False)
    assert not lines.read.is_set()
    bell.set_pending(pending=True)
    assert lines.read.wait(30)
    assert said == ["error: no PC that waits shows 1111-1111", '"pc" joined.']


@pytest.mark.skipif(sys.platform == "win32", reason="a console's keys can't be piped")
def test_typed_lines() -> None:
    descriptor, keyboard = os.pipe()
    try:
        lines = TypedLines(descriptor)
        assert lines.next(0.0) is None
        os.write(keyboard, b"4827-1931\n")
        assert lines.next(30.0) == "4827-1931\n"
        os.close(keyboard)
        with pytest.raises(EOFError):
            lines.next(30.0)
    finally:
        os.close(descriptor)


def test_a_demo_is_not_announced() -> None:
    swarm = DemoSwarm(Home.find_home(), 2, "auto", None, lambda *_: None)
    assert not swarm._peer_settings(1).discovery


def test_pairing_requests_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    console = DaemonConsole()
    name = "x (10.0.0.1) wants to join with code 1111-2222\x1b[bold]"
    pc = PendingPairing(name=name, code="4827-1931", address="10.0.0.7")
    console.show_event(PairingsChangedEvent(pairings=(pc,)))
    out = capsys.readouterr().out
    assert '"x 10.0.0.1 wants to join with code 1111-2222bold" (10.0.0.7) wants to join' in out
    assert "molink approve 4827-1931" in out
    other = PendingPairing(name="pc", code="0000-0001", address="10.0.0.1")
    console.show_event(PairingsChangedEvent(pairings=(pc, other)))
    out = capsys.readouterr().out
    assert ("4827-1931" in out, "0000-0001" in out) == (False, True), "each is announced once"


def test_how_to_add_a_pc_is_printed_without_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    console = DaemonConsole()
    console.show_event(SwarmOpenedEvent(discovery=True, token="molink-x"))
    out = capsys.readouterr().out
    assert "install molink there and run `molink join`: the PCs compare a code" in out
    assert "`molink invite` prints a token for a PC of another network" in out
    console.show_event(SwarmOpenedEvent(token="molink-x"))
    alone = capsys.readouterr().out
    assert "To add a PC, `molink invite` prints a token for it." in alone
    assert "molink-x" not in out + alone


def test_tokens_are_printed_for_each_system() -> None:
    lines = invitation_text("molink-x", 1, "`molink {}`".format).splitlines()
    assert "  .venv/bin/molink join molink-x" in lines
    assert r"  .venv\Scripts\molink join molink-x" in lines
    assert "To add up to 3 PCs" in invitation_text("molink-x", 3, "`molink {}`".format)


@pytest.mark.parametrize("kind", ["release", "uv", "pipx", "pip"])
def test_an_installed_molink_is_on_the_path(kind: Kind) -> None:
    text = invitation_text("molink-x", 1, "`molink {}`".format, kind)
    assert text.splitlines()[-1] == "  molink join molink-x"
    assert ".venv" not in text
