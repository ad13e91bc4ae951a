import pytest

from molink.errors import InvariantError
from molink.scheduler.ledger import MAX_SPAN, Ledger
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Rows, Volume

#: One that a token is sampled from.
ROW = Rows(0, 0, 1, 0, sample=True)


def volume(tick: int, prefill: bool = False) -> Volume:
    return Volume(tick, prefill, (ROW,), Payload("i32", (1,)))


def send(ledger: Ledger, prefill: bool = False, now: float = 0.0) -> int:
    tick = ledger.issue()
    ledger.sent(volume(tick, prefill), now)
    return tick


def test_counts_what_is_in_flight() -> None:
    ledger = Ledger()
    first, second = send(ledger), send(ledger, prefill=True, now=1.5)
    assert (first, second) == (1, 2)
    assert (ledger.volumes(prefill=False), ledger.volumes(prefill=True)) == (1, 1)
    assert ledger.flying(0) == {1, 2}
    assert ledger.returned(2) == ((ROW,), 1.5)
    assert ledger.returned(2) is None
    assert (ledger.volumes(prefill=False), ledger.volumes(prefill=True)) == (1, 0)
    ledger.validate()


def test_since_when_a_token_is_awaited() -> None:
    ledger = Ledger()
    assert ledger.awaited_since is None
    tick = ledger.issue()
    ledger.sent(Volume(tick, True, (Rows(0, 0, 1, 0),), Payload("i32", (1,))), 1.0)
    assert ledger.awaited_since is None, "its prompt goes on"
    first, _ = send(ledger, now=2.0), send(ledger, now=3.0)
    assert ledger.awaited_since == 2.0
    ledger.returned(first)
    assert ledger.awaited_since == 3.0


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
    ledger.sent(volume(5), 0.0)
    with pytest.raises(InvariantError, match="beyond the last one issued"):
        ledger.validate()
