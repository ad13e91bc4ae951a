"""The ring's shell, with a stage that computes nothing and a link that carries nothing."""

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from molink.facts.profile import Profile
from molink.link.policies.base import DecodeFinishedEvent, DecodeStartedEvent
from molink.ring.ring import Ring, RingConfig
from molink.ring.scheduler_bridge import MAX_POOLED, SchedulerBridge
from molink.ring.stage import StageShape
from molink.ring.step import StepOutput, StepResult
from molink.ring.step_monitor import MAX_FAILED_STEPS, SLACK
from molink.ring.sub_chunks import create_sub_chunk_policy
from molink.scheduler.batch import ControlWithPayload, MicroBatch, VolumeWithTokens
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Grammar,
    History,
    PooledRow,
    Release,
    RequestSlice,
    SampledId,
    SamplerOutput,
    SamplingParams,
    Tombstone,
    TopLogprobs,
    Volume,
    VolumeFragment,
)
from molinkd.worker.request_table import RequestTable

PROFILE = Profile(decode=((1, 0.25),), prefill=((16, 0.5),))


MIDDLE_STAGE = StageShape(1, 3, hidden=2, vocabulary=100, wire_dtype="f32")
LAST_STAGE = replace(MIDDLE_STAGE, index=2)


class ScriptedExecutor:
    """Ends steps when the test says so."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Callable[[StepResult], None]]] = []

    def submit_step(self, step_inputs: Any, done: Callable[[StepResult], None]) -> None:
        self.steps.append((step_inputs, done))

    def end(
        self,
        seconds: float = 0.5,
        error: str | None = None,
        out_of_memory: bool = False,
        which: int = 0,
    ) -> None:
        step_inputs, done = self.steps.pop(which)
        results = [self.result(each.volume) for each in step_inputs]
        done(StepResult(results, seconds, error, out_of_memory))

    def result(self, volume: Volume) -> StepOutput:
        return StepOutput(volume, bytearray(8), None)


class SamplingExecutor(ScriptedExecutor):
    """Samples token 7 for every sampled slice, except for failed requests."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: tuple[int, ...] = ()

    def result(self, volume: Volume) -> StepOutput:
        ends = [(rows.request, rows.start + rows.count) for rows in volume.slices if rows.sample]
        choices = tuple(SampledId(each, end, 7) for each, end in ends if each not in self.failed)
        tops = tuple(TopLogprobs(each.request, each.position, (7,), (0.0,)) for each in choices)
        failed = tuple(rows.request for rows in volume.slices if rows.request in self.failed)
        return StepOutput(volume, None, SamplerOutput(volume.seq, choices, failed), tops)


class RecordingOutlet:
    """Records what is sent; the test sets ``is_full`` and ``error``."""

    def __init__(self) -> None:
        self.is_full = False
        self.error: Exception | None = None
        self.sent: list[Any] = []
        self.events: list[Any] = []

    def send_control(self, body: Any, payload: Any = None) -> None:
        self.sent.append(body)

    def send_volume(self, header: Volume, rows: Any) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(header)

    def send_more_rows(self, seq: int, rows: Any) -> None:
        self.sent.append(("more", seq))

    def handle_event(self, event: Any) -> None:
        self.events.append(event)


def make_ring(
    executor: Any,
    scheduler: Any,
    receiver: Any,
    on_broken: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    cut_through: bool = True,
    profile: Profile = PROFILE,
) -> Ring:
    policy = create_sub_chunk_policy(profile, cut_through=cut_through, forwards=True)
    config = RingConfig(MIDDLE_STAGE, profile, sub_chunk_policy=policy)
    bridge = (
        None if scheduler is None else SchedulerBridge(scheduler, receiver, MIDDLE_STAGE.vocabulary)
    )
    return Ring(config, RequestTable(), executor, bridge, clock, on_broken)


