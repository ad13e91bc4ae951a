"""The membership log: which entries of which signer count, in any order of entries."""

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from molink.errors import StateError, Unavailable
from molink.swarm.membership.membership_log import (
    MAX_BYTES,
    MAX_SIGNED,
    MAX_UNOWNED,
    MembershipLog,
)
from molink.wire.messages.membership import (
    MAX_ENTRIES,
    AdmissionEntry,
    DepartureEntry,
    JoinEntry,
    SignedEntry,
    sign_entry,
)
from molink.wire.sockets.key_pair import KeyPair
from tests.support.membership import LogBuilder, TestPeer


def peers(*names: str) -> list[TestPeer]:
    return [TestPeer(name=name) for name in names]


def test_a_swarm_is_named_by_its_founding() -> None:
    built = LogBuilder()
    again = MembershipLog.check_entries(built.log.swarm, built.log.entries)
    assert list(again.members) == [built.founder.peer]
    assert again.owners == {built.founder.peer}
    with pytest.raises(StateError, match="another swarm"):
        MembershipLog.check_entries("0" * 16, built.log.entries)
    with pytest.raises(StateError, match="lacks the founding"):
        MembershipLog.check_entries(built.log.swarm, ())


def test_a_pc_joins_by_the_key_of_its_invitation() -> None:
    built, (a,) = LogBuilder(), peers("a")
    key, entry = built.invite(built.founder)
    built.join(key, a)
    member = built.log.members[a.peer]
    assert (member.name, member.standing, member.is_owner) == ("a", "member", False)
    assert member.invitation == built.log.invitations[0].id
    assert built.log.invitations[0].hash == entry.hash


def test_nobody_signs_for_another() -> None:
    built, (a, planted) = LogBuilder(), peers("a", "planted")
    built.admit(built.founder, a)
    honest = AdmissionEntry(built.founder.verify_key, planted.verify_key, "planted", 0.0)
    body = msgspec.msgpack.encode(honest)
    for signature in (b"", b"\0" * 64, a.keys.signer.sign(b"membership:", body)):
        with pytest.raises(StateError, match="false"):
            built.log.with_entries([SignedEntry(body, signature)])
    elsewhere = sign_entry("f" * 16, built.founder.keys.signer, honest)
    with pytest.raises(StateError, match="false"):
        built.log.with_entries([elsewhere])


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\xa4join\x01\x02", b"\x90", b"\xff" * 9])
def test_garbage_is_no_entry(body: bytes) -> None:
    with pytest.raises(StateError, match="not an entry"):
        LogBuilder().log.with_entries([SignedEntry(body, b"\0" * 64)])


def test_strangers_and_unused_keys_admit_nobody() -> None:
    built, (stranger, planted) = LogBuilder(), peers("stranger", "planted")
    built.admit(stranger, planted)
    built.join(KeyPair.generate(), planted)
    built.own(stranger, stranger)
    assert built.standing(stranger, planted) == ["unknown", "unknown"]
    assert built.log.owners == {built.founder.peer}


def test_an_invitation_admits_as_many_as_it_says() -> None:
    built, (a, b, c) = LogBuilder(), peers("a", "b", "c")
    key, _ = built.invite(built.founder, uses=2)
    for one in (a, b, a, c):
        built.join(key, one, at=random.random())
    assert built.standing(a, b, c) == ["member", "member", "unknown"]


def test_an_ended_invitation_keeps_those_that_are_listed() -> None:
    built, (a, b, late) = LogBuilder(), peers("a", "b", "late")
    key, entry = built.invite(built.founder, uses=9)
    built.join(key, a)
    built.join(key, b)
    built.end(built.founder, entry, a)
    built.join(key, late)
    assert built.standing(a, b, late) == ["member", "unknown", "unknown"]
    assert built.log.invitations[0].is_ended


def test_only_its_creator_and_owners_end_an_invitation() -> None:
    built, (a, b) = LogBuilder(), peers("a", "b")
    built.admit(built.founder, a)
    key, entry = built.invite(built.founder)
    built.join(key, b)
    built.end(a, entry)
    assert built.standing(b) == ["member"]
    built.end(built.founder, entry)
    assert built.standing(b) == ["unknown"]


