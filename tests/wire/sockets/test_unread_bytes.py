import random

from molink.wire.sockets.unread_bytes import (
    HANDSHAKE_BYTES,
    SUSPECT_BYTES,
    BacklogLimits,
    OpenConnection,
    UnreadBytes,
    wire_size,
)

LIMITS = BacklogLimits(
    party_unfinished=1000,
    total_unfinished=2500,
    party_bytes=5000,
    total_bytes=8000,
    party_connections=4,
    total_connections=10,
)


def identity(number: int) -> bytes:
    return b"\0" + (number % (1 << 32)).to_bytes(4, "big")


class Book:
    """A backlog whose connections are named by letters."""

    def __init__(self) -> None:
        self.backlog = UnreadBytes(LIMITS)

    def open(self, descriptor: int, host: str = "10.0.0.1", port: int = 1) -> OpenConnection:
        self.backlog.on_opened(descriptor, (host, port))
        return self.backlog.connections[-1]

    def look(
        self, *counts: tuple[OpenConnection, int], drained: bool = False
    ) -> OpenConnection | None:
        """Report the bytes received per connection after the handshake."""
        if drained:
            self.backlog.on_drained()
        self.backlog.on_counted([(one, HANDSHAKE_BYTES + count) for one, count in counts])
        return self.backlog.find_excess()


def test_wire_sizes_match() -> None:
    assert wire_size(0) == 35
    assert wire_size(222) == 257
    assert wire_size(223) == 223 + 33 + 9


def test_connections_within_bounds_are_kept() -> None:
    book = Book()
    one, other = book.open(3), book.open(4, "10.0.0.2")
    assert book.look((one, 4000), (other, 4000)) is None
    assert book.look((one, 0), (other, 0)) is None


def test_read_bytes_do_not_count() -> None:
    book = Book()
    one = book.open(3)
    for number in range(1, 20):
        assert book.look((one, 4000 * number)) is None
        book.backlog.on_delivered(3, 4000, identity(7), "ann")


def test_excess_unread_bytes_cut_the_connection() -> None:
    book = Book()
    one, other = book.open(3), book.open(4)
    assert book.look((one, 4000), (other, 1500)) is one
    assert one.is_cut
    assert book.backlog.connections == [other]
    assert book.backlog.find_excess() is None


def test_endless_message_is_bounded() -> None:
    """Bytes that have arrived while no whole message waits belong to an unfinished one."""
    book = Book()
    one = book.open(3)
    assert book.look((one, 3000)) is None
    assert book.look((one, 3500)) is None
    assert book.look((one, 3500), drained=True) is one


def test_recent_bytes_may_be_unread() -> None:
    book = Book()
    one = book.open(3)
    assert book.look((one, 900)) is None
    assert book.look((one, 4000), drained=True) is None
    book.backlog.on_delivered(3, 3500, identity(7), "ann")
    assert book.look((one, 4000), drained=True) is None


def test_party_becomes_the_peer_once_known() -> None:
    book = Book()
    ann, bob = book.open(3), book.open(4)
    book.backlog.on_delivered(3, 0, identity(1), "ann")
    book.backlog.on_delivered(4, 0, identity(2), "bob")
    assert book.look((ann, 3000), (bob, 3000)) is None
    more = book.open(5)
    book.backlog.on_delivered(5, 0, identity(3), "ann")
    assert book.look((more, 2500)) is ann


def test_total_of_all_parties_is_bounded() -> None:
    book = Book()
    ones = [book.open(number, f"10.0.0.{number}") for number in range(3, 6)]
    assert book.look(*((one, 2600 + i) for i, one in enumerate(ones))) is None
    assert book.look(*((one, 2700 + i) for i, one in enumerate(ones))) is ones[-1]


def test_closed_connection_counts_until_read() -> None:
    book = Book()
    for descriptor in (3, 4):
        one = book.open(descriptor)
        assert book.look((one, 2400)) is None
        book.backlog.on_closed(descriptor)
    again = book.open(3, port=2)
    assert book.look((again, 300)) is again
    book.backlog.on_closed(3)
    book.backlog.on_drained()
    again = book.open(3, port=3)
    assert book.look((again, 300)) is None


def test_unread_bytes_stay_with_their_connection() -> None:
    book = Book()
    other = book.open(9, "10.0.0.2")
    for descriptor in (3, 4, 5):
        one = book.open(descriptor)
        book.look((one, 4000))
        book.backlog.on_closed(descriptor)
    assert book.look((other, 900)) is None