class Bench:
    """The shell of a ring's middle stage, with fakes around it."""

    def __init__(
        self, executor: ScriptedExecutor | None = None, profile: Profile = PROFILE
    ) -> None:
        self.executor = executor or ScriptedExecutor()
        self.outlet = RecordingOutlet()
        self.broken: list[str] = []
        self.ring = make_ring(self.executor, None, None, self.broken.append, profile=profile)
        self.ring.open(self.outlet)
        self.ring.on_message(Admit(1, 0, SamplingParams(), 4), None)

    def volume(
        self,
        seq: int,
        after: int,
        prefill: bool = False,
        count: int = 1,
        request: int = 0,
        interleaved: bool = True,
    ) -> Volume:
        rows = RequestSlice(request, 4, count, after, (seq,))
        return Volume(seq, prefill, (rows,), Payload("f32", (count, 2)), prefill and interleaved)

    def stranger(self, seq: int) -> None:
        """Prefill rows of a request that was never admitted."""
        volume = Volume(seq, True, (RequestSlice(7, 0, 1, 1, (seq,)),), Payload("f32", (1, 2)))
        self.ring.on_message(volume, bytearray(8))

    def arrive(self, seq: int, after: int, **options: Any) -> None:
        volume = self.volume(seq, after, **options)
        self.ring.on_message(volume, bytearray(volume.payload.nbytes))

    async def end(self, **options: Any) -> None:
        self.executor.end(**options)
        await asyncio.sleep(0)


def states(bench: Bench) -> RequestTable:
    requests = bench.ring._requests
    assert isinstance(requests, RequestTable)
    return requests


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_sub_chunks_follow_the_busy_share() -> None:
    now, executor = [0.0], ScriptedExecutor()
    policy = create_sub_chunk_policy(PROFILE, cut_through=True, forwards=True)
    config = RingConfig(MIDDLE_STAGE, PROFILE, sub_chunk_policy=policy)
    ring = Ring(config, RequestTable(), executor, None, lambda: now[0], print)
    ring.open(RecordingOutlet())
    ring.on_message(Admit(1, 0, SamplingParams(), 4), None)
    rows = RequestSlice(0, 4, 1, 1, (2,))
    ring.on_message(Volume(2, False, (rows,), Payload("f32", (1, 2))), bytearray(8))
    assert policy.busy_share == 0.0
    now[0] = 6.0
    executor.end()
    await asyncio.sleep(0)
    assert policy.busy_share == 1.0


async def test_volume_runs_and_the_policy_is_told(bench: Bench) -> None:
    bench.arrive(2, 1)
    (((step_input,), _),) = bench.executor.steps
    assert step_input.volume.seq == 2
    await bench.end()
    assert [body.seq for body in bench.outlet.sent] == [1, 2]
    assert bench.outlet.sent[1].payload == Payload("f32", (1, 2))
    assert bench.outlet.events == [DecodeStartedEvent(1, 0.25), DecodeFinishedEvent(1)]
    assert bench.ring.progress.completed_seq == 2


async def test_progress_has_the_predicted_time_of_a_running_step(bench: Bench) -> None:
    assert bench.ring.progress.predicted_s == 0
    bench.arrive(2, 1, prefill=True, count=8)
    assert bench.ring.progress.predicted_s == SLACK * 0.5
    assert bench.ring.progress.num_queued == 1
    await bench.end(seconds=1.0)
    assert bench.ring.progress.predicted_s == 0
    bench.arrive(3, 2)
    assert bench.ring.progress.predicted_s == pytest.approx(SLACK * 0.25 * 1.1)


def running_seqs(bench: Bench) -> list[list[int]]:
    return [[each.volume.seq for each in inputs] for inputs, _ in bench.executor.steps]


def sent_volumes(bench: Bench) -> list[int]:
    return [body.seq for body in bench.outlet.sent if isinstance(body, Volume)]


def make_busy_bench(profile: Profile, interleaved: bool = True) -> Bench:
    """A bench with requests 0 to 3 and a running chunk, 5."""
    bench = Bench(profile=profile)
    for request in (1, 2, 3):
        bench.ring.on_message(Admit(1 + request, request, SamplingParams(), 4), None)
    bench.arrive(5, 1, prefill=True, count=8, interleaved=interleaved)
    return bench


#: Decode rows prolong a chunk by a fifth.
CHEAP_DECODES = Profile(decode=((1, 0.1),), prefill=((16, 0.5),), interleaves=True)


@pytest.fixture
async def interleaving() -> Bench:
    return make_busy_bench(CHEAP_DECODES)


@pytest.mark.parametrize(
    ("profile", "interleaved"),
    [
        (PROFILE, True),
        (structs.replace(PROFILE, interleaves=True), True),  # expensive decode rows
        (CHEAP_DECODES, False),
    ],
)
async def test_decode_rows_wait_for_a_chunk_and_share_the_next_pass(
    profile: Profile, interleaved: bool
) -> None:
    bench = make_busy_bench(profile, interleaved)
    bench.arrive(6, 2, request=1)
    bench.arrive(7, 3, request=2, prefill=True, count=8, interleaved=interleaved)
    assert running_seqs(bench) == [[5]]
    await bench.end()
    assert running_seqs(bench) == [[6, 7]]


