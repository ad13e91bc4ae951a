"""The scheduler with a custom policy."""

from collections.abc import Sequence

import pytest

from molink.errors import InvariantError
from molink.scheduler.batch import MicroBatch
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.base import SchedulingPolicy
from molink.scheduler.request_state import RequestState
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import (
    Admit,
    Release,
    SampledId,
    SamplerOutput,
    SamplingParams,
    Volume,
)
from tests.support.request_states import make_state


class LastComeFirstServed(SchedulingPolicy):
    """The latest arrival goes first, and the earliest is preempted."""

    def __init__(self) -> None:
        self._places: dict[RequestState, int] = {}
        self._arrivals = 0
        self.heard: list[tuple[object, ...]] = []

    def on_arrived(self, state: RequestState, now: float) -> None:
        self._places[state] = self._arrivals
        self._arrivals += 1
        self.heard.append(("arrived", state.key, now))

    def on_issued(self, state: RequestState, now: float) -> None:
        self.heard.append(("issued", state.key, now))

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        self.heard.append(("ran", state.key, seconds, now))

    def on_removed(self, state: RequestState, now: float) -> None:
        del self._places[state]
        self.heard.append(("over", state.key, now))

    def choose_admitted(self, waiting: Sequence[RequestState], now: float) -> RequestState | None:
        return max(waiting, key=self._places.__getitem__)

    def order_running(self, states: Sequence[RequestState], now: float) -> Sequence[RequestState]:
        return sorted(states, key=self._places.__getitem__, reverse=True)

    def choose_preempted(
        self, preemptor: RequestState, idle: Sequence[RequestState], num_running: int, now: float
    ) -> RequestState | None:
        earliest = min(idle, key=self._places.__getitem__, default=preemptor)
        behind = self._places[earliest] < self._places[preemptor]
        return earliest if behind else None


def make_scheduler(policy: SchedulingPolicy, **changes: int) -> Scheduler:
    given = {"num_blocks": 64, "block_size": 4, "micro_batches": 1, "max_num_batched_tokens": 64}
    return Scheduler(SchedulerConfig(**{**given, "prefix_cache": False, **changes}), 1, policy)


def submit(
    scheduler: Scheduler, *keys: str, tokens: int = 2, answer: int = 9, now: float = 0.0
) -> None:
    for key in keys:
        prompt = tuple(range(tokens))
        scheduler.submit_request(
            make_state("peer", key, prompt, tokens, answer, SamplingParams()), now
        )


def volumes(batch: MicroBatch | None) -> list[Volume]:
    return [] if batch is None else [volume.header for volume in batch.volumes]


def keys(scheduler: Scheduler, volume: Volume) -> list[str]:
    """Keys of the volume's requests, in order of its rows."""
    requests = [scheduler._queues.get_by_id(rows.request) for rows in volume.slices]
    return [state.key for state in requests if state is not None]


def back(scheduler: Scheduler, volume: Volume, now: float = 0.0) -> None:
    """Return the volume, with a token for each sampled row."""
    sampling = [rows for rows in volume.slices if rows.sample]
    choices = tuple(SampledId(rows.request, rows.start + rows.count, 50) for rows in sampling)
    scheduler.on_sampled(SamplerOutput(volume.seq, choices), {}, now)
    scheduler.validate()


def test_the_policy_orders_admission() -> None:
    scheduler = make_scheduler(LastComeFirstServed(), max_num_seqs=2)
    submit(scheduler, "a", "b", "c")
    (prefill,) = volumes(scheduler.next_batch(0.0))
    assert keys(scheduler, prefill) == ["c", "b"]


def test_the_policy_may_leave_a_slot_free() -> None:
    class Closed(LastComeFirstServed):
        def choose_admitted(
            self, waiting: Sequence[RequestState], now: float
        ) -> RequestState | None:
            return None

    scheduler = make_scheduler(Closed())
    submit(scheduler, "a")
    assert scheduler.next_batch(0.0) is None


def test_the_policy_orders_decoding() -> None:
    scheduler = make_scheduler(LastComeFirstServed())
    submit(scheduler, "a")
    back(scheduler, volumes(scheduler.next_batch(0.0))[0])
    submit(scheduler, "b", "c")
    decode, prefill = volumes(scheduler.next_batch(0.0))
    assert keys(scheduler, prefill) == ["c", "b"]
    back(scheduler, prefill)
    back(scheduler, decode)  # "a" returns last, and still runs last
    (decode,) = volumes(scheduler.next_batch(0.0))
    assert keys(scheduler, decode) == ["c", "b", "a"]


