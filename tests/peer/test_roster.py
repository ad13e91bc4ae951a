"""The members as the coordinator announces them."""

from molink.peer.roster import Roster
from molink.wire.control import Member
from molink.wire.keys import KeyPair, peer_id
from molink.wire.pipe import MemberKey

ME = KeyPair.generate()


def member(keys: KeyPair, **changes: object) -> Member:
    fields = {
        "peer": peer_id(keys.public),
        "name": "n",
        "public_key": keys.public,
        "addresses": (),
        "control_port": 0,
    }
    return Member(**{**fields, **changes})


def make() -> tuple[Roster, list[str], list[str]]:
    roster = Roster(MemberKey(peer=peer_id(ME.public), public_key=ME.public))
    came: list[str] = []
    gone: list[str] = []
    roster.on_member = lambda member: came.append(member.peer)
    roster.on_gone = gone.append
    return roster, came, gone


def test_members_come_and_go() -> None:
    roster, came, gone = make()
    other = member(KeyPair.generate())
    assert roster.add(other)
    assert roster.add(other)
    assert came == [other.peer]
    assert roster.get(other.peer) == other
    assert {key.peer for key in roster.keys().members} == {peer_id(ME.public), other.peer}
    roster.remove(other.peer)
    roster.remove(other.peer)
    assert gone == [other.peer]
    assert roster.peers == {peer_id(ME.public)}


def test_an_id_is_that_of_its_key() -> None:
    roster, came, _ = make()
    assert not roster.add(member(KeyPair.generate(), peer=peer_id(ME.public)))
    assert came == []


def test_this_peer_is_always_in() -> None:
    roster, came, _ = make()
    assert roster.add(member(ME))
    assert came == []
    assert len(roster.keys().members) == 1


def test_who_went_while_there_was_no_session_is_dropped() -> None:
    roster, _, gone = make()
    stays, goes = member(KeyPair.generate()), member(KeyPair.generate())
    for one in (stays, goes):
        roster.add(one)
    roster.welcomed()
    roster.add(stays)
    roster.sweep()
    roster.sweep()
    assert gone == [goes.peer]