async def test_decode_rows_run_between_the_layers_of_a_chunk(interleaving: Bench) -> None:
    bench = interleaving
    bench.arrive(6, 2, request=1)
    bench.arrive(7, 3, request=2)
    bench.arrive(8, 4, request=3, prefill=True, count=8)
    assert running_seqs(bench) == [[5], [6]], "one at a time, and no chunk within another"
    assert bench.ring.progress.predicted_s == pytest.approx(SLACK * (0.5 + 0.1))
    await bench.end(which=1, seconds=0.1)
    assert sent_volumes(bench) == [6]
    assert running_seqs(bench) == [[5]], "a chunk is interrupted once"
    await bench.end()
    assert sent_volumes(bench) == [6, 5]
    assert running_seqs(bench) == [[7]], "alone, before the next chunk"
    await bench.end(seconds=0.1)
    assert running_seqs(bench) == [[8]]
    await bench.end()
    assert bench.ring.progress.predicted_s == 0
    assert sent_volumes(bench) == [6, 5, 7, 8]
    bench.ring.scoreboard.validate()


async def test_a_chunk_may_end_before_decode_rows_between_its_layers(interleaving: Bench) -> None:
    interleaving.arrive(6, 2, request=1)
    interleaving.arrive(7, 3, request=2, prefill=True, count=8)
    await interleaving.end()
    assert sent_volumes(interleaving) == [5]
    assert running_seqs(interleaving) == [[6]], "no chunk runs between the layers of decode rows"
    await interleaving.end(seconds=0.1)
    assert running_seqs(interleaving) == [[7]]


async def test_waiting_decode_rows_run_before_a_chunk(interleaving: Bench) -> None:
    interleaving.outlet.is_full = True
    await interleaving.end()
    interleaving.arrive(6, 2, request=1, prefill=True, count=8)
    interleaving.arrive(7, 3, request=2)
    interleaving.outlet.is_full = False
    interleaving.ring.run_pending()
    assert running_seqs(interleaving) == [[7]]
    await interleaving.end()
    assert running_seqs(interleaving) == [[6]]


async def test_an_interleaved_step_that_fails_leaves_the_chunk_alone(interleaving: Bench) -> None:
    interleaving.arrive(6, 2, request=1)
    await interleaving.end(which=1, error="OutOfMemoryError", out_of_memory=True)
    await interleaving.end()
    assert sent_volumes(interleaving) == [6, 5]
    assert interleaving.ring.step_log.num_failed == 1
    assert interleaving.broken == []


async def test_full_link_blocks_steps_until_it_drains(bench: Bench) -> None:
    bench.outlet.is_full = True
    bench.arrive(2, 1)
    assert bench.executor.steps == []
    assert bench.ring.progress.num_queued == 0, "it waits for the link, not for this stage"
    bench.outlet.is_full = False
    bench.ring.run_pending()
    assert len(bench.executor.steps) == 1


async def test_internal_error_ends_the_stage(bench: Bench) -> None:
    bench.arrive(2, 1)
    bench.outlet.error = ValueError("no room")
    await bench.end()
    assert bench.broken == ["ValueError: no room"]
    bench.arrive(3, 1)
    assert bench.executor.steps == [], "nothing is computed any more"


async def test_consecutive_failed_steps_end_the_stage(bench: Bench) -> None:
    for seq in range(2, 2 + MAX_FAILED_STEPS):
        assert bench.broken == []
        bench.arrive(seq, seq - 1)
        await bench.end(error="device lost")
    (reason,) = bench.broken
    assert "device lost" in reason


async def test_large_batches_without_memory_do_not_end_the_stage(bench: Bench) -> None:
    bench.arrive(2, 1)
    await bench.end()
    for seq in range(3, 3 + 2 * MAX_FAILED_STEPS):
        bench.arrive(seq, seq - 1, prefill=True, count=8)
        await bench.end(error="OutOfMemoryError", out_of_memory=True)
    assert bench.broken == []
    assert bench.ring.step_log.num_failed == 2 * MAX_FAILED_STEPS
    # Their rows are forwarded as NaN, so that the last stage reports the requests as failed.
    assert bench.ring.progress.completed_seq == 2 + 2 * MAX_FAILED_STEPS