def test_the_policy_orders_prefills() -> None:
    scheduler = make_scheduler(LastComeFirstServed(), max_num_batched_tokens=4, micro_batches=4)
    submit(scheduler, "long", tokens=12)
    (first,) = volumes(scheduler.next_batch(0.0))
    submit(scheduler, "new", tokens=6)
    (second,), (third,) = volumes(scheduler.next_batch(0.0)), volumes(scheduler.next_batch(0.0))
    # A waiting request that precedes the admitted ones is admitted before they continue.
    assert [keys(scheduler, first), keys(scheduler, second)] == [["long"], ["new"]]
    assert keys(scheduler, third) == ["new", "long"]
    submit(scheduler, "newer", tokens=6)
    (fourth,) = volumes(scheduler.next_batch(0.0))
    assert keys(scheduler, fourth) == ["newer"]


def test_the_policy_selects_the_preempted_request() -> None:
    """Two decode with a full block each, and one block is free: the earlier one is preempted."""
    scheduler = make_scheduler(LastComeFirstServed(), num_blocks=3, block_size=16)
    submit(scheduler, "old", "young", tokens=15, answer=34)
    back(scheduler, volumes(scheduler.next_batch(0.0))[0])
    back(scheduler, volumes(scheduler.next_batch(0.0))[0])
    released = []
    while not released:
        batch = scheduler.next_batch(0.0)
        scheduler.validate()
        assert batch is not None
        for volume in volumes(batch):
            back(scheduler, volume)
        released = [each.body for each in batch.controls if isinstance(each.body, Release)]
    old = scheduler._queues.find_request("peer", "old")
    assert old is not None
    assert (old.phase, old.num_admissions) == ("waiting", 1)
    assert scheduler.collect_stats()[0]["scheduler_preemptions_total"] == 1.0
    # With the block of "old", "young" finishes; then "old" does.
    seq = released[0].seq
    scheduler.on_released(seq, 0.0)
    while scheduler.live_requests:
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        for volume in volumes(batch):
            back(scheduler, volume)
        for each in batch.controls:
            if isinstance(each.body, Release):
                scheduler.on_released(each.body.seq, 0.0)
    assert old.num_admissions == 2
    assert old.num_generated == 34


def test_idle_requests_can_be_preempted_for_waiting_ones() -> None:
    """It is preempted before it enters another volume."""
    scheduler = make_scheduler(LastComeFirstServed(), max_num_seqs=1)
    submit(scheduler, "a")
    back(scheduler, volumes(scheduler.next_batch(0.0))[0])
    submit(scheduler, "b")
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    release, admit = (each.body for each in batch.controls)
    assert release == Release(3, 0, after_seq=2)
    assert isinstance(admit, Admit)
    (prefill,) = volumes(batch)
    assert keys(scheduler, prefill) == ["b"]


def test_the_policy_receives_all_events() -> None:
    policy = LastComeFirstServed()
    scheduler = make_scheduler(policy)
    submit(scheduler, "a", answer=2, now=1.0)
    submit(scheduler, "b", now=2.0)
    (prefill,) = volumes(scheduler.next_batch(3.0))
    back(scheduler, prefill, now=3.5)
    (decode,) = volumes(scheduler.next_batch(4.0))
    scheduler.cancel_request("peer", "b", 4.25)
    back(scheduler, decode, now=4.5)
    assert policy.heard == [
        ("arrived", "a", 1.0),
        ("arrived", "b", 2.0),
        ("issued", "b", 3.0),
        ("issued", "a", 3.0),
        ("ran", "b", 0.5, 3.5),
        ("ran", "a", 0.5, 3.5),
        ("issued", "b", 4.0),
        ("issued", "a", 4.0),
        ("over", "b", 4.25),
        ("ran", "a", 0.5, 4.5),
        ("over", "a", 4.5),
    ]


def test_requests_with_rows_in_a_volume_cannot_be_preempted() -> None:
    class Careless(LastComeFirstServed):
        def choose_preempted(
            self,
            preemptor: RequestState,
            idle: Sequence[RequestState],
            num_running: int,
            now: float,
        ) -> RequestState | None:
            return next(state for state in self._places if state.phase != "waiting")

    scheduler = make_scheduler(Careless(), max_num_seqs=1)
    submit(scheduler, "a", "b")
    scheduler.next_batch(0.0)
    with pytest.raises(InvariantError, match="the policy preempts b, which is not a candidate"):
        scheduler.next_batch(0.0)
