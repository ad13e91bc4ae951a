"""The scheduler as an extension point: another policy, and what the head does of it."""

from collections.abc import Collection, Sequence

import pytest

from molink.errors import InvariantError
from molink.scheduler.batch import MicroBatch
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.base import PreemptionDecision, SchedulingPolicy
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
    """The latest arrival goes first, and the earliest one gives way."""

    def __init__(self) -> None:
        self._places: dict[RequestState, int] = {}
        self._arrivals = 0
        self.heard: list[tuple[object, ...]] = []

    def on_arrived(self, job: RequestState, now: float) -> None:
        self._places[job] = self._arrivals
        self._arrivals += 1
        self.heard.append(("arrived", job.key, now))

    def on_issued(self, job: RequestState, now: float) -> None:
        self.heard.append(("issued", job.key, now))

    def on_rows_returned(self, job: RequestState, seconds: float, now: float) -> None:
        self.heard.append(("ran", job.key, seconds, now))

    def on_removed(self, job: RequestState, now: float) -> None:
        del self._places[job]
        self.heard.append(("over", job.key, now))

    def choose_admitted(
        self, waiting: Sequence[RequestState], admitted: Collection[RequestState], now: float
    ) -> RequestState | None:
        return max(waiting, key=self._places.__getitem__)

    def order_running(self, jobs: Sequence[RequestState], now: float) -> Sequence[RequestState]:
        return sorted(jobs, key=self._places.__getitem__, reverse=True)

    def choose_preempted(
        self,
        needy: RequestState,
        at_rest: Sequence[RequestState],
        admitted: Collection[RequestState],
        now: float,
    ) -> PreemptionDecision | None:
        earliest = min(at_rest, key=self._places.__getitem__, default=needy)
        behind = self._places[earliest] < self._places[needy]
        return PreemptionDecision(earliest) if behind else None


def make_head(policy: SchedulingPolicy, **changes: int) -> Scheduler:
    given = {"num_blocks": 64, "block_size": 4, "micro_batches": 1, "max_num_batched_tokens": 64}
    return Scheduler(SchedulerConfig(**{**given, "prefix_cache": False, **changes}), 1, policy)


def submit(head: Scheduler, *keys: str, tokens: int = 2, answer: int = 9, now: float = 0.0) -> None:
    for key in keys:
        prompt = tuple(range(tokens))
        head.submit_request(
            make_state("daemon", key, prompt, tokens, answer, SamplingParams()), now
        )


def volumes(batch: MicroBatch | None) -> list[Volume]:
    return [] if batch is None else [volume.header for volume in batch.volumes]


def keys(head: Scheduler, volume: Volume) -> list[str]:
    """Whose rows are in it, in order."""
    requests = [head._queues.get_by_id(rows.request) for rows in volume.slices]
    return [state.key for state in requests if state is not None]


def back(head: Scheduler, volume: Volume, now: float = 0.0) -> None:
    """It has gone round, and each sampling row got a token."""
    sampling = [rows for rows in volume.slices if rows.sample]
    choices = tuple(SampledId(rows.request, rows.start + rows.count, 50) for rows in sampling)
    head.on_sampled(SamplerOutput(volume.seq, choices), {}, now)
    head.validate()


def test_the_policy_orders_admission() -> None:
    head = make_head(LastComeFirstServed(), max_num_seqs=2)
    submit(head, "a", "b", "c")
    (prefill,) = volumes(head.next_batch(0.0))
    assert keys(head, prefill) == ["c", "b"]


def test_the_policy_may_leave_a_slot_free() -> None:
    class Closed(LastComeFirstServed):
        def choose_admitted(
            self, waiting: Sequence[RequestState], admitted: Collection[RequestState], now: float
        ) -> RequestState | None:
            return None

    head = make_head(Closed())
    submit(head, "a")
    assert head.next_batch(0.0) is None


