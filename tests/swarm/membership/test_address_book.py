"""The members as the coordinator announces them."""

from molink.facts.identity import peer_id
from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.instructions import Member
from molink.wire.messages.pipe import MemberKey
from molink.wire.sockets.curve import KeyPair

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


def make() -> tuple[AddressBook, list[str], list[str]]:
    book = AddressBook(MemberKey(peer=peer_id(ME.public), public_key=ME.public))
    came: list[str] = []
    gone: list[str] = []
    book.on_member = lambda member: came.append(member.peer)
    book.on_gone = gone.append
    return book, came, gone


def test_members_come_and_go() -> None:
    book, came, gone = make()
    other = member(KeyPair.generate())
    assert book.add(other)
    assert book.add(other)
    assert came == [other.peer]
    assert book.get(other.peer) == other
    assert {key.peer for key in book.keys().members} == {peer_id(ME.public), other.peer}
    book.remove(other.peer)
    book.remove(other.peer)
    assert gone == [other.peer]
    assert book.peers == {peer_id(ME.public)}


def test_an_id_is_that_of_its_key() -> None:
    book, came, _ = make()
    assert not book.add(member(KeyPair.generate(), peer=peer_id(ME.public)))
    assert came == []


def test_this_peer_is_always_in() -> None:
    book, came, _ = make()
    assert book.add(member(ME))
    assert came == []
    assert len(book.keys().members) == 1


def test_who_went_while_there_was_no_session_is_dropped() -> None:
    book, _, gone = make()
    stays, goes = member(KeyPair.generate()), member(KeyPair.generate())
    for one in (stays, goes):
        book.add(one)
    book.welcomed()
    book.add(stays)
    book.sweep()
    book.sweep()
    assert gone == [goes.peer]
