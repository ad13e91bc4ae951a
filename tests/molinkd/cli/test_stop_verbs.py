"""``molink leave``: no swarm without an owner, and no absent members."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from molink.errors import Unavailable
from molink.swarm.election.replica import Replica
from molink.wire.messages.admin import LeaveRequest, RevokeReply, RevokeRequest, StatusRequest
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.instructions import PeerInfo
from molinkd.cli import daemon_client, stop_verbs
from molinkd.cli.main import run
from molinkd.peer.home import Home, RunFile
from molinkd.peer.membership.membership_record import MembershipRecord
from tests.support.membership import LogBuilder, TestPeer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """The home of the PC that created a swarm."""
    home = Home(tmp_path / "my home").create_folders()
    _save_membership(home, LogBuilder(TestPeer(home.load_keys(), "me")), is_founder=True)
    home.coordinator.mkdir()
    return home


def _save_membership(home: Home, members: LogBuilder, *, is_founder: bool) -> None:
    MembershipRecord(
        swarm=members.log.swarm,
        coordinator_key="k" * 40,
        addresses=("10.0.0.1:5466",),
        is_founder=is_founder,
    ).save(home.membership)


def _copy_of_the_state(home: Home, *others: str) -> None:
    members = LogBuilder(TestPeer(home.load_keys(), "me"))
    for name in others:
        members.admit(members.founder, TestPeer(name=name))
    _save_replica(home, members)


def _save_replica(home: Home, members: LogBuilder, *announced: PeerInfo) -> None:
    log = members.log
    replica = Replica(log.swarm, "s", 64, 0, 1, (), log, announced, (), (), (0, 0))
    home.replica.write_bytes(replica.encode())


def test_leaving_does_not_orphan_the_swarm(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    _copy_of_the_state(home, "attic")
    assert run(["leave", "--home", str(home.root)]) == 2
    assert "To end the swarm for attic too" in capsys.readouterr().err
    assert run(["leave", "--dissolve", "--home", str(home.root)]) == 2
    error = capsys.readouterr().err
    assert "attic can't be told" in error
    assert "molink up --background" in error
    assert "--yes" in error
    assert error.count("--home") == 1, "the option that the user gave"
    assert home.membership.exists()
    assert home.coordinator.exists()
    # Leaving also works on a PC where molink can no longer start.
    assert run(["leave", "--dissolve", "--yes", "--home", str(home.root)]) == 0
    assert "Not told: attic. Run `molink leave` on each" in capsys.readouterr().out
    assert not home.membership.exists()


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("\n", 1), ("y\n", 0)])
def test_leaving_is_confirmed_in_a_terminal(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    code: int,
) -> None:
    _copy_of_the_state(home)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert run(["leave", "--home", str(home.root)]) == code
    assert "for good? [y/N]" in capsys.readouterr().out
    assert home.membership.exists() is (code == 1)


@pytest.mark.parametrize("arguments", [["leave"], ["leave", "--dissolve", "--yes"]])
def test_an_owner_alone_may_leave(home: Home, arguments: list[str]) -> None:
    _copy_of_the_state(home)
    assert run([*arguments, "--home", str(home.root)]) == 0
    assert not home.membership.exists()
    assert not home.coordinator.exists()


@pytest.fixture
def ended(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[Home]:
    """Pretends that a daemon runs; returns the homes whose daemons were stopped."""
    ended: list[Home] = []
    note = RunFile.of_this_process(1, "http://127.0.0.1:5465")
    monkeypatch.setattr("molinkd.peer.home.read_run_file", lambda _: note)
    monkeypatch.setattr(stop_verbs, "stop_daemon", lambda place, _, leave: ended.append(place))
    return ended


@pytest.mark.parametrize("arguments", [["revoke", "attic"], ["stop"], ["stop", "toy"]])
def test_commands_that_affect_others_are_confirmed_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    asked: list[object] = []
    status = {"coordinator": {"state": "running"}, "model": "toy", "models": []}
    status["peers"] = [{"id": "1", "name": "attic"}]

    def request(_: object, message: object) -> tuple[object, bytes]:
        if not isinstance(message, StatusRequest):
            asked.append(message)
        reply = RevokeReply(ref=0) if isinstance(message, RevokeRequest) else DoneReply(ref=0)
        return reply, json.dumps(status).encode()

    monkeypatch.setattr(daemon_client, "_request_swarm", request)
    monkeypatch.setattr(daemon_client, "send_request", request)
    monkeypatch.setattr(daemon_client, "require_daemon", lambda _: None)
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert run(arguments) == 1
    out = capsys.readouterr().out
    assert "? [y/N]" in out
    assert "Nothing was changed." in out
    assert asked == []
    assert run([*arguments, "--yes"]) == 0
    assert len(asked) == 1
    # Without a terminal, what is hard to undo requires `--yes`.
    monkeypatch.setattr("sys.stdin", io.StringIO())
    is_final = arguments[0] == "revoke"
    assert run(arguments) == (2 if is_final else 0)
    assert len(asked) == (1 if is_final else 2)


def _swarm(monkeypatch: pytest.MonkeyPatch, **status: Any) -> None:
    def revoke_all(_: Home) -> list[str]:
        if "failure" in status:
            raise Unavailable(status["failure"])
        away: list[str] = status["away"]
        return away

    monkeypatch.setattr(daemon_client, "revoke_all_peers", revoke_all)
    states = {"attic": "offline" if status.get("away") else "online"}
    members = [{"id": name, "name": name, "state": states[name]} for name in states]
    monkeypatch.setattr(daemon_client, "fetch_members", lambda _: members)


def test_an_unavailable_coordinator_blocks_dissolving(
    home: Home,
    ended: list[Home],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _swarm(monkeypatch, failure="it can't be asked")
    assert run(["leave", "--dissolve", "--yes", "--home", str(home.root)]) == 6
    assert "the swarm was not dissolved" in capsys.readouterr().err
    assert ended == []
    assert home.membership.exists()


def test_offline_peers_are_listed(
    home: Home,
    ended: list[Home],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _swarm(monkeypatch, away=["attic"])
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert run(["leave", "--dissolve", "--home", str(home.root)]) == 0
    out = capsys.readouterr().out
    assert "for attic too? attic can't be told and will serve without an owner" in out
    assert "Not told: attic." in out
    assert ended == [home]


def test_a_member_can_leave_offline(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def ask(_home: Home, _member: MembershipRecord, message: object) -> None:
        asked.append(message)
        raise Unavailable("nobody is there")

    monkeypatch.setattr(daemon_client, "request_coordinator", ask)
    me, device, past, other = TestPeer(home.load_keys()), TestPeer(), TestPeer(), TestPeer()
    members = LogBuilder()
    members.admit(members.founder, me, other)
    keys, _ = members.invite(me, uses=2)
    for one in (device, past):
        members.join(keys, one)
    members.leave(past)
    infos = [
        PeerInfo(
            peer=one.peer,
            name="",
            public_key=one.keys.public,
            addresses=(),
            control_port=0,
            primary_peer=pc,
        )
        for one, pc in ((me, ""), (device, me.peer), (past, me.peer), (other, ""))
    ]
    _save_replica(home, members, *infos)
    _save_membership(home, members, is_founder=False)
    assert run(["leave", "--home", str(home.root)]) == 0
    assert "could not be notified (nobody is there)" in capsys.readouterr().out
    assert asked == [LeaveRequest(ref=0, devices=(device.peer,))], "its further device leaves too"
    assert not home.membership.exists()