def test_revoking_ends_all_that_descends_from_a_key() -> None:
    built, (bad, child, grandchild, other) = LogBuilder(), peers("bad", "child", "g", "other")
    built.admit(built.founder, bad, other)
    key, _ = built.invite(bad, uses=5)
    built.join(key, child)
    built.admit(child, grandchild)
    built.revoke(built.founder, bad)
    assert built.standing(bad, child, grandchild, other) == ["revoked"] * 3 + ["member"]
    late = TestPeer(name="late")
    built.admit(bad, late)  # its key can still sign
    assert built.standing(late) == ["revoked"]
    built.admit(built.founder, child)  # an owner admits it itself
    assert built.standing(bad, child, grandchild) == ["revoked", "member", "member"]


def test_only_owners_revoke_and_readmit() -> None:
    built, (a, b) = LogBuilder(), peers("a", "b")
    built.admit(built.founder, a, b)
    built.revoke(a, b)
    built.revoke(a, built.founder)
    built.revoke(a, a)
    assert built.standing(a, b, built.founder) == ["member"] * 3
    revocation = built.revoke(built.founder, a)
    built.readmit(a, revocation)
    built.readmit(b, revocation)
    assert built.standing(a) == ["revoked"]
    assert built.log.revocations_of(a.peer) == (revocation.hash,)
    built.readmit(built.founder, revocation)
    assert built.standing(a) == ["member"]


def test_a_revoked_pc_may_be_revoked_again() -> None:
    built, (a,) = LogBuilder(), peers("a")
    built.admit(built.founder, a)
    first = built.revoke(built.founder, a)
    built.readmit(built.founder, first)
    built.append(
        built.founder.keys,
        msgspec.structs.replace(first.decode(), at=9.0),  # type: ignore[arg-type]
    )
    assert built.standing(a) == ["revoked"]


def test_an_owner_is_made_by_owners_and_revoked_from_above() -> None:
    built, (heir, a, rebel) = LogBuilder(), peers("heir", "a", "rebel")
    built.admit(built.founder, heir, a, rebel)
    built.own(rebel, rebel)
    assert built.log.owners == {built.founder.peer}
    built.own(built.founder, heir)
    assert built.log.owners == {built.founder.peer, heir.peer}
    revocation = built.revoke(heir, a)
    assert built.standing(a) == ["revoked"]
    built.revoke(heir, built.founder)
    assert built.standing(built.founder) == ["member"]
    built.revoke(built.founder, heir)
    assert built.log.owners == {built.founder.peer}
    # Revocations by a former owner stay valid, but its readmissions don't.
    built.readmit(heir, revocation)
    assert built.standing(heir, a) == ["revoked", "revoked"]


def test_a_pc_that_left_returns_by_another_invitation() -> None:
    built, (a, b) = LogBuilder(), peers("a", "b")
    key, _ = built.invite(built.founder)
    built.join(key, a)
    built.admit(a, b)
    built.leave(a)
    assert built.standing(a, b) == ["left", "member"]
    assert not [one for one in built.log.invitations if one.creator == a.peer]
    built.invite(a)
    built.admit(built.founder, a)
    assert built.standing(a) == ["member"]
    assert [one.creator for one in built.log.invitations] == [built.founder.peer, a.peer]


def test_nobody_leaves_for_another() -> None:
    built, (a, b) = LogBuilder(), peers("a", "b")
    built.admit(built.founder, a, b)
    admission = built.log.members[a.peer].admission
    built.append(b.keys, DepartureEntry(b.verify_key, admission))
    assert built.standing(a) == ["member"]


def test_a_member_has_one_vote_however_many_it_admits() -> None:
    built, (a, b, heir) = LogBuilder(), peers("a", "b", "heir")
    built.admit(built.founder, a, b, heir)
    built.own(built.founder, heir)
    planted = peers(*"12345")
    key, _ = built.invite(b, uses=5)
    for one in planted:
        built.join(key, one)
    classroom = peers(*"xyz")
    key, _ = built.invite(built.founder, uses=3)
    for one in classroom:
        built.join(key, one)
    branches = built.log.branches
    assert {branches[one.peer] for one in planted} == {branches[b.peer]}
    assert len({branches[one.peer] for one in classroom}) == 1
    assert len({branches[one.peer] for one in (built.founder, a, b, heir, classroom[0])}) == 5


def test_nobody_claims_members_by_admitting_them_again() -> None:
    built, (a, good, child) = LogBuilder(), peers("a", "good", "child")
    built.admit(built.founder, a, good)
    built.admit(good, child)
    before = built.log.branches
    built.admit(a, good, child, built.founder)
    assert built.log.branches == before