async def test_small_batches_without_memory_end_the_stage(bench: Bench) -> None:
    bench.arrive(2, 1)
    await bench.end()
    for seq in range(3, 3 + MAX_FAILED_STEPS):
        assert bench.broken == []
        bench.arrive(seq, seq - 1)
        await bench.end(error="OutOfMemoryError", out_of_memory=True)
    assert bench.broken == ["5 consecutive steps failed: OutOfMemoryError"]


async def test_successful_step_resets_failures(bench: Bench) -> None:
    for seq in range(2, 20):
        bench.arrive(seq, seq - 1)
        await bench.end(error=None if seq % 2 else "a hiccup")
    assert bench.broken == []


async def test_step_result_after_the_epoch_is_ignored(bench: Bench) -> None:
    bench.arrive(2, 1)
    bench.ring.close()
    await bench.end()
    assert [body.seq for body in bench.outlet.sent] == [1]


async def test_rows_of_a_finished_request_leave_a_tombstone(bench: Bench) -> None:
    bench.arrive(2, 1)
    release = Release(4, 0, 3, (2,))
    bench.ring.on_message(release, None)
    bench.arrive(3, 2)
    assert bench.outlet.sent[1:] == [Tombstone(3)]
    await bench.end()
    assert [body.seq for body in bench.outlet.sent[1:]] == [3, 2, 4]
    assert not bench.ring.progress.has_requests


async def test_unrunnable_volume_is_forwarded_as_a_tombstone(bench: Bench) -> None:
    bench.stranger(2)
    assert bench.outlet.sent[1:] == [Tombstone(2)]


async def test_volumes_after_unrunnable_rows_are_unblocked(bench: Bench) -> None:
    bench.arrive(3, 2)
    assert not bench.executor.steps
    bench.stranger(2)
    assert len(bench.executor.steps) == 1
    assert bench.outlet.sent[1:] == [Tombstone(2)]
    bench.ring.scoreboard.validate()


@pytest.mark.parametrize("last", [False, True])
async def test_malformed_history_does_not_block_later_messages(bench: Bench, last: bool) -> None:
    bench.ring._shape = bench.ring._controls._shape = LAST_STAGE if last else MIDDLE_STAGE
    history = History(4, 0, 0, Payload("i32", (5,)))
    bench.ring.on_message(History(2, 0, 0, Payload("u8", (3,))), bytearray(b"abc"))
    bench.ring.on_message(History(3, 0, 2**53, Payload("i32", (1,))), bytearray(4))
    bench.ring.on_message(history, bytearray(array("i", [7, 8, 9, 10, 11]).tobytes()))
    known = states(bench)[0].known_tokens.tolist()
    assert known == ([7, 8, 9, 10, 11] if last else [])
    bench.ring.on_message(Release(5, 0, 1), None)
    passed = [Tombstone(2), Tombstone(3), *([] if last else [history]), Release(5, 0, 1)]
    assert bench.outlet.sent[1:] == passed
    assert bench.broken == []
    assert bench.ring.collect_stats()[0]["stage_refused_total"] == 2.0


@pytest.mark.parametrize("last", [False, True])
async def test_block_table_is_applied_and_forwarded(bench: Bench, last: bool) -> None:
    bench.ring._shape = bench.ring._controls._shape = LAST_STAGE if last else MIDDLE_STAGE
    table = BlockTable(2, 0, Payload("i32", (2,)))
    bench.ring.on_message(table, bytearray(array("i", [7, 5]).tobytes()))
    bench.ring.on_message(BlockTable(3, 0, Payload("i32", (2,))), bytearray(4))
    assert list(states(bench)[0].blocks) == [7, 5]
    assert bench.outlet.sent[1:] == [*([] if last else [table]), Tombstone(3)]
    assert bench.broken == []


async def test_alternatives_of_a_finished_request_are_dropped() -> None:
    released: list[int] = []
    scheduler: Any = SimpleNamespace(
        next_batch=lambda _: None, on_released=lambda seq, _: released.append(seq)
    )
    receiver: Any = SimpleNamespace(close=lambda: None)
    ring = make_ring(ScriptedExecutor(), scheduler, receiver, lambda _: None)
    ring.open(RecordingOutlet())
    for request in (3, 4):
        ring.on_message(TopLogprobs(request, 7, (1,), (-0.5,)), None)
    row = PooledRow(3, 8, Payload("f32", (2,)))
    ring.on_message(row, bytearray(8))
    ring.on_message(PooledRow(4, 8, Payload("u8", (8,))), bytearray(8))
    ring.on_message(Release(9, 3, 8), None)
    assert released == [9]
    assert list(ring._bridge._reports) == [(4, 7)]
    for request in range(2 * MAX_POOLED):
        ring.on_message(PooledRow(request, 8, row.payload), bytearray(8))
    assert len(ring._bridge._reports) == MAX_POOLED


