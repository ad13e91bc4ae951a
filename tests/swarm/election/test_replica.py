"""Replicas of the coordinator's state."""

from dataclasses import replace

import pytest

from molink.errors import StateError
from molink.swarm.election.replica import (
    MAX_LINEAGE,
    RESEND_TIMEOUT,
    Replica,
    ReplicaSync,
    decode_replica,
    includes_version,
    next_lineage,
)
from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.membership import SignedEntry
from tests.support.membership import LogBuilder, TestPeer


def replica(built: LogBuilder, *announced: PeerInfo) -> Replica:
    return Replica(built.log.swarm, "home", 64, 0, 1, (), built.log, announced, (), (), (1, 7))


def info(peer: TestPeer, name: str = "x", key: str = "") -> PeerInfo:
    return PeerInfo(
        peer=peer.peer,
        name=name,
        public_key=key or peer.keys.public,
        addresses=("10.0.0.1",),
        control_port=1,
    )


def test_replica_round_trips() -> None:
    built, a, out = LogBuilder(), TestPeer(name="a"), TestPeer(name="out")
    built.admit(built.founder, a, out)
    built.revoke(built.founder, out)
    one = replica(built, info(a))
    again = decode_replica(one.encode())
    assert again.encode() == one.encode()
    assert again.order == (built.founder.peer, a.peer)
    assert again.version == (0, 1)
    assert [(m.name, m.standing, m.is_owner) for m in again.members] == [
        ("founder", "member", True),
        ("a", "member", False),
        ("out", "revoked", False),
    ]


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 50, b"\x93\x01\x02\x03"])
def test_invalid_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(StateError, match="not a replica"):
        decode_replica(data)


def test_a_replica_of_unsigned_members_is_rejected() -> None:
    built, planted = LogBuilder(), TestPeer(name="planted")
    signed = built.admit(built.founder, planted)
    forged = SignedEntry(signed.body, b"\0" * 64)
    entries = {one.hash: one for one in (built.log.entries[0], forged)}
    false = replace(replica(built), log=MembershipLog(built.log.swarm, entries))
    with pytest.raises(StateError, match="false"):
        decode_replica(false.encode())
    with pytest.raises(StateError, match="false"):
        decode_replica(false.encode(), known=built.log)


def test_names_are_cleaned_and_keys_are_the_logs() -> None:
    built, a = LogBuilder(TestPeer(name="f\x1b[2J")), TestPeer(name="a")
    built.admit(built.founder, a)
    other = TestPeer()
    one = replica(built, info(built.founder, "x\x1b[31m"), info(a, "b", other.keys.public))
    founder, member = decode_replica(one.encode()).members
    assert founder.announced is not None
    assert "\x1b" not in founder.name + founder.announced.name
    assert (member.name, member.announced) == ("a", None), "announced with another PC's key"
    assert member.public_key == a.keys.public


def test_lineage_tells_which_versions_are_included() -> None:
    lineage = ((0, 5), (10, 9))
    assert includes_version((20, 11), 20, 12, lineage)
    assert not includes_version((20, 13), 20, 12, lineage)
    assert includes_version((0, 5), 20, 12, lineage)
    assert not includes_version((0, 6), 20, 12, lineage), "the next leader lacks these changes"
    assert not includes_version((15, 7), 20, 12, lineage), "another leader's history"
    assert includes_version((3, 99), 20, 12, ((5, 1),)), "older than the lineage"


def test_lineage_is_bounded() -> None:
    lineage: tuple[tuple[int, int], ...] = ()
    for term in range(200):
        lineage = next_lineage(lineage, term, term)
    assert len(lineage) == MAX_LINEAGE
    assert lineage[-1] == (199, 199)


def plan(sync: ReplicaSync, held: tuple[int, int], now: float, digest: str = "d") -> str | None:
    return sync.plan_sync("a", (held, digest), ((20, 12), "d"), ((10, 9),), now)


def test_a_peer_gets_each_version_once_in_a_while() -> None:
    sync = ReplicaSync()
    assert plan(sync, (20, 12), 0.0) is None
    assert plan(sync, (20, 11), 0.0) == "send"
    assert plan(sync, (20, 11), RESEND_TIMEOUT - 0.1) is None
    assert plan(sync, (20, 11), RESEND_TIMEOUT) == "send"
    sync.drop_peer("a")
    assert plan(sync, (20, 11), RESEND_TIMEOUT + 0.1) == "send"


def test_a_peer_with_changes_that_we_lack_is_asked_once() -> None:
    sync = ReplicaSync()
    assert not sync.accept_answer("a")
    assert plan(sync, (15, 3), 0.0) == "ask"
    assert plan(sync, (15, 3), 1.0) is None
    assert sync.accept_answer("a")
    assert not sync.accept_answer("a"), "one answer per request"
    assert plan(sync, (15, 3), 1.1) == "send"
    sync.drop_peer("a")
    assert plan(sync, (15, 3), 2.0) == "ask"
    assert plan(sync, (15, 3), 2.0 + RESEND_TIMEOUT) == "send", "it doesn't answer"


def test_a_peer_with_other_entries_is_asked() -> None:
    sync = ReplicaSync()
    assert plan(sync, (20, 12), 0.0, "other") == "ask"
    for now in (0.1, RESEND_TIMEOUT, 2 * RESEND_TIMEOUT):
        assert plan(sync, (20, 12), now, "other") is None, "and not again while it is connected"
