import pytest

from molink.errors import InvariantError
from molink.scheduler.in_flight import MAX_SEQ_SPAN, InFlightTracker
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import RequestSlice, Volume

#: A slice with one sampled row.
ROW = RequestSlice(0, 0, 1, 0, sample=True)


def volume(seq: int, prefill: bool = False) -> Volume:
    return Volume(seq, prefill, (ROW,), Payload("i32", (1,)))


def send(ledger: InFlightTracker, prefill: bool = False, now: float = 0.0) -> int:
    seq = ledger.issue_seq()
    ledger.record_volume(volume(seq, prefill), now)
    return seq


def test_volumes_in_flight_are_counted() -> None:
    in_flight = InFlightTracker()
    first, second = send(in_flight), send(in_flight, prefill=True, now=1.5)
    assert (first, second) == (1, 2)
    assert (in_flight.count_volumes(prefill=False), in_flight.count_volumes(prefill=True)) == (1, 1)
    assert in_flight.seqs_of_request(0) == {1, 2}
    assert in_flight.pop_volume(2) == ((ROW,), 1.5)
    assert in_flight.pop_volume(2) is None
    assert (in_flight.count_volumes(prefill=False), in_flight.count_volumes(prefill=True)) == (1, 0)
    in_flight.validate()


def test_oldest_awaited_volume() -> None:
    in_flight = InFlightTracker()
    assert in_flight.oldest_awaited_at is None
    seq = in_flight.issue_seq()
    in_flight.record_volume(
        Volume(seq, True, (RequestSlice(0, 0, 1, 0),), Payload("i32", (1,))), 1.0
    )
    assert in_flight.oldest_awaited_at is None, "its prefill continues"
    first, _ = send(in_flight, now=2.0), send(in_flight, now=3.0)
    assert in_flight.oldest_awaited_at == 2.0
    in_flight.pop_volume(first)
    assert in_flight.oldest_awaited_at == 3.0


def test_cancel_iterations_are_counted() -> None:
    in_flight = InFlightTracker()
    before = send(in_flight)
    counter = in_flight.start_cancel()
    release = in_flight.issue_seq()
    in_flight.record_release(release, counter)
    in_flight.pop_volume(before)
    after, piggyback = send(in_flight), send(in_flight)
    in_flight.pop_volume(after)
    in_flight.pop_volume(piggyback)
    again = send(in_flight)
    in_flight.pop_volume(again)
    assert in_flight.pop_release(release)
    assert not in_flight.pop_release(release)
    # The release's iteration, that of ``after`` and ``beside``, and that of ``again``.
    assert (in_flight.cancel_iterations_last, in_flight.cancel_iterations_max) == (3, 3)
    in_flight.record_release(in_flight.issue_seq(), in_flight.start_cancel())
    in_flight.pop_release(in_flight.last_seq)
    assert (in_flight.cancel_iterations_last, in_flight.cancel_iterations_max) == (1, 3)


def test_an_old_seq_in_flight_fills_the_window() -> None:
    in_flight = InFlightTracker()
    seq = send(in_flight)
    for _ in range(MAX_SEQ_SPAN - 1):
        in_flight.issue_seq()
    assert not in_flight.is_window_full
    in_flight.issue_seq()
    assert in_flight.is_window_full
    in_flight.pop_volume(seq)
    assert not in_flight.is_window_full


def test_validation_finds_a_seq_beyond_the_last() -> None:
    in_flight = InFlightTracker()
    in_flight.record_volume(volume(5), 0.0)
    with pytest.raises(InvariantError, match="exceeds the last one issued"):
        in_flight.validate()
