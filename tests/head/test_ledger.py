import pytest

from molink.errors import InvariantError
from molink.head.ledger import MAX_SPAN, Ledger
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Rows, Volume


def volume(tick: int, prefill: bool = False) -> Volume:
    return Volume(tick, prefill, (Rows(0, 0, 1, 0),), Payload("i32", (1,)))


def send(ledger: Ledger, prefill: bool = False) -> int:
    tick = ledger.issue()
    ledger.sent(volume(tick, prefill))
    return tick


def test_counts_what_is_in_flight() -> None:
    ledger = Ledger()
    first, second = send(ledger), send(ledger, prefill=True)
    assert (first, second) == (1, 2)
    assert (ledger.volumes(prefill=False), ledger.volumes(prefill=True)) == (1, 1)
    assert ledger.flying(0) == {1, 2}
    assert ledger.returned(2) == (Rows(0, 0, 1, 0),)
    assert ledger.returned(2) is None
    assert (ledger.volumes(prefill=False), ledger.volumes(prefill=True)) == (1, 0)
    ledger.validate()


def test_iterations_that_a_cancel_takes() -> None:
    ledger = Ledger()
    before = send(ledger)
    trip = ledger.cancelled()
    release = ledger.issue()
    ledger.released(release, trip)
    ledger.returned(before)
    after, beside = send(ledger), send(ledger)
    ledger.returned(after)
    ledger.returned(beside)
    again = send(ledger)
    ledger.returned(again)
    assert ledger.went_round(release)
    assert not ledger.went_round(release)
    # The one of the release itself, the one of ``after`` and ``beside``, and the one of ``again``.
    assert (ledger.cancel_iterations_last, ledger.cancel_iterations_max) == (3, 3)
    ledger.released(ledger.issue(), ledger.cancelled())
    ledger.went_round(ledger.last)
    assert (ledger.cancel_iterations_last, ledger.cancel_iterations_max) == (1, 3)


def test_nothing_new_while_an_old_tick_is_in_flight() -> None:
    ledger = Ledger()
    tick = send(ledger)
    for _ in range(MAX_SPAN - 1):
        ledger.issue()
    assert not ledger.wide
    ledger.issue()
    assert ledger.wide
    ledger.returned(tick)
    assert not ledger.wide


def test_a_tick_from_the_future_is_found() -> None:
    ledger = Ledger()
    ledger.sent(volume(5))
    with pytest.raises(InvariantError, match="beyond the last one issued"):
        ledger.validate()
