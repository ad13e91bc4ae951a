"""Swapping to host memory and back: exact decisions without a ring."""

import pytest

from molink.errors import InvariantError
from molink.facts.profile import Profile
from molink.facts.ring_times import RingTimes
from molink.facts.settings import PreemptionMode
from molink.scheduler.batch import MicroBatch
from molink.scheduler.blocks import HostBlockAllocator, HostCopy
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.create import create_scheduling_policy
from molink.scheduler.policies.mlfq import Mlfq
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Release,
    SampledId,
    SamplerOutput,
    SamplingParams,
    SwapIn,
    SwapOut,
)
from tests.support.request_states import arrived, make_state

#: A round trip takes 10 ms, and so do 16 prompt rows.
STAGE = Profile(decode=((1, 0.01), (8, 0.01)), prefill=((16, 0.01), (64, 0.04)))


def make_scheduler(
    mode: PreemptionMode, blocks: int = 10, host: int = 16, policy: str = "fcfs", **changes: int
) -> Scheduler:
    config = SchedulerConfig(
        blocks,
        4,
        1,
        max_num_batched_tokens=64,
        prefix_cache=False,
        profiles=(STAGE,),
        preemption_mode=mode,
        **changes,
    )
    scheduler = Scheduler(config, 1, create_scheduling_policy(policy))
    scheduler.set_host_memory(host, 1e-5)
    return scheduler


def submit(scheduler: Scheduler, key: str, tokens: int, now: float = 0.0, answer: int = 25) -> None:
    prompt = tuple(range(tokens))
    scheduler.submit_request(
        make_state("d", key, prompt, tokens, answer, SamplingParams(), (), 1 << 16), now
    )


def go_round(scheduler: Scheduler, now: float) -> MicroBatch | None:
    """Run one micro-batch to its end."""
    batch = scheduler.next_batch(now)
    if batch is None:
        return None
    for volume in batch.volumes:
        header = volume.header
        choices = [
            SampledId(rows.request, rows.start + rows.count, 9)
            for rows in header.slices
            if rows.sample
        ]
        scheduler.on_sampled(SamplerOutput(header.seq, tuple(choices)), {}, now + 0.005)
    for control in batch.controls:
        if isinstance(control.body, Release):
            scheduler.on_released(control.body.seq, now + 0.005)
    scheduler.validate()
    return batch


def bodies(batch: MicroBatch | None) -> list[object]:
    return [] if batch is None else [control.body for control in batch.controls]


def until_swap(scheduler: Scheduler, kind: type, now: float = 0.0) -> tuple[MicroBatch, float]:
    for _ in range(200):
        batch = go_round(scheduler, now)
        now += 0.01
        if batch is not None and any(isinstance(each, kind) for each in bodies(batch)):
            return batch, now
    raise AssertionError("nothing was swapped")


