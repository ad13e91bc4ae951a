"""First come, first served: individual decisions."""

from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.request_state import ABANDONED_AFTER_S, RequestState
from molink.wire.messages.data_plane import SamplingParams
from tests.support.request_states import arrived, make_state


def waiting(key: str, peer: str = "d") -> RequestState:
    return arrived(make_state(peer, key, (1,), 1, 9, SamplingParams(), credit_window=1))


def admitted(request_id: int, peer: str = "d", stalled_at: float | None = None) -> RequestState:
    """An idle request that decodes, or is stalled since ``stalled_at``."""
    state = waiting(str(request_id), peer)
    state.phase, state.id = "decode", request_id
    if stalled_at is not None:
        state.tokens.append(5)
        state.stalled_at = stalled_at
    return state


def test_the_first_request_is_admitted() -> None:
    requests = [waiting("b0", "b"), waiting("a0", "a")]
    assert Fcfs().choose_admitted(requests, 0.0) is requests[0]


def test_requests_run_in_order_of_return() -> None:
    requests = [admitted(3), admitted(1), admitted(2)]
    assert Fcfs().order_running(requests, 0.0) == requests


def test_the_latest_is_preempted_for_an_older_one() -> None:
    old, preemptor, young, younger = requests = [admitted(number) for number in range(4)]
    found = Fcfs().choose_preempted(preemptor, [young, younger, old], len(requests), 0.0)
    assert found is younger
    assert Fcfs().choose_preempted(preemptor, [old], len(requests), 0.0) is None


def test_stalled_requests_are_preempted_first() -> None:
    paused, paused_later = admitted(0, stalled_at=1.0), admitted(1, stalled_at=2.0)
    preemptor, young = admitted(2), admitted(3)
    requests = [paused, paused_later, preemptor, young]
    found = Fcfs().choose_preempted(preemptor, [paused, paused_later, young], len(requests), 3.0)
    assert found is paused_later


def test_waiting_requests_preempt_abandoned_or_all_stalled_ones() -> None:
    new, busy = waiting("new"), admitted(2)
    paused, paused_first = admitted(0, stalled_at=2.0), admitted(1, stalled_at=1.0)
    policy = Fcfs()
    assert policy.choose_preempted(new, [busy], 1, 0.0) is None
    assert policy.choose_preempted(new, [paused, busy], 2, 1.9 + ABANDONED_AFTER_S) is None
    for requests, now in (
        ([paused, paused_first, busy], 1.0 + ABANDONED_AFTER_S),
        ([paused, paused_first], 3.0),
    ):
        found = policy.choose_preempted(new, requests, len(requests), now)
        assert found is paused_first
