"""Names of members are unique and equal on every PC, and no PC can take another one's name."""

import math
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.sanitize import add_number, sanitize_name
from molink.wire.messages.membership import AdmissionEntry, JoinEntry, NameEntry, SignedEntry
from tests.support.membership import LogBuilder, TestPeer

#: A member's own name may look like another one's with an added number.
OWN_NAMES = ("vm", "vm-2", "vm-2-2", "vm/cuda:1", "pc")
#: Times that a hostile PC may sign.
CLAIMED_TIMES = (-1e300, 0.0, 5.0, 1e300, math.nan, -math.inf)


def names(log: MembershipLog) -> dict[str, str]:
    return {peer: one.name for peer, one in log.members.items()}


def rename(built: LogBuilder, peer: TestPeer, name: str, at: float) -> None:
    built.append(peer.keys, NameEntry(peer.verify_key, name, at))


def admit(built: LogBuilder, by: TestPeer, peer: TestPeer, at: float) -> None:
    built.append(by.keys, AdmissionEntry(by.verify_key, peer.verify_key, peer.name, at))


def grow(built: LogBuilder, members: list[TestPeer], chance: random.Random, begin: float) -> None:
    """Let PCs join, leave and rename themselves, at rising times from ``begin``."""
    for step in range(8):
        at, by = begin + step, chance.choice(members)
        present = [one for one in members[len(built.founders) :] if built.log.is_member(one.peer)]
        what = chance.choice(("admit", "admit", "invite", "rename", "leave", "revoke"))
        if what == "admit" or (what != "invite" and not present):
            members.append(TestPeer(name=chance.choice(OWN_NAMES)))
            admit(built, by, members[-1], at)
        elif what == "invite":
            key, _ = built.invite(by, uses=3, created_at=at)
            for _ in range(chance.randint(1, 3)):
                members.append(TestPeer(name=chance.choice(OWN_NAMES)))
                built.join(key, members[-1], at)
        elif what == "rename":
            rename(built, chance.choice(present), chance.choice(OWN_NAMES), at)
        elif what == "leave":
            built.leave(chance.choice(present))
        else:
            built.revoke(built.founder, chance.choice(present))


def shuffle(log: MembershipLog, chance: random.Random) -> MembershipLog:
    """The log of a PC that received the entries in another order."""
    entries: Sequence[SignedEntry] = chance.sample(log.entries, len(log.entries))
    return MembershipLog(log.swarm, {one.hash: one for one in entries})


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_names_are_unique_equal_everywhere_and_stay(chance: random.Random) -> None:
    built = LogBuilder(TestPeer(name="vm"), TestPeer(name="vm"))
    members = list(built.founders)
    grow(built, members, chance, 10.0)
    before = names(built.log)
    assert len(set(before.values())) == len(before)
    assert names(shuffle(built.log, chance)) == before
    renamed = len(built.log.entries)
    grow(built, members, chance, 100.0)
    signers = {
        entry.signer
        for entry in (one.decode() for one in built.log.entries[renamed:])
        if isinstance(entry, NameEntry)
    }
    after = names(shuffle(built.log, chance))
    assert len(set(after.values())) == len(after)
    for one in members:
        if one.peer in before and one.verify_key not in signers:
            assert after[one.peer] == before[one.peer]


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_hostile_member_takes_no_name_of_who_was_there_before(chance: random.Random) -> None:
    built = LogBuilder()
    members, bad = list(built.founders), TestPeer(name="bad")
    grow(built, members, chance, 10.0)
    before = names(built.log)
    key, _ = built.invite(built.founder, created_at=50.0)
    built.append(
        key,
        JoinEntry(key.signer.verify_key, bad.verify_key, bad.name, chance.choice(CLAIMED_TIMES)),
    )
    for _ in range(6):
        at = chance.choice(CLAIMED_TIMES)
        if chance.random() < 0.5:
            rename(built, bad, chance.choice(OWN_NAMES), at)
        else:
            helper = TestPeer(name=chance.choice(OWN_NAMES))
            admit(built, bad, helper, at)
            rename(built, helper, chance.choice(OWN_NAMES), at)
    assert before.items() <= names(shuffle(built.log, chance)).items()


def test_the_second_pc_of_a_name_gets_a_number_and_keeps_it() -> None:
    first, second, literal, third = (TestPeer(name=one) for one in ("vm", "vm", "vm-2", "vm"))
    built = LogBuilder(first)
    for at, one in enumerate((second, literal, third), 1):
        admit(built, first, one, at)
    assert list(names(built.log).values()) == ["vm", "vm-2", "vm-2-2", "vm-3"]
    built.leave(second)
    built.revoke(first, literal)
    assert list(names(built.log).values()) == ["vm", "vm-2", "vm-2-2", "vm-3"]
    # The same PC joins again, and keeps its name.
    admit(built, first, second, 9.0)
    assert built.log.find_named("vm-2") == built.log.members[second.peer]
    assert built.log.is_member(second.peer)


def test_a_new_name_leaves_the_former_one_to_its_pc() -> None:
    first, second = TestPeer(name="vm"), TestPeer(name="vm")
    built = LogBuilder(first)
    admit(built, first, second, 1.0)
    rename(built, first, "desk", 2.0)
    assert list(names(built.log).values()) == ["desk", "vm-2"]
    rename(built, second, "desk", 3.0)
    assert list(names(built.log).values()) == ["desk", "desk-2"]
    rename(built, first, "vm", 4.0)
    assert list(names(built.log).values()) == ["vm", "desk-2"]


def test_an_id_finds_its_pc_whatever_others_are_called() -> None:
    built = LogBuilder()
    imitator = TestPeer(name=built.founder.peer)
    built.admit(built.founder, imitator)
    assert built.log.find_named(built.founder.peer) == built.log.members[built.founder.peer]
    assert built.log.find_named("nobody") is None


def test_numbered_names_are_names() -> None:
    assert add_number("vm/cuda:1", 2) == "vm-2/cuda:1"
    for name in ("vm", "x" * 64, "x" * 57 + "/cuda:1"):
        found = add_number(name, 255)
        assert sanitize_name(found, "") == found != name
