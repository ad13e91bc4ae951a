"""What the evening's tables are made of, and PCs that become hot."""

import queue
from pathlib import Path

import pytest

from molink.bench.sample import Sample
from molink.ring.step import StepInput, StepResult
from molink.sim.profiles import load_device, load_model
from molink.sim.roofline import Roofline, StepRows
from tests.tools.test_emulation import volume
from tools.bench_evening import quantile, slices
from tools.emulation.activations import Activations
from tools.emulation.executor import EmulatedExecutor
from tools.evening.requests import Answered, Look
from tools.evening.worker import Computer, EveningStage, measured


def test_a_token_counts_in_the_part_in_which_it_came() -> None:
    samples = (
        Sample(101.0, (102.0, 109.0, 113.0), 113.0, 4, 3),
        Sample(111.0, finished_at=112.0, error="no"),
        Sample(119.0, (125.0, 126.0), 126.0, 4, 2),
    )
    looks = (Look(104.0, (("pc0", 0, 8), ("pc1", 8, 16)), 2), Look(115.0))
    first, last = slices(Answered(samples, looks), begin=100.0, length=10.0, count=2)
    assert (first.begin, first.per_token, first.ttft) == (0.0, 7.0, 1.0)
    assert (first.requests, first.failed, first.ring, first.micro_batches) == (
        1,
        0,
        "pc0:8 pc1:8",
        2,
    )
    assert (last.begin, last.per_token, last.median, last.p99) == (10.0, 2.5, 2.5, 4.0)
    assert (last.requests, last.failed, last.ring, last.ttft) == (2, 1, "none", 6.0)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_quantiles(share: float, value: float) -> None:
    assert quantile([3.0, 1.0, 4.0, 2.0], share) == value
    assert quantile([], share) == 0.0


def test_steps_follow_what_the_file_says_at_that_moment(tmp_path: Path) -> None:
    roofline = Roofline(load_device("rtx4090"), load_model("qwen-7b"), 2, is_last=True)
    computer = Computer(
        device="rtx4090", model="qwen-7b", activations="", pace=str(tmp_path / "pace")
    )

    class Config:
        hidden_size, vocab_size, context = 64, 100, 4096
        keys_depend_on_length, short_context = False, 0

    stage = EveningStage(computer, Config(), roofline, is_first=False, is_last=True)
    computer.set_pace(1.0)
    executor = EmulatedExecutor(stage, Activations(bytes(256), 128), lambda done, step: done(step))
    ended: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    alone = roofline.step_s(StepRows(decode=1, decode_context=4, sampled=1))
    planned = []
    for times in (1.0, 3.0):
        computer.set_pace(times)
        executor.submit([StepInput(volume(False, (4, 1)), b"")], ended.put)
        ended.get(timeout=30)
        planned.append(executor.punctuality.planned_s)
    executor.close()
    assert planned == pytest.approx([alone, 4 * alone])
    assert measured(roofline.make_profile(), 3.0).decode_s(
        1
    ) == 3 * roofline.make_profile().decode_s(1)