# --- sub-chunks ---------------------------------------------------------------------------------


def part(bench: Bench, seq: int, arrived: int) -> None:
    """Deliver rows of a volume; ``arrived`` is how many there are then in all."""
    bench.ring.on_message(VolumeFragment(seq, 1, Payload("f32", (1, 2))), None, arrived)


def running(bench: Bench) -> tuple[int, int, bytes]:
    """Start, count and data of the running rows."""
    (((step_input,), _),) = bench.executor.steps
    (rows,) = step_input.volume.slices
    return rows.start, rows.count, bytes(step_input.data)


async def test_rows_are_forwarded_while_more_arrive(bench: Bench) -> None:
    volume = bench.volume(2, 1, prefill=True, count=50)
    data = bytearray(400)
    bench.ring.on_message(volume, data, 15)
    assert bench.executor.steps == [], "no pass yet"
    data[8 * 15 : 8 * 16] = b"rowrowro"
    part(bench, 2, 16)
    assert running(bench) == (4, 16, bytes(8 * 15) + b"rowrowro")
    part(bench, 2, 40)
    await bench.end()
    assert bench.outlet.sent[1:] == [volume]
    assert bench.outlet.sent[1].payload == Payload("f32", (50, 2)), "all rows are announced"
    assert running(bench)[:2] == (20, 18), "what is left is worth a pass"
    await bench.end()
    assert bench.executor.steps == []
    assert bench.ring.progress.num_queued == 0, "it waits for the link"
    part(bench, 2, 50)
    assert running(bench)[:2] == (38, 16)
    assert bench.ring.progress.completed_seq == 2
    await bench.end()
    assert bench.outlet.sent[2:] == [("more", 2), ("more", 2)]
    assert len(states(bench)[0].blocks) == 0, "the stage would have learnt them"
    assert bench.ring.collect_stats()[0]["stage_steps_total"] == 3
    assert bench.ring.collect_stats()[0]["stage_rows_total"] == 50
    bench.arrive(3, 2)
    assert len(bench.executor.steps) == 1


async def test_release_waits_for_announced_rows(bench: Bench) -> None:
    bench.ring.on_message(bench.volume(2, 1, prefill=True, count=50), bytearray(400), 20)
    await bench.end()
    bench.ring.on_message(Release(3, 0, 2), None)
    part(bench, 2, 50)
    await bench.end()
    assert [type(body) for body in bench.outlet.sent[1:]] == [Volume, tuple, Release]
    assert not bench.ring.progress.has_requests


async def test_failed_sub_chunks_count_separately(bench: Bench) -> None:
    bench.ring.on_message(bench.volume(2, 1, prefill=True, count=500), bytearray(4000), 20)
    for arrived in range(40, 40 + 20 * MAX_FAILED_STEPS, 20):
        assert bench.broken == []
        await bench.end(error="device lost")
        part(bench, 2, arrived)
    (reason,) = bench.broken
    assert "device lost" in reason
    assert bench.ring.step_log.num_failed == MAX_FAILED_STEPS


async def test_stray_fragments_are_counted(bench: Bench) -> None:
    part(bench, 9, 3)
    bench.ring.on_message(VolumeFragment(2, 1, Payload("f32", (1, 2))), None)
    assert bench.ring.collect_stats()[0]["stage_refused_total"] == 1
    assert bench.ring.num_strays == 1
    assert bench.broken == []


async def test_last_stage_reports_a_volume_once() -> None:
    executor = SamplingExecutor()
    bench = Bench(executor)
    bench.ring._shape = bench.ring._controls._shape = LAST_STAGE
    for request in (1, 2):
        bench.ring.on_message(Admit(1 + request, request, SamplingParams(), 4), None)
    slices = tuple(
        RequestSlice(request, 0, 20, request + 1, (request,), sample=request != 2)
        for request in range(3)
    )
    volume = Volume(4, True, slices, Payload("f32", (60, 2)))
    bench.ring.on_message(volume, bytearray(480), 30)
    await bench.end()
    top = TopLogprobs(0, 20, (7,), (0.0,))
    assert bench.outlet.sent[1:] == [top]
    executor.failed = (1,)
    part(bench, 4, 60)
    await bench.end()
    assert bench.outlet.sent[1:] == [top, SamplerOutput(4, (SampledId(0, 20, 7),), (1,))]
    assert bench.ring.progress.completed_seq == 4


