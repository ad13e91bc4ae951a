"""Detecting two PCs with one key."""

from itertools import cycle, islice

from hypothesis import given
from hypothesis import strategies as st

from molink.swarm.membership.duplicate_peers import (
    ALTERNATION_INTERVAL_S,
    MIN_ALTERNATIONS,
    DuplicatePeers,
)


def test_reconnecting_peer_is_no_duplicate() -> None:
    """Queued reports of earlier connections arrive in between."""
    duplicates = DuplicatePeers()
    backlog = islice(cycle([b"a", b"b"]), 100)
    assert not any(duplicates.observe_connection("p", one, 1.0) for one in backlog)
    times = range(2, 100)
    observe = duplicates.observe_connection
    assert not any(observe("p", b"%d" % (now // 5), float(now)) for now in times)


def test_second_pc_is_the_duplicate() -> None:
    duplicates, heard = DuplicatePeers(), []
    for number, one in enumerate(islice(cycle([b"a", b"b"]), 80)):
        heard.append(
            (one, duplicates.observe_connection("p", one, number * ALTERNATION_INTERVAL_S / 2))
        )
    assert not any(shut for one, shut in heard if one == b"a")
    shut = [shut for one, shut in heard if one == b"b"]
    assert shut == sorted(shut)
    assert MIN_ALTERNATIONS / 2 <= shut.count(False) <= MIN_ALTERNATIONS + 1
    assert not duplicates.observe_connection("another", b"b", 99.0)
    # The first PC may reconnect; once it is dropped, the other one may connect.
    assert not duplicates.observe_connection("p", b"c", 99.0)
    assert duplicates.observe_connection("p", b"b", 99.0)
    duplicates.drop_peer("p")
    assert not duplicates.observe_connection("p", b"b", 99.0)


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=60))
def test_one_connection_always_counts(connections: list[bytes]) -> None:
    duplicates = DuplicatePeers()
    shut = {
        one
        for now, one in enumerate(connections)
        if duplicates.observe_connection("p", one, float(now))
    }
    assert len(shut) <= max(0, len(set(connections)) - 1)
