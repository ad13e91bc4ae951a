"""``molink leave``: no swarm without an owner, and no absent members."""

from pathlib import Path
from typing import Any

import pytest

from molink.errors import Unavailable
from molink.swarm.election.replica import Replica
from molink.wire.messages.admin import LeaveRequest
from molink.wire.messages.instructions import PeerInfo
from molinkd.cli import daemon_client, stop_verbs
from molinkd.cli.main import run
from molinkd.peer.home import Home, RunFile
from molinkd.peer.membership.membership_record import MembershipRecord
from tests.support.membership import LogBuilder, TestPeer


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
    assert run(["leave", "--dissolve", "--home", str(home.root)]) == 6
    error = capsys.readouterr().err
    assert "attic" in error
    assert "molink up --background" in error
    assert error.count("--home") == 2, "as it is to be typed"
    assert home.membership.exists()
    assert home.coordinator.exists()


def test_an_owner_alone_may_dissolve(home: Home) -> None:
    _copy_of_the_state(home)
    assert run(["leave", "--dissolve", "--home", str(home.root)]) == 0
    assert not home.membership.exists()
    assert not home.coordinator.exists()


@pytest.fixture
def ended(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[Home]:
    """A daemon runs in the home; returns those that were stopped."""
    ended: list[Home] = []
    note = RunFile.of_this_process(1, "http://127.0.0.1:5465")
    monkeypatch.setattr("molinkd.peer.home.read_run_file", lambda _: note)
    monkeypatch.setattr(stop_verbs, "stop_daemon", lambda place, _, leave: ended.append(place))
    return ended


def _swarm(monkeypatch: pytest.MonkeyPatch, **status: Any) -> None:
    def revoke_all(_: Home) -> list[str]:
        if "failure" in status:
            raise Unavailable(status["failure"])
        away: list[str] = status["away"]
        return away

    monkeypatch.setattr(daemon_client, "revoke_all_peers", revoke_all)


def test_an_unavailable_coordinator_blocks_dissolving(
    home: Home,
    ended: list[Home],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _swarm(monkeypatch, failure="it can't be asked")
    assert run(["leave", "--dissolve", "--home", str(home.root)]) == 6
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
    assert run(["leave", "--dissolve", "--home", str(home.root)]) == 0
    assert "Offline and not notified: attic" in capsys.readouterr().out
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