def test_the_policy_orders_decoding() -> None:
    head = make_head(LastComeFirstServed())
    submit(head, "a")
    back(head, volumes(head.next_batch(0.0))[0])
    submit(head, "b", "c")
    decode, prefill = volumes(head.next_batch(0.0))
    assert keys(head, prefill) == ["c", "b"]
    back(head, prefill)
    back(head, decode)  # "a" is the last to come back, and still runs last
    (decode,) = volumes(head.next_batch(0.0))
    assert keys(head, decode) == ["c", "b", "a"]


def test_the_policy_orders_prefills() -> None:
    head = make_head(LastComeFirstServed(), max_num_batched_tokens=4, micro_batches=4)
    submit(head, "long", tokens=12)
    (first,) = volumes(head.next_batch(0.0))
    submit(head, "new", tokens=6)
    (second,), (third,) = volumes(head.next_batch(0.0)), volumes(head.next_batch(0.0))
    # Who waits and comes before those that are admitted is admitted before they go on.
    assert [keys(head, first), keys(head, second)] == [["long"], ["new"]]
    assert keys(head, third) == ["new", "long"]
    submit(head, "newer", tokens=6)
    (fourth,) = volumes(head.next_batch(0.0))
    assert keys(head, fourth) == ["newer"]


def test_the_policy_selects_the_preempted_request() -> None:
    """Two decode with a full block each, and one block is free: the earlier one gives way."""
    head = make_head(LastComeFirstServed(), num_blocks=3, block_size=16)
    submit(head, "old", "young", tokens=15, answer=34)
    back(head, volumes(head.next_batch(0.0))[0])
    back(head, volumes(head.next_batch(0.0))[0])
    released = []
    while not released:
        batch = head.next_batch(0.0)
        head.validate()
        assert batch is not None
        for volume in volumes(batch):
            back(head, volume)
        released = [each.body for each in batch.controls if isinstance(each.body, Release)]
    old = head._queues.find_request("daemon", "old")
    assert old is not None
    assert (old.phase, old.num_admissions) == ("waiting", 1)
    assert head.collect_stats()[0]["scheduler_preemptions_total"] == 1.0
    # With the block that "old" had, "young" goes on to its end; then "old" does.
    seq = released[0].seq
    head.on_released(seq, 0.0)
    while head.live_requests:
        batch = head.next_batch(0.0)
        assert batch is not None
        for volume in volumes(batch):
            back(head, volume)
        for each in batch.controls:
            if isinstance(each.body, Release):
                head.on_released(each.body.seq, 0.0)
    assert old.num_admissions == 2
    assert old.num_generated == 34


def test_idle_requests_can_be_preempted_for_waiting_ones() -> None:
    """Before it goes into a volume again."""
    head = make_head(LastComeFirstServed(), max_num_seqs=1)
    submit(head, "a")
    back(head, volumes(head.next_batch(0.0))[0])
    submit(head, "b")
    batch = head.next_batch(0.0)
    assert batch is not None
    release, admit = (each.body for each in batch.controls)
    assert release == Release(3, 0, after_seq=2)
    assert isinstance(admit, Admit)
    (prefill,) = volumes(batch)
    assert keys(head, prefill) == ["b"]


def test_the_policy_receives_all_events() -> None:
    policy = LastComeFirstServed()
    head = make_head(policy)
    submit(head, "a", answer=2, now=1.0)
    submit(head, "b", now=2.0)
    (prefill,) = volumes(head.next_batch(3.0))
    back(head, prefill, now=3.5)
    (decode,) = volumes(head.next_batch(4.0))
    head.cancel_request("daemon", "b", 4.25)
    back(head, decode, now=4.5)
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
            needy: RequestState,
            at_rest: Sequence[RequestState],
            admitted: Collection[RequestState],
            now: float,
        ) -> PreemptionDecision | None:
            return PreemptionDecision(next(iter(admitted)))

    head = make_head(Careless(), max_num_seqs=1)
    submit(head, "a", "b")
    head.next_batch(0.0)
    with pytest.raises(InvariantError, match="the policy preempts b, which is no candidate"):
        head.next_batch(0.0)
