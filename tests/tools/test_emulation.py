"""Emulated stages: their times and rows, and a ring of them on real sockets."""

import os
import queue
from pathlib import Path

import msgspec
import pytest

from molink.bench.workload import PlannedRequest
from molink.errors import UsageError
from molink.ring.step import StepInput, StepResult
from molink.sim.roofline import StepRows
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import RequestSlice, Volume
from molink.wire.sockets.key_pair import KeyPair
from tests.support.net import until
from tools.emulation.activations import BUNDLED, Activations, record_rows
from tools.emulation.executor import EmulatedExecutor, sample_tokens
from tools.emulation.load import load_on, run_load
from tools.emulation.model import EmulatedStage, Emulation
from tools.emulation.ring import Host, Member, RingSettings, ring_of

DEVICE = """
source = "a test"
memory_gbs = 1000
tflops = 100
memory_gb = 1
memory_efficiency = 1
compute_efficiency = 1
step_ms = 1
"""
MODEL = """
source = "a test"
layers = 4
hidden = 64
intermediate = 64
heads = 4
kv_heads = 4
head_size = 16
vocabulary = 1000
"""


def volume(prefill: bool, *groups: tuple[int, int]) -> Volume:
    rows = tuple(
        RequestSlice(index, start, count, 0, sample=True)
        for index, (start, count) in enumerate(groups)
    )
    return Volume(7, prefill, rows, Payload("bf16", (1, 8)))


def test_every_sampling_group_gets_token() -> None:
    choices = sample_tokens(volume(False, (4, 1), (9, 1)), 100, {}).sampled
    assert [(each.request, each.position) for each in choices] == [(0, 5), (1, 10)]
    assert all(each.token < 100 for each in choices)


def test_recorded_rows_are_reused_in_order() -> None:
    rows = Activations(bytes(range(8)), 2)
    assert [bytes(rows.rows(count)) for count in (3, 2, 1)] == [
        bytes([0, 1, 2, 3, 4, 5]),
        bytes([6, 7, 0, 1]),
        bytes([2, 3]),
    ]
    assert bytes(rows.rows(6))[8:] == bytes([0, 1, 2, 3])
    with pytest.raises(UsageError, match="not rows"):
        Activations(b"abc", 2)


def test_recorded_rows_are_widened() -> None:
    data = record_rows(BUNDLED, 3, 1024)
    assert len(data) == 3 * 1024 * 2
    assert len({data[at : at + 512] for at in range(0, len(data), 512)}) == len(data) // 512


@pytest.fixture
def emulation(tmp_path: Path) -> Emulation:
    for name, text in (("device", DEVICE), ("model", MODEL)):
        (tmp_path / f"{name}.toml").write_text(text)
    recorded = tmp_path / "activations.bin"
    recorded.write_bytes(os.urandom(256 * 128))
    return Emulation(
        activations=str(recorded),
        device=str(tmp_path / "device.toml"),
        model=str(tmp_path / "model.toml"),
    )


def test_step_times_match_roofline(emulation: Emulation) -> None:
    stage = EmulatedStage(emulation, 2)
    ended: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    executor = EmulatedExecutor(stage, Activations(bytes(256), 128), lambda done, step: done(step))
    executor.submit_step([StepInput(volume(False, (4, 1), (9, 1)), b"")], ended.put)
    done = ended.get(timeout=30)
    executor.close()
    planned = emulation.rooflines[2].step_s(StepRows(decode=2, decode_context=13, sampled=2))
    assert executor.punctuality.planned_s == planned <= done.seconds == executor.punctuality.took_s
    assert planned > 0.001
    (result,) = done.outputs
    assert result.sampled == sample_tokens(result.volume, 1000, {})


async def test_ring_of_emulated_stages_answers_every_request(emulation: Emulation) -> None:
    keys = KeyPair.generate()
    plan = [PlannedRequest(index, 0.0, 10 + 9 * index, 4 + index) for index in range(5)]
    settings = RingSettings(micro_batches=3, max_num_batched_tokens=32)
    with ring_of(emulation, settings, [Host()] * 3, keys) as members:
        async with load_on(members[0], keys, 1000) as load:
            answers = await run_load(load, plan, until=60)
        assert [member.trouble for member in members] == [[], [], []]
    samples = [answer.sample() for answer in answers]
    assert [sample.error for sample in samples] == [None] * 5
    assert [sample.output_tokens for sample in samples] == [4, 5, 6, 7, 8]
    assert all(sample.ttft > 0 for sample in samples)


def of(name: str, stage: Member) -> float:
    """A stage's gauge; 0 before its first report."""
    return stage.stats.gauges[name] if stage.stats is not None else 0.0


@pytest.mark.slow
async def test_first_stage_learns_of_slow_stage(tmp_path: Path, emulation: Emulation) -> None:
    # A step takes 2 ms, and 2 ms more per row; a round trip is mostly latency.
    device = DEVICE.replace("tflops = 100", "tflops = 38e-6").replace("step_ms = 1", "step_ms = 2")
    (tmp_path / "device.toml").write_text(device)
    emulation = msgspec.structs.replace(emulation, hot=(1, 400, 20.0))
    keys = KeyPair.generate()
    plan = [PlannedRequest(index, 0.0, 8, 4000) for index in range(12)]
    settings = RingSettings(max_num_batched_tokens=32)
    with ring_of(emulation, settings, [Host()] * 3, keys, delay_ms=30.0) as members:
        async with load_on(members[0], keys, 1000) as load:
            for request in plan:
                load.submit(request)
            head, hot = members[0], members[1]
            await until(lambda: of("scheduler_micro_batches", head) > 3)
            await until(lambda: of("stage_decode_slowdown", hot) > 5)
            await until(lambda: of("scheduler_micro_batches", head) == 3)
        assert [member.trouble for member in members] == [[], [], []]