def test_expired_unused_invitations_are_dropped() -> None:
    built, (a,) = LogBuilder(), peers("a")
    _, unused = built.invite(built.founder, expires_at=10)
    used, _ = built.invite(built.founder, expires_at=10)
    built.invite(built.founder)
    built.join(used, a)
    digest = built.log.digest
    assert built.log.without_expired(10.0).digest == digest
    built.end(built.founder, unused)
    assert built.log.without_expired(9.0) is built.log
    kept = built.log.without_expired(10.0)
    assert (len(kept.entries), len(built.log.entries)) == (4, 6)
    assert kept.members == built.log.members
    assert kept.digest == digest, "its end is gone too"


def test_logs_with_other_members_or_open_invitations_have_other_digests() -> None:
    """Otherwise a leader would not learn that an invitation ended, and would admit PCs by it."""
    built, (a,) = LogBuilder(), peers("a")
    keys, invitation = built.invite(built.founder, uses=2)
    built.join(keys, a)
    stays, ended = LogBuilder(built.founder), LogBuilder(built.founder)
    stays.log = ended.log = built.log
    ended.end(ended.founder, invitation)
    stays.end(stays.founder, invitation, a)
    assert (built.standing(a), stays.standing(a), ended.standing(a)) == (
        ["member"],
        ["member"],
        ["unknown"],
    )
    assert len({built.log.digest, stays.log.digest, ended.log.digest}) == 3


def fill(append: Callable[[], object]) -> str:
    """Append until the log refuses; returns the reason."""
    for _ in range(MAX_ENTRIES):
        try:
            append()
        except Unavailable as error:
            return str(error)
    return "never"


def test_one_member_signs_a_bounded_amount() -> None:
    built, a = LogBuilder(), TestPeer()
    built.admit(built.founder, a)
    before = sum(one.size for one in built.log.entries)
    assert "too much" in fill(lambda: built.invite(a))
    signed = sum(one.size for one in built.log.entries) - before
    assert MAX_SIGNED - 300 < signed <= MAX_SIGNED
    for _ in range(100):
        built.invite(built.founder)
    built.revoke(built.founder, a)


def test_a_log_has_room_in_a_replica() -> None:
    """Also with entries of maximum size."""
    built = LogBuilder()
    _, invitation = built.invite(built.founder)
    kept = peers(*(f"p{n}" for n in range(255)))
    why = fill(lambda: built.end(built.founder, built.invite(built.founder)[1], *kept))
    assert "full" in why
    assert sum(one.size for one in built.log.entries) < MAX_BYTES
    assert invitation.hash == built.log.invitations[0].hash


def test_known_entries_are_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    built, (a,) = LogBuilder(), peers("a")
    built.admit(built.founder, a)
    checked: list[SignedEntry] = []

    def check(_swarm: str, entry: SignedEntry) -> None:
        checked.append(entry)

    monkeypatch.setattr("molink.swarm.membership.membership_log.check_signature", check)
    MembershipLog.check_entries(built.log.swarm, built.log.entries, built.log)
    assert checked == []
    false = SignedEntry(built.log.entries[-1].body, b"\0" * 64)
    MembershipLog.check_entries(built.log.swarm, (built.log.entries[0], false), built.log)
    assert checked == [false]


def test_what_unknown_keys_sign_is_dropped() -> None:
    """Anybody can make keys and sign with each of them."""
    built, member = LogBuilder(), TestPeer()
    built.admit(built.founder, member)
    clean, strangers = built.log, peers(*"abc")
    for one in strangers:
        built.revoke(one, built.founder)
        built.admit(one, one)
        built.invite(one)
    assert MembershipLog.check_entries(clean.swarm, built.log.entries).digest == clean.digest
    assert clean.merge_log(built.log).entries == clean.entries
    # A PC that is admitted later may have signed before.
    built.admit(member, strangers[0])
    assert len(clean.merge_log(built.log).entries) == len(clean.entries) + 4