async def test_without_cut_through_volumes_are_stored_and_forwarded() -> None:
    bench = Bench()
    bench.ring = make_ring(bench.executor, None, None, bench.broken.append, cut_through=False)
    bench.ring.open(bench.outlet)
    bench.ring.on_message(Admit(1, 0, SamplingParams(), 4), None)
    bench.ring.on_message(bench.volume(2, 1, prefill=True, count=500), bytearray(4000), 499)
    assert bench.executor.steps == []
    part(bench, 2, 500)
    assert running(bench)[:2] == (4, 500)


async def test_decode_rows_run_beside_each_sub_chunk() -> None:
    """Decode rows don't wait for a chunk's last row; the first stage has all rows at once."""
    asked: list[bool] = []

    def next_batch(_: float, *, prefill: bool = True) -> MicroBatch | None:
        asked.append(prefill)
        return batches.pop(0) if batches and prefill == batches[0][0] else None

    def volume(seq: int, prefill: bool, count: int) -> VolumeWithTokens:
        rows = RequestSlice(int(not prefill), 4, count, seq - 2, (seq,), True)
        header = Volume(seq, prefill, (rows,), Payload("i32", (count,)))
        return VolumeWithTokens(header, list(range(count)))

    admits = tuple(ControlWithPayload(Admit(seq, seq - 1, SamplingParams(), 4)) for seq in (1, 2))
    batches: list[Any] = [(True, MicroBatch(admits, (volume(3, True, 200),)))]
    scheduler: Any = SimpleNamespace(
        next_batch=lambda now, *, prefill=True: (next_batch(now, prefill=prefill) or (None, None))[
            1
        ]
    )
    executor, outlet = ScriptedExecutor(), RecordingOutlet()
    ring = make_ring(executor, scheduler, SimpleNamespace(), lambda _: None)
    ring.open(outlet)
    (step_input,) = executor.steps[0][0]
    assert list(step_input.data) == list(range(67))
    batches.append((False, MicroBatch((), (volume(4, False, 1),))))
    ring.run_pending()
    assert len(batches) == 1, "not while a step runs"
    executor.end()
    decode, prefill = executor.steps[0][0]
    assert (decode.volume.seq, prefill.volume.seq) == (4, 3)
    assert list(prefill.data) == list(range(67, 133 + 1))
    executor.end()
    executor.end()
    assert asked[-2:] == [False, True]
    seqs = [body[1] if isinstance(body, tuple) else body.seq for body in outlet.sent]
    assert seqs == [1, 2, 3, 4, 3, 3]


async def test_bubble_time_is_counted() -> None:
    now = [100.0]
    executor = ScriptedExecutor()
    ring = make_ring(executor, None, None, lambda _: None, clock=lambda: now[0])
    ring.open(RecordingOutlet())
    now[0] = 110.0
    ring.on_message(Admit(1, 0, SamplingParams(), 4), None)
    now[0] = 111.0
    ring.on_message(
        Volume(2, False, (RequestSlice(0, 4, 1, 1, (0,)),), Payload("f32", (1, 2))), bytearray(8)
    )
    now[0] = 114.0
    executor.end()
    now[0] = 116.0
    counters, gauges = ring.collect_stats()
    assert counters["stage_bubble_seconds_total"] == 3.0
    assert gauges["stage_bubble_share"] == 0.5


async def test_grammar_is_forwarded_to_the_last_stage(bench: Bench) -> None:
    grammar = Grammar(2, 0, Payload("u8", (3,)))
    bench.ring.on_message(grammar, bytearray(b"abc"))
    assert bench.outlet.sent[1:] == [grammar]
    assert not states(bench)[0].failed
    bench.ring.on_message(Admit(3, 1, SamplingParams(), 4), None)
    bench.ring._shape = bench.ring._controls._shape = LAST_STAGE
    bench.ring.on_message(Grammar(4, 1, Payload("u8", (3,))), bytearray(b"abc"))
    # This stage has no grammar compiler.
    assert states(bench)[1].failed
    assert bench.broken == []