def test_connections_per_party_are_bounded() -> None:
    book = Book()
    ours = [book.open(number) for number in range(3, 7)]
    other = book.open(20, "10.0.0.2")
    assert book.look() is None
    ours.append(book.open(7))
    assert book.look() is ours[0]
    assert book.look() is None
    assert other in book.backlog.connections


def test_many_peers_of_one_address_outlast_a_flood_from_it() -> None:
    limits = BacklogLimits()
    backlog, peers = UnreadBytes(), 64
    descriptors = iter(range(1000))
    for number in range(2 * peers):
        descriptor = next(descriptors)
        backlog.on_opened(descriptor, ("127.0.0.1", number))
        backlog.on_delivered(descriptor, 100, identity(number), f"pc{number % peers}")
        assert backlog.find_excess() is None
    ours = backlog.connections
    for number in range(200):  # these never identify themselves
        backlog.on_opened(next(descriptors), ("127.0.0.1", 10_000 + number))
        excess = backlog.find_excess()
        if excess is not None:
            assert excess not in ours
            backlog.on_closed(excess.descriptor)
    assert set(map(id, ours)) <= set(map(id, backlog.connections))
    assert len(backlog.connections) == len(ours) + limits.party_connections


def test_total_connections_are_bounded() -> None:
    book = Book()
    for number in range(10):
        book.open(number, f"10.0.0.{number}")
    assert book.look() is None
    (theirs,) = (one for one in book.backlog.connections if one.remote[0] == "10.0.0.5")
    book.open(10, "10.0.0.5")
    assert book.look() is theirs


def test_late_message_counts_for_its_own_connection() -> None:
    book = Book()
    book.open(3)
    book.backlog.on_delivered(3, 100, identity(7))
    book.backlog.on_closed(3)
    next_one = book.open(3, port=2)
    book.backlog.on_delivered(3, 100, identity(8))
    assert next_one.delivered == HANDSHAKE_BYTES + 100
    book.backlog.on_delivered(3, 5000, identity(6))
    assert next_one.delivered == HANDSHAKE_BYTES + 100


def test_routing_ids_wrap_around() -> None:
    book = Book()
    one = book.open(3)
    book.backlog.on_delivered(3, 5000, identity(-1))
    assert one.delivered == HANDSHAKE_BYTES + 5000
    # So this message was an earlier connection's, whose end was reported before it was read.
    book.backlog.on_delivered(3, 10, identity(0))
    assert one.delivered == HANDSHAKE_BYTES + 10


def test_without_routing_ids() -> None:
    book = Book()
    one = book.open(3)
    book.backlog.on_delivered(3, 10)
    book.backlog.on_delivered(4, 10)
    assert one.delivered == HANDSHAKE_BYTES + 10


def test_much_unread_data_requests_a_read() -> None:
    book = Book()
    one = book.open(3)
    assert not book.backlog.on_counted([(one, SUSPECT_BYTES)])
    assert book.backlog.on_counted([(one, HANDSHAKE_BYTES + SUSPECT_BYTES + 1)])


def test_total_stays_within_bounds() -> None:
    """A peer opens connections, sends, and ends them in any order."""
    chance = random.Random(5)
    book = Book()
    for _ in range(3000):
        descriptor = chance.randrange(8)
        kind = chance.random()
        if kind < 0.2:
            book.backlog.on_opened(
                descriptor, (f"10.0.0.{chance.randrange(3)}", chance.randrange(99))
            )
        elif kind < 0.3:
            book.backlog.on_closed(descriptor)
        elif kind < 0.35:
            book.backlog.on_drained()
        elif kind < 0.6:
            book.backlog.on_delivered(descriptor, 50, identity(chance.randrange(9)), "ann")
        counts = [(one, one.received + chance.randrange(300)) for one in book.backlog.connections]
        book.backlog.on_counted(counts)
        while book.backlog.find_excess() is not None:
            pass
        live = book.backlog.connections
        for party in {one.party for one in live}:
            theirs = [one for one in live if one.party == party]
            assert len(theirs) <= LIMITS.party_connections
            assert sum(one.unread for one in theirs) <= LIMITS.party_bytes
            assert sum(one.unfinished for one in theirs) <= LIMITS.party_unfinished