def test_a_flood_of_entries_leaves_room_for_owners() -> None:
    built, bad, good = LogBuilder(), TestPeer(name="bad"), TestPeer(name="good")
    built.admit(built.founder, bad, good)
    before, flood = built.log, dict[str, SignedEntry]()
    helpers = peers(*(f"h{n}" for n in range(30)))
    for one in helpers:
        admit = AdmissionEntry(bad.verify_key, one.verify_key, "h", 1.0)
        signed = [built.sign(bad.keys, admit)]
        for n in range(60):
            gone = DepartureEntry(one.verify_key, f"{n:032x}")
            signed.append(built.sign(one.keys, gone))
        flood |= {entry.hash: entry for entry in signed}
    all_of_it = MembershipLog(before.swarm, {one.hash: one for one in before.entries} | flood)
    merged = before.merge_log(all_of_it)
    taken = sum(one.size for one in merged.entries) - sum(one.size for one in before.entries)
    assert MAX_UNOWNED - 300 < taken <= MAX_UNOWNED
    built.log = merged
    built.revoke(built.founder, bad)
    assert built.standing(bad, good) == ["revoked", "member"]
    assert "member" not in built.standing(*helpers)
    assert before.merge_log(built.log).members[bad.peer].standing == "revoked"


# --- any order, any subset -------------------------------------------------------------------

PEERS = [TestPeer(name=name) for name in "fabcde"]

STEPS: list[Callable[[LogBuilder, random.Random], object]] = [
    lambda built, rng: built.admit(rng.choice(PEERS), rng.choice(PEERS)),
    lambda built, rng: built.revoke(rng.choice(PEERS), rng.choice(PEERS)),
    lambda built, rng: built.own(rng.choice(PEERS), rng.choice(PEERS)),
    lambda built, rng: built.readmit(rng.choice(PEERS), rng.choice(built.log.entries)),
    lambda built, rng: built.end(rng.choice(PEERS), rng.choice(built.log.entries)),
    lambda built, rng: built.join(built.invite(rng.choice(PEERS))[0], rng.choice(PEERS)),
]


@settings(max_examples=100, deadline=None)
@example(seed=2, steps=[0, 2, 0, 0, 2])
@given(seed=st.integers(0, 2**32), steps=st.lists(st.integers(0, len(STEPS) - 1), max_size=14))
def test_the_order_of_entries_does_not_matter(seed: int, steps: list[int]) -> None:
    rng, built = random.Random(seed), LogBuilder(PEERS[0])
    for step in steps:
        STEPS[step](built, rng)
    mixed = list(built.log.entries)
    rng.shuffle(mixed)
    other = MembershipLog.check_entries(built.log.swarm, mixed)
    assert other.owners == built.log.owners
    assert {one: other.is_member(one) for one in other.members} == {
        one: built.log.is_member(one) for one in built.log.members
    }
    half = mixed[: len(mixed) // 2]
    parts = [
        MembershipLog(built.log.swarm, {one.hash: one for one in part})
        for part in (half, mixed[len(mixed) // 2 :])
    ]
    joined = parts[0].with_entries(parts[1].entries)
    assert joined.digest == parts[1].with_entries(parts[0].entries).digest == built.log.digest


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 12))
def test_one_hostile_member_only_harms_what_descends_from_it(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    founder, bad, good, child, *others = PEERS
    built = LogBuilder(founder)
    built.admit(founder, bad, good)
    built.admit(good, child)
    shut_out = TestPeer()
    built.admit(founder, shut_out)
    built.revoke(founder, shut_out)
    for _ in range(steps):
        # Anything that its key can sign, about any peer.
        about = rng.choice([*PEERS, shut_out])
        acts: list[Callable[[], object]] = [
            lambda about=about: built.admit(bad, about),
            lambda about=about: built.revoke(bad, about),
            lambda about=about: built.own(bad, about),
            lambda: built.readmit(bad, rng.choice(built.log.entries)),
            lambda: built.end(bad, rng.choice(built.log.entries)),
            lambda about=about: built.join(built.invite(bad, uses=3)[0], about),
            lambda about=about: built.append(
                bad.keys, JoinEntry(bad.verify_key, about.verify_key, "x", 1.0)
            ),
        ]
        rng.choice(acts)()
    assert built.log.owners == {founder.peer}
    assert built.standing(founder, good, child, shut_out) == ["member"] * 3 + ["revoked"]
    votes = built.log.branches
    assert {votes[one.peer] for one in others if one.peer in votes} <= {votes[bad.peer]}
    built.revoke(founder, bad)
    assert built.standing(founder, good, child) == ["member"] * 3
    assert "member" not in built.standing(bad, shut_out, *others)
