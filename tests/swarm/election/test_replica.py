"""Replicas of the coordinator's state."""

from dataclasses import replace

import pytest

from molink.errors import StateError
from molink.facts.identity import derive_peer_id
from molink.swarm.controller.records import MemberRecord, Standing
from molink.swarm.election.replica import (
    MAX_FORMER_MEMBERS,
    MAX_LINEAGE,
    RESEND_TIMEOUT,
    Replica,
    ReplicaSync,
    decode_replica,
    includes_version,
    merge_replicas,
    next_lineage,
)
from molink.wire.messages.instructions import PeerInfo


def member(letter: str, standing: Standing = "member", *, owner: bool = False) -> MemberRecord:
    key = letter * 40
    return MemberRecord(derive_peer_id(key), key, letter, owner, standing)


def replica(*members: MemberRecord, term: int = 0, revision: int = 1) -> Replica:
    return Replica("s", "home", 64, term, revision, (), members, (), (), (), (1, 7))


def test_replica_round_trips() -> None:
    one = replica(member("a", owner=True), member("b", "revoked"))
    assert decode_replica(one.encode()) == one
    assert one.order == (member("a").peer,)
    assert one.version == (0, 1)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 50, b"\x93\x01\x02\x03"])
def test_invalid_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(StateError, match="not a replica"):
        decode_replica(data)


def test_names_are_sanitized() -> None:
    """A hostile member may have written them."""
    one = member("a")
    info = PeerInfo(
        peer=one.peer,
        name="x (10.0.0.1): \x1b[31m",
        public_key=one.public_key,
        addresses=(),
        control_port=1,
    )
    hostile = replace(one, name='"\n\x1b[2J', announced=info)
    found = decode_replica(replace(replica(hostile), name="home (leader)").encode())
    assert found.name == "home leader"
    (clean,) = found.members
    assert clean.name == "2J"
    assert clean.announced is not None
    assert clean.announced.name == "x 10.0.0.1 31m"


def test_member_id_must_match_its_key() -> None:
    false = replica(replace(member("a"), peer=member("b").peer))
    with pytest.raises(StateError, match="another peer's key"):
        decode_replica(false.encode())


def test_former_members_are_trimmed_but_revoked_ones_stay() -> None:
    past: list[MemberRecord] = []
    for n in range(MAX_FORMER_MEMBERS + 10):
        key = f"{n:040d}"
        past.append(MemberRecord(derive_peer_id(key), key, "x", False, "left"))
    one = replica(member("r", "revoked"), *past, member("a"))
    kept = decode_replica(one.encode()).members
    assert [m.name for m in kept].count("x") == MAX_FORMER_MEMBERS
    assert {m.name for m in kept} == {"r", "x", "a"}


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


def test_merge_takes_members_and_owners_revocations_but_no_ownership() -> None:
    first, out = member("a", owner=True), member("c", "revoked")
    ours = replica(first, member("b"), out, member("d", "left"))
    theirs = replica(
        member("a", "revoked"),
        member("b", "revoked"),
        member("c"),
        member("d"),
        member("e", owner=True),
        member("f", "revoked"),
        member("g", "left"),
    )
    new = [member("d"), member("e")]
    assert merge_replicas(ours, theirs, by_owner=False) == new
    revoked = [member("b", "revoked"), member("f", "revoked")]
    merged = merge_replicas(ours, theirs, by_owner=True)
    assert sorted(merged, key=lambda one: one.name) == [revoked[0], *new, revoked[1]]
    after = replace(ours, members=(first, out, *merged))
    assert merge_replicas(after, theirs, by_owner=True) == []


def test_outdated_peer_is_sent_the_state_once() -> None:
    one = ReplicaSync()
    assert one.plan_sync("p", (0, 5), (0, 5), (), 0.0) is None
    assert one.plan_sync("p", (0, 4), (0, 5), (), 0.0) == "send"
    assert one.plan_sync("p", (0, 4), (0, 5), (), 1.0) is None
    assert one.plan_sync("p", (0, 4), (0, 6), (), 1.0) == "send"
    assert one.plan_sync("p", (0, 4), (0, 6), (), 1.1 + RESEND_TIMEOUT) == "send", (
        "it must have got lost"
    )
    one.drop_peer("p")
    assert one.plan_sync("p", (0, 4), (0, 6), (), 1.2 + RESEND_TIMEOUT) == "send"


def test_peer_of_another_part_is_asked_for_its_state_first() -> None:
    one = ReplicaSync()
    assert one.plan_sync("p", (7, 3), (9, 5), ((0, 2),), 0.0) == "ask"
    assert one.plan_sync("p", (7, 3), (9, 5), ((0, 2),), 1.0) is None
    assert one.plan_sync("p", (7, 3), (9, 5), ((0, 2),), RESEND_TIMEOUT) == "send", (
        "it doesn't answer"
    )
