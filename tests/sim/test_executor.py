"""Simulated executors: the rows, times and results of steps."""

from dataclasses import replace

import pytest

from molink.ring.stage import StageShape
from molink.ring.step import StepInput, StepResult
from molink.sim.event_queue import EventQueue
from molink.sim.executor import SimExecutor, SimStageRequests, step_rows
from molink.sim.pc import SimPc, Uplink
from molink.sim.profiles import DeviceProfile, ModelProfile
from molink.sim.roofline import Roofline, StepRows
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import RequestSlice, Volume

#: 1 MB of weights (5 * 200,000 bytes) and 2 MB of logits at 1 GB/s, and 1 ms per pass.
DEVICE = DeviceProfile("d", "", 1, 1000, 10, 1.0, 1.0, step_ms=1.0)
MODEL = ModelProfile("m", "", 5, 100, 200, 4, 6, 20, vocabulary=10_000)
DECODES = Volume(
    7,
    False,
    (RequestSlice(1, 100, 1, 0, sample=True), RequestSlice(2, 30, 1, 0, sample=True)),
    Payload("i32", (2,)),
)
CHUNK = Volume(
    8,
    True,
    (RequestSlice(3, 10, 4, 0), RequestSlice(4, 0, 3, 0, sample=True)),
    Payload("i32", (7,)),
)


def test_step_rows() -> None:
    # Decode rows read their context. Rows 10 to 13 see 11 + 12 + 13 + 14 tokens, rows 0 to 2 see 1
    # + 2 + 3.
    both = StepRows(decode=2, decode_context=130, prefill=7, prefill_context=56, sampled=3)
    assert step_rows([DECODES, CHUNK], is_last=True) == both
    assert step_rows([CHUNK], is_last=False) == StepRows(prefill=7, prefill_context=56)


def run(*, is_last: bool) -> tuple[SimPc, list[tuple[float, StepResult]]]:
    pc = SimPc(Uplink(1e6, 1000))
    event_queue, ended = EventQueue(), list[tuple[float, StepResult]]()
    executor = SimExecutor(
        event_queue,
        StageShape(1, 2 if is_last else 3, hidden=100, vocabulary=10_000, wire_dtype="bf16"),
        Roofline(DEVICE, MODEL, 5, is_last=is_last),
        memoryview(bytes(7 * 200)),
        pc,
        SimStageRequests(),
    )
    step_inputs = [StepInput(DECODES, b""), StepInput(CHUNK, b"")]
    event_queue.schedule_at(
        2.0, executor.submit_step, step_inputs, lambda done: ended.append((event_queue.now, done))
    )
    event_queue.run(10.0)
    return pc, ended


def test_a_stage_forwards_its_rows() -> None:
    pc, [(at, done)] = run(is_last=False)
    assert at == 2.0 + pc.busy_s == 2.0 + done.seconds
    assert [result.volume for result in done.outputs] == [DECODES, CHUNK]
    # Rows of 100 numbers of 2 bytes.
    assert [len(result.rows or b"") for result in done.outputs] == [400, 1400]
    assert [result.sampled for result in done.outputs] == [None, None]


def test_the_last_stage_samples() -> None:
    _, [(_, done)] = run(is_last=True)
    assert [result.rows for result in done.outputs] == [None, None]
    sampled = [result.sampled for result in done.outputs if result.sampled is not None]
    assert [each.seq for each in sampled] == [7, 8]
    choices = [(one.request, one.position, one.token) for each in sampled for one in each.sampled]
    assert choices == [(1, 101, 0), (2, 31, 0), (4, 3, 0)]


def test_stages_on_one_pc_share_its_device() -> None:
    pc = SimPc(Uplink(1e6, 1000))
    assert pc.reserve_device(2.0, 10.0) == 2.0
    pc.slowdown = 3.0
    assert pc.reserve_device(1.0, 11.0) == 1.0 + 3.0, "after the step in progress"
    assert pc.reserve_device(1.0, 20.0) == 3.0
    assert pc.busy_s == 8.0


def test_a_step_during_a_chunk_runs_between_its_layers() -> None:
    pc, event_queue, ended = SimPc(Uplink(1e6, 1000)), EventQueue(), list[tuple[int, float]]()
    executor = SimExecutor(
        event_queue,
        StageShape(1, 3, hidden=100, vocabulary=10_000, wire_dtype="bf16"),
        Roofline(replace(DEVICE, blocks=True), MODEL, 5, is_last=False),
        memoryview(bytes(7 * 200)),
        pc,
        SimStageRequests(),
    )

    def end(done: StepResult) -> None:
        ended.append((done.outputs[0].volume.seq, event_queue.now))

    event_queue.schedule_at(2.0, executor.submit_step, [StepInput(CHUNK, b"")], end)
    event_queue.run(2.0)
    chunk_s = pc.busy_s
    event_queue.schedule_at(
        2.0 + 0.5 * chunk_s, executor.submit_step, [StepInput(DECODES, b"")], end
    )
    event_queue.run(10.0)
    decode_s = pc.busy_s - chunk_s
    (first, decoded_at), (second, chunk_at) = ended
    assert (first, second) == (7, 8)
    assert decoded_at == pytest.approx(2.0 + 0.6 * chunk_s + decode_s), "after three of five layers"
    assert chunk_at == pytest.approx(2.0 + chunk_s + decode_s)