def test_a_swapped_request_resumes_without_recomputation() -> None:
    scheduler = make_scheduler("reactive-swap")
    submit(scheduler, "old", 10)
    submit(scheduler, "young", 7)
    batch, now = until_swap(scheduler, SwapOut)
    out, release = bodies(batch)
    assert isinstance(out, SwapOut)
    assert isinstance(release, Release)
    assert (release.request, release.after_seq) == (out.request, out.seq)
    young = scheduler._queues.find_request("d", "young")
    assert young is not None
    assert young.host_copy is not None
    known = young.host_copy.num_tokens
    assert known == len(young.tokens) - 1
    ids = batch.controls[0].ids
    assert ids is not None
    assert (len(ids), ids[len(ids) // 2 :]) == (
        2 * len(young.host_copy.blocks),
        young.host_copy.blocks,
    )
    hosts, rows_before = (
        young.host_copy.blocks,
        scheduler.collect_stats()[0]["scheduler_prefill_rows_total"],
    )
    batch, _ = until_swap(scheduler, SwapIn, now)
    order = next(each for each in bodies(batch) if isinstance(each, SwapIn))
    assert [type(each) for each in bodies(batch) if not isinstance(each, Release)] == [
        Admit,
        BlockTable,
        SwapIn,
    ]
    assert order.swap_out_seq == out.seq
    ids = batch.controls[-1].ids
    assert ids is not None
    assert tuple(ids[len(ids) // 2 :]) == hosts
    # It resumes with one decode row in the same micro-batch.
    (volume,) = (each.header for each in batch.volumes)
    assert [(rows.start, rows.count) for rows in volume.slices] == [(known, 1)]
    assert not volume.prefill
    assert volume.slices[0].after_seq >= order.seq
    counters, gauges = scheduler.collect_stats()
    assert counters["scheduler_prefill_rows_total"] == rows_before
    assert gauges["scheduler_host_blocks_used"] == gauges["scheduler_swapped"] == 0
    assert counters["scheduler_swaps_out_total"] == counters["scheduler_swaps_in_total"] == 1


@pytest.mark.parametrize(
    ("mode", "host"), [("reactive-swap", 1), ("reactive-swap", 0), ("recompute", 16)]
)
def test_preemption_without_host_memory_recomputes(mode: PreemptionMode, host: int) -> None:
    scheduler = make_scheduler(mode, host=host)
    submit(scheduler, "old", 10)
    submit(scheduler, "young", 7)
    batch, now = until_swap(scheduler, Release)
    assert not any(isinstance(each, SwapOut) for each in bodies(batch))
    counters, _ = scheduler.collect_stats()
    assert counters["scheduler_preemptions_total"] == 1
    assert counters["scheduler_swap_fallbacks_total"] == (mode != "recompute")
    assert scheduler.report_load("p", now).swap_fallbacks == (mode != "recompute")
    rows = counters["scheduler_prefill_rows_total"]
    for round_trip in range(40):
        go_round(scheduler, now + 0.01 * round_trip)
    assert scheduler.collect_stats()[0]["scheduler_prefill_rows_total"] > rows + 7


def test_the_load_report_has_queues_and_the_first_resume() -> None:
    scheduler = make_scheduler("reactive-swap", policy="skip-join-mlfq")
    assert scheduler.report_load("p", 0.0).queues == ()
    submit(scheduler, "old", 10)
    submit(scheduler, "young", 7)
    _, now = until_swap(scheduler, SwapOut)
    for key, level in (("old", 0), ("young", 2)):
        place = scheduler._queues.policy._positions[scheduler._queues.find_request("d", key)]
        place.level = place.home_level = level
    load, (_, gauges) = scheduler.report_load("p", now), scheduler.collect_stats()
    assert sum(load.queues) == load.running + load.waiting == 2
    assert load.queues == tuple(gauges[f"scheduler_queue_{n + 1}"] for n in range(len(load.queues)))
    assert load.queues[-1]
    # Metrics show the values of the last load report.
    (swapped,) = (each for each in load.requests if each.state == "swapped")
    assert swapped.resume_ms > 0
    assert scheduler.collect_stats()[1]["scheduler_swapped_resume_seconds"] == pytest.approx(
        swapped.resume_ms / 1000, abs=0.001
    )


def test_a_cancel_frees_the_host_copy() -> None:
    scheduler = make_scheduler("reactive-swap")
    submit(scheduler, "old", 10)
    submit(scheduler, "young", 7)
    _, now = until_swap(scheduler, SwapOut)
    assert scheduler.collect_stats()[1]["scheduler_swapped"] == 1
    # Its peer would resubmit it in a new epoch.
    assert ("d", "young") in scheduler.live_requests
    scheduler.cancel_request("d", "young", now)
    scheduler.validate()
    assert scheduler.collect_stats()[1]["scheduler_host_blocks_used"] == 0


@pytest.mark.parametrize("mode", ["reactive-swap", "proactive-swap"])
def test_proactive_swapping_frees_blocks_in_advance(mode: PreemptionMode) -> None:
    """No request waits, but many are expected: the one scheduled last is swapped out."""
    scheduler = make_scheduler(mode, blocks=50, host=100, policy="skip-join-mlfq")
    submit(scheduler, "long", 100)
    go_round(scheduler, 0.0)
    go_round(scheduler, 0.01)
    for round_trip in range(9):
        go_round(scheduler, 0.03 + 0.01 * round_trip)
    submit(scheduler, "next", 52, 0.14)
    go_round(scheduler, 0.14)
    go_round(scheduler, 0.15)
    gone = {state.key for state in scheduler._queues if state.host_copy is not None}
    assert gone == ({"long"} if mode == "proactive-swap" else set())
    assert scheduler.collect_stats()[0]["scheduler_preemptions_total"] == len(gone)


def in_queues(scheduler: Scheduler, levels: dict[str, int]) -> None:
    """Put each request permanently into the queue of the given level."""
    policy = scheduler._queues.policy
    for key, level in levels.items():
        place = policy._positions[scheduler._queues.find_request("d", key)]
        place.level = place.home_level = level


def test_the_latest_scheduled_is_swapped_out_first_and_the_next_resumes_first() -> None:
    """Ordered by ENST (FastServe's estimated next scheduled time), not by arrival."""
    scheduler = make_scheduler("proactive-swap", blocks=40, host=100, policy="skip-join-mlfq")
    levels = {"a": 9, "b": 11, "c": 10}
    for key in levels:
        submit(scheduler, key, 12, answer=60)
    while any(state.phase != "decode" for state in scheduler._queues):
        go_round(scheduler, 0.0)
    in_queues(scheduler, levels)
    later = [state.key for state in scheduler._queues.latest_scheduled(0.05)]
    assert later[:2] == ["b", "c"]
    for key in ("c", "b", "a"):
        state = scheduler._queues.find_request("d", key)
        assert state is not None
        scheduler._batcher._preempt(state)
    in_queues(scheduler, levels)
    scheduled = scheduler._queues.estimate_swapped(0.05)
    assert len(scheduled) == 3
    assert sorted(scheduled, key=scheduled.__getitem__) != list(scheduled)
    first = scheduler._queues.next_swapped(0.05)
    assert first is not None
    assert first.key == "a"


def test_cheap_recomputation_avoids_the_copy() -> None:
    """Copies take seconds, and recomputation tens of milliseconds."""
    scheduler = Scheduler(
        SchedulerConfig(
            10, 4, 1, 64, prefix_cache=False, profiles=(STAGE,), preemption_mode="reactive-swap"
        ),
        1,
    )
    scheduler.set_host_memory(16, 1.0)
    submit(scheduler, "old", 10)
    submit(scheduler, "young", 7)
    batch, _ = until_swap(scheduler, Release)
    assert not any(isinstance(each, SwapOut) for each in bodies(batch))
    counters, _ = scheduler.collect_stats()
    assert (
        counters["scheduler_preemptions_total"],
        counters["scheduler_swap_fallbacks_total"],
    ) == (1, 0)


def test_policies_know_the_restore_cost() -> None:
    scheduler = make_scheduler("reactive-swap", blocks=40, host=5)
    told = scheduler._swap._restore_s
    submit(scheduler, "fits", 17, answer=9)
    submit(scheduler, "long", 24, answer=9)
    submit(scheduler, "waits", 16, answer=9)
    fits, long, waits = (
        scheduler._queues.find_request("d", key) for key in ("fits", "long", "waits")
    )
    go_round(scheduler, 0.0)
    scheduler._queues.preempt_request(waits)
    assert [told(state) for state in (fits, long, waits)] == [10 * 1e-5, None, None]
    scheduler._batcher._preempt(fits)
    assert told(fits) == 10 * 1e-5
    scheduler._swap._block_s = 1.0
    assert told(scheduler._queues.find_request("d", "long")) is None


def test_early_resumed_requests_wait_for_a_later_micro_batch() -> None:
    scheduler = make_scheduler("proactive-swap")
    submit(scheduler, "old", 10)
    submit(scheduler, "young", 7)
    _, now = until_swap(scheduler, SwapOut)
    batch, now = until_swap(scheduler, SwapIn, now)
    order = next(each for each in bodies(batch) if isinstance(each, SwapIn))
    issued = [rows.request for volume in batch.volumes for rows in volume.header.slices]
    assert order.request not in issued
    batch = go_round(scheduler, now)
    assert batch is not None
    assert [rows.request for rows in batch.volumes[0].header.slices] == [order.request]


def test_the_next_scheduled_time_matches_the_paper() -> None:
    """``(1 / B) * sum of the remaining quanta of requests ahead``, or until promotion."""
    policy = Mlfq(alpha=0.3)
    policy.set_times(RingTimes((STAGE,), (), 0))  # quanta: 10, 20, 40 ms …
    requests = []
    for number, level in enumerate([0, 0, 1, 3]):
        state = arrived(make_state("d", str(number), (1,), 1, 1, SamplingParams()), 0.0)
        policy.on_arrived(state, 0.0)
        policy._positions[state].level = policy._positions[state].home_level = level
        requests.append(state)
    scheduled = policy.estimate_next_scheduled(requests, 2, 0.0)
    first, last = (10 + 10) / 2, (2 * (10 + 20 + 40) + (20 + 40)) / 2
    assert [scheduled[state] for state in requests] == pytest.approx(
        [0.0, 0.0, first / 1000, last / 1000], abs=1e-9
    )
    # An earlier promotion counts: 16 quanta of 80 ms after it became idle.
    assert policy.estimate_next_scheduled(requests[3:], 1, 1.2)[requests[3]] == pytest.approx(0.08)


def test_validation_finds_misplaced_host_blocks() -> None:
    host = HostBlockAllocator()
    assert host.allocate_blocks(1) is None
    host.set_total(3)
    host.set_total(9)  # only the first call counts
    held = host.allocate_blocks(2)
    assert held == (0, 1)
    assert host.allocate_blocks(2) is None
    host.validate([HostCopy(held, 1)])
    with pytest.raises(InvariantError, match="not those of the copies"):
        host.validate([])
    host.free_blocks(held)
    with pytest.raises(InvariantError, match="not allocated"):
        host.free_blocks((1,))
    assert host.num_held == 0
