"""The address book of announced members."""

from molink.facts.identity import derive_peer_id
from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.worker_pipe import PeerKey
from molink.wire.sockets.key_pair import KeyPair

ME = KeyPair.generate()


def member(keys: KeyPair, **changes: object) -> PeerInfo:
    fields = {
        "peer": derive_peer_id(keys.public),
        "name": "n",
        "public_key": keys.public,
        "addresses": (),
        "control_port": 0,
    }
    return PeerInfo(**{**fields, **changes})


def make() -> tuple[AddressBook, list[str], list[str]]:
    book = AddressBook(PeerKey(peer=derive_peer_id(ME.public), public_key=ME.public))
    came: list[str] = []
    gone: list[str] = []
    book.on_peer_changed = lambda member: came.append(member.peer)
    book.on_peer_removed = gone.append
    return book, came, gone


def test_names_are_sanitized() -> None:
    book, came, _ = make()
    other = member(KeyPair.generate(), name='x" (10.0.0.1): \x1b[31m')
    assert book.add_peer(other)
    assert book.add_peer(other)
    assert came == [other.peer]
    assert book.name_of(other.peer) == "x 10.0.0.1 31m"


def test_peers_are_added_and_removed() -> None:
    book, came, gone = make()
    other = member(KeyPair.generate())
    assert book.add_peer(other)
    assert book.add_peer(other)
    assert came == [other.peer]
    assert book.get_peer(other.peer) == other
    assert {key.peer for key in book.peer_keys().peers} == {derive_peer_id(ME.public), other.peer}
    book.remove_peer(other.peer)
    book.remove_peer(other.peer)
    assert gone == [other.peer]
    assert book.peers == {derive_peer_id(ME.public)}


def test_peer_id_must_match_its_key() -> None:
    book, came, _ = make()
    assert not book.add_peer(member(KeyPair.generate(), peer=derive_peer_id(ME.public)))
    assert came == []


def test_own_peer_is_always_included() -> None:
    book, came, _ = make()
    assert book.add_peer(member(ME))
    assert came == []
    assert len(book.peer_keys().peers) == 1


def test_unconfirmed_peers_are_dropped_after_a_reconnect() -> None:
    book, _, gone = make()
    stays, goes = member(KeyPair.generate()), member(KeyPair.generate())
    for one in (stays, goes):
        book.add_peer(one)
    book.mark_unconfirmed()
    book.add_peer(stays)
    book.drop_unconfirmed()
    book.drop_unconfirmed()
    assert gone == [goes.peer]
