"""Real rings in virtual time, with links that take time for each row of a prompt.

Each link has two channels: decode rows and control take its latency, prefill rows arrive one burst
after another at its rate.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molink.facts.profile import Profile
from molink.ring.step import StepInput, StepOutput, StepResult
from molink.scheduler.config import SchedulerConfig
from molink.sim.event_queue import EventQueue
from molink.wire.messages.data_plane import SampledId, SamplerOutput, Volume
from tests.support.rings import Stages, TimedLink, VirtualRing

BLOCKS, BLOCK_SIZE = 512, 16
TILE = 16


def step_s(rows: int) -> float:
    """A step's duration: reading the weights takes 4 ms, and each row 0.1 ms, in full tiles."""
    return 0.004 + 1e-4 * -(-rows // TILE) * TILE


POINTS = tuple((rows, step_s(rows)) for rows in (1, 16, 64, 128, 256, 512))
PROFILE = Profile(decode=POINTS, prefill=POINTS, tile=TILE)


@dataclass
class VirtualExecutor:
    """Runs steps in the profile's time; the last stage samples token 1."""

    queue: EventQueue
    is_last: bool
    steps: list[tuple[int, int]] = field(default_factory=list)

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        counts = {True: 0, False: 0}
        for step_input in step_inputs:
            rows = step_input.volume.count
            counts[step_input.volume.prefill] += rows
            assert len(step_input.data) == rows or step_input.row_indices is not None
        self.steps.append((counts[False], counts[True]))
        seconds = step_s(sum(counts.values()))
        results = [self._result(step_input.volume) for step_input in step_inputs]
        self.queue.schedule_at(
            self.queue.now + seconds, lambda: done(StepResult(results, seconds, None))
        )

    def _result(self, volume: Volume) -> StepOutput:
        if not self.is_last:
            return StepOutput(volume, bytearray(volume.count), None)
        wanted = [request_slice for request_slice in volume.slices if request_slice.sample]
        choices = tuple(SampledId(g.request, g.start + g.count, 1, 0.0) for g in wanted)
        return StepOutput(volume, None, SamplerOutput(volume.seq, choices))


class Swarm(VirtualRing):
    """A ring in virtual time, with clients."""

    def __init__(
        self,
        stages: int,
        *,
        cut_through: bool,
        latency: float = 0.01,
        rates: Sequence[float] = (500.0,),
        burst: Callable[[], int] = lambda: 16,
        **limits: Any,
    ) -> None:
        queue = EventQueue()
        given = {"micro_batches": stages, "profiles": (PROFILE,) * stages, "max_model_len": 1 << 13}
        given |= {"prefix_cache": False, "num_stages": stages, **limits}
        links = [
            TimedLink(queue, latency, rates[i % len(rates)], burst, cut_through)
            for i in range(stages)
        ]
        super().__init__(
            SchedulerConfig(BLOCKS, BLOCK_SIZE, **given),
            [VirtualExecutor(queue, i == stages - 1) for i in range(stages)],
            links,
            Stages(profiles=(PROFILE,) * stages, cut_through=cut_through),
            queue=queue,
        )


def first_token_s(prompt: int, **options: Any) -> float:
    swarm = Swarm(4, **options)
    swarm.submit_request("a", prompt, 2)
    swarm.run_until(lambda: "a" in swarm.finished_keys)
    swarm.queue.run(float("inf"))
    swarm.check_idle()
    return swarm.tokens["a"][0]


@pytest.mark.parametrize("chunk", [0, 512], ids=["the scheduler's chunks", "one chunk"])
def test_prompt_transfer_is_paid_once_over_all_hops(chunk: int) -> None:
    rows, rate = 512, 500.0
    cut, stored = (
        first_token_s(rows, cut_through=on, rates=[rate], max_num_batched_tokens=chunk)
        for on in (True, False)
    )
    transfer = rows / rate
    assert cut < 1.25 * transfer
    if chunk:
        assert stored > 3 * transfer
    else:
        assert cut < stored


def test_slowest_link_dominates() -> None:
    cut, stored = (
        first_token_s(
            512, cut_through=on, rates=[2000.0, 250.0, 1000.0], max_num_batched_tokens=512
        )
        for on in (True, False)
    )
    assert cut < 1.2 * 512 / 250
    assert stored > 512 / 250 + 512 / 1000 + 512 / 2000


def test_decode_waits_for_a_sub_chunk_only() -> None:
    def worst_gap(*, cut_through: bool) -> float:
        swarm = Swarm(3, cut_through=cut_through, rates=[1e5], max_num_batched_tokens=2048)
        for number in range(6):
            swarm.submit_request(f"s{number}", 8, 4000)
        streams = [swarm.tokens[f"s{number}"] for number in range(6)]
        swarm.run_until(lambda: all(len(times) > 20 for times in streams))
        begin = swarm.queue.now
        swarm.submit_request("long", 2048, 2)
        swarm.run_until(lambda: bool(swarm.tokens["long"]))
        swarm.check_answers()
        after = [[t for t in times if t >= begin - 0.05] for times in streams]
        gaps = [later - sooner for times in after for sooner, later in itertools.pairwise(times)]
        return quantiles(gaps, n=100, method="inclusive")[97]

    assert worst_gap(cut_through=True) < 0.5 * worst_gap(cut_through=False)


@given(
    stages=st.integers(1, 4),
    chunk=st.sampled_from([0, 40, 700]),
    cut_through=st.sampled_from([True, True, True, False]),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_token_arrives_once(stages: int, chunk: int, cut_through: bool, seed: int) -> None:
    """Requests are cancelled while half a volume has run or is still arriving, anywhere in the
    ring.
    """
    rng = random.Random(seed)
    swarm = Swarm(
        stages,
        cut_through=cut_through,
        latency=rng.choice([0.0, 0.002, 0.05]),
        rates=[rng.choice([300.0, 3000.0, 1e6]) for _ in range(stages)],
        burst=lambda: rng.randint(1, rng.choice([1, 16, 100])),
        max_num_batched_tokens=chunk,
        max_num_seqs=8,
    )
    wanted = {f"r{number}": rng.randint(1, 12) for number in range(rng.randint(1, 10))}
    for key, answer in wanted.items():
        prompt, when = rng.choice([1, 20, 300, 900]), rng.uniform(0, 2)
        swarm.queue.schedule_at(when, swarm.submit_request, key, prompt, answer)
        if rng.random() < 0.4:
            swarm.queue.schedule_at(when + rng.expovariate(2), swarm.cancel_request, key)
    while swarm.queue.run_next():
        swarm.check_answers()
    swarm.check_idle()
    assert set(wanted) == swarm.finished_keys
    for key, times in swarm.tokens.items():
        assert len(times) <= wanted[key]
