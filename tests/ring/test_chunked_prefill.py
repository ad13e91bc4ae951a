"""A long prompt among decoding streams, in virtual time.

As in a worker, each step of a stage computes what has arrived of the next decode volume and of the
next prefill volume. A profile gives the time of a step; messages have a fixed latency.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import pytest

from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.ring.step import StepInput, StepOutput, StepResult
from molink.scheduler.config import SchedulerConfig
from molink.sim.event_queue import EventQueue
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES, SampledId, SamplerOutput, Volume
from tests.support.rings import Stages, TimedLink, VirtualRing

BLOCKS, BLOCK_SIZE = 1024, 16
PROMPT, STREAMS = 4096, 8
#: A GPU: reading the weights takes 20 ms; from 64 rows on each row takes 0.1 ms, in full tiles.
TILE = 64
ROWS = (16, 32, 64, 128, 256, 512, 1024)


def matmul_s(rows: int) -> float:
    return 0.018 + 1e-4 * -(-rows // TILE) * TILE


def attention_s(decodes: int) -> float:
    return 5e-4 * decodes


def profile(speed: float = 1.0) -> Profile:
    decode = tuple((x, (matmul_s(x) + attention_s(x)) / speed) for x in (1, 2, 4, 8, 16, 32, 64))
    prefill = tuple((x, matmul_s(x) / speed) for x in ROWS)
    return Profile(decode=decode, prefill=prefill, tile=TILE)


@dataclass
class Executor:
    """Runs steps in the times of a device of relative speed ``speed``."""

    ring: "Ring"
    index: int
    speed: float

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        counts = {step_input.volume.prefill: step_input.volume.count for step_input in step_inputs}
        decodes, rows = counts.get(False, 0), counts.get(True, 0)
        seconds = self.seconds(decodes, rows)
        self.ring.steps.append((self.index, decodes, rows, seconds))
        results = [self._result(step_input.volume) for step_input in step_inputs]
        queue = self.ring.queue
        queue.schedule_at(queue.now + seconds, done, StepResult(results, seconds, None))

    def seconds(self, decodes: int, rows: int) -> float:
        """Duration of a step."""
        return (matmul_s(decodes + rows) + attention_s(decodes)) / self.speed

    def _result(self, volume: Volume) -> StepOutput:
        if self.index + 1 < len(self.ring.rings):
            return StepOutput(volume, bytearray(volume.count), None)
        wanted = [request_slice for request_slice in volume.slices if request_slice.sample]
        choices = tuple(SampledId(g.request, g.start + g.count, 1, 0.0) for g in wanted)
        return StepOutput(volume, None, SamplerOutput(volume.seq, choices))


#: Reading the weights takes 10 ms, and each row beyond the first few 1.4 ms.
CPU = Profile(decode=((1, 0.01), (8, 0.012)), prefill=((8, 0.012), (512, 0.72)))


class Cpu(Executor):
    def seconds(self, decodes: int, rows: int) -> float:
        return CPU.prefill_s(decodes + rows) if rows else CPU.decode_s(decodes)


class Ring(VirtualRing):
    """Stages of the given speeds; ``steps`` records (stage, decode rows, prefill rows, seconds)."""

    def __init__(
        self,
        speeds: Sequence[float],
        latency: float = 0.0,
        executor: type[Executor] = Executor,
        **limits: Any,
    ) -> None:
        self.steps: list[tuple[int, int, int, float]] = []
        profiles = tuple(map(profile, speeds))
        given = {"profiles": profiles, "micro_batches": len(speeds)} | limits
        given |= {"prefix_cache": False, "num_stages": len(speeds)}
        many, queue = len(speeds) > 1, EventQueue()
        super().__init__(
            SchedulerConfig(BLOCKS, BLOCK_SIZE, max_model_len=1 << 14, **given),
            [executor(self, index, speed) for index, speed in enumerate(speeds)],
            [TimedLink(queue, latency, cut_through=False) for _ in speeds] if many else [],
            Stages(profiles=profiles, cut_through=False),
            queue=queue,
        )


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def long_prompt(ring: Ring) -> tuple[float, list[float], float]:
    """Run a long prompt among decoding streams.

    Returns the streams' time per token before it, the gaps between their tokens until its first
    token, and its time to first token.
    """
    for number in range(STREAMS):
        ring.submit_request(f"s{number}", 16, 4000)
    streams = [ring.tokens[f"s{number}"] for number in range(STREAMS)]
    ring.run_until(lambda: all(len(times) >= 40 for times in streams))
    alone = max(times[-1] - times[-2] for times in streams)
    begin, last = ring.queue.now, [len(times) - 1 for times in streams]
    ring.steps.clear()
    ring.submit_request("long", PROMPT, 4)
    ring.run_until(lambda: bool(ring.tokens["long"]))
    during = [gap for times, at in zip(streams, last, strict=True) for gap in gaps(times[at:])]
    return alone, during, ring.queue.now - begin


def test_long_prompt_lets_streams_decode_each_iteration() -> None:
    ring = Ring([1.0])
    alone, during, _ = long_prompt(ring)
    steps = [(decodes, rows) for _, decodes, rows, _ in ring.steps]
    chunks = [rows for _, rows in steps if rows]
    assert [decodes for decodes, rows in steps if rows] == [STREAMS] * len(chunks)
    assert len(steps) <= len(chunks) + 2, "every stream has a token in every step"
    assert sum(chunks) == PROMPT
    assert all((rows + STREAMS) % TILE == 0 for rows in chunks[:-1])
    assert max(during) <= 1.7 * alone


def test_unchunked_prompt_stalls_streams() -> None:
    ring = Ring([1.0], max_num_batched_tokens=PROMPT)
    alone, during, _ = long_prompt(ring)
    assert [rows for _, _, rows, _ in ring.steps if rows] == [PROMPT]
    assert max(during) > 10 * alone


@pytest.mark.parametrize("latency", [0.0, 0.001, 0.015])
@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.5], [0.5, 1.0, 2.0, 1.0]])
def test_long_prompt_at_most_doubles_token_times(speeds: list[float], latency: float) -> None:
    alone, during, first = long_prompt(Ring(speeds, latency))
    assert p99(during) <= 2.1 * alone
    _, stalled, _ = long_prompt(Ring(speeds, latency, max_num_batched_tokens=PROMPT))
    assert max(stalled) > 3 * alone
    # Each chunk reads the weights again, but the stages run concurrently.
    assert first < 4 * PROMPT * 1e-4 / min(speeds) * len(speeds)


def test_decode_batches_piggyback_a_chunk() -> None:
    ring = Ring([1.0, 1.0])
    long_prompt(ring)
    first_stage = [(decodes, rows) for stage, decodes, rows, _ in ring.steps if stage == 0]
    assert all(decodes for decodes, rows in first_stage if rows), "no chunk goes by itself"


def test_spare_micro_batches_are_prefill_only() -> None:
    ring = Ring([1.0, 1.0, 1.0], latency=0.03)
    ring.submit_request("s", 16, 4000)
    ring.run_until(lambda: len(ring.tokens["s"]) >= 10)
    ring.steps.clear()
    ring.submit_request("long", PROMPT, 4)
    ring.run_until(lambda: bool(ring.tokens["long"]))
    alone = [rows for stage, decodes, rows, _ in ring.steps if stage == 0 and rows and not decodes]
    beside = [rows for stage, decodes, rows, _ in ring.steps if stage == 0 and rows and decodes]
    assert alone
    assert beside


def auto(latency: float) -> Ring:
    """A ring of three stages whose scheduler chooses the volumes in flight by known link times."""
    ring = Ring([1.0] * 3, latency, micro_batches=0)
    ring.scheduler.set_times(
        RingTimes(ring.scheduler.config.profiles, [LinkFacts(latency, 1e12)] * 3, 0)
    )
    return ring


def test_latency_bound_rings_run_prefill_only_chunks() -> None:
    latency = 0.2
    _, _, paired = long_prompt(Ring([1.0] * 3, latency))
    alone, during, first = long_prompt(ring := auto(latency))
    assert first < paired / 3
    assert p99(during) <= 1.3 * alone
    chunks = [rows for stage, _, rows, _ in ring.steps if stage == 0 and rows]
    assert sum(chunks) == PROMPT


def beside_one_stream(prefill_only: bool) -> tuple[float, float]:
    """On two CPU stages: a stream's longest gap beside a prompt, and the prompt's first token."""
    times = RingTimes((CPU,) * 2, [LinkFacts(0.03, 1e12)] * 2, 0)
    given = {"profiles": times.profiles, "micro_batches": 0, "prefill_only_batches": prefill_only}
    ring = Ring([1.0] * 2, 0.03, Cpu, **given)
    ring.scheduler.set_times(times)
    ring.submit_request("s", 16, 4000)
    ring.run_until(lambda: len(ring.tokens["s"]) >= 10)
    begin, at = ring.queue.now, len(ring.tokens["s"]) - 1
    ring.submit_request("long", 800, 2)
    ring.run_until(lambda: bool(ring.tokens["long"]))
    return max(gaps(ring.tokens["s"][at:])), ring.queue.now - begin


def test_prefill_only_chunks_do_not_delay_streams() -> None:
    paired_gap, paired_first = beside_one_stream(prefill_only=False)
    gap, first = beside_one_stream(prefill_only=True)
    assert gap <= paired_gap
    assert first < 0.6 * paired_first


def test_prefill_only_rows_in_flight_are_bounded() -> None:
    ring = auto(2.0)
    bound = ring.scheduler.config.max_prefill_only_rows
    maximum = 0.0
    for number, prompt in enumerate((4000, 3000, 2000, 1000)):
        ring.submit_request(f"p{number}", prompt, 2)

    def over() -> bool:
        nonlocal maximum
        maximum = max(
            maximum, ring.scheduler.collect_stats()[1]["scheduler_prefill_rows_in_flight"]
        )
        return all(len(times) == 2 for times in ring.tokens.values())

    ring.run_until(over)
    assert bound / 2 < maximum <= bound


def test_returned_chunks_leave_the_window() -> None:
    ring = auto(0.2)
    for number in range(6):
        ring.submit_request(f"p{number}", PROMPT, 2)
    ring.run_until(lambda: all(len(times) == 2 for times in ring.tokens.values()))
    assert sum(rows > 0 for stage, _, rows, _ in ring.steps if stage == 0) > MAX_MICRO_BATCHES
    assert len(ring.scheduler._batcher._prefill_only_seqs) <= MAX_MICRO_BATCHES


def test_compute_bound_rings_piggyback_chunks() -> None:
    ring = auto(0.001)
    alone, during, _ = long_prompt(ring)
    first_stage = [(decodes, rows) for stage, decodes, rows, _ in ring.steps if stage == 0]
    assert all(decodes for decodes, rows in first_stage if rows), "no chunk goes by itself"
    assert p99(during) <= 2.1 * alone


def test_chunks_are_large_without_decoding() -> None:
    ring = Ring([1.0])
    ring.submit_request("long", PROMPT, 2)
    ring.run_until(lambda: bool(ring.tokens["long"]))
    chunks = [rows for _, _, rows, _ in ring.steps if rows]
    assert sum(chunks) == PROMPT
    assert all(rows % TILE == 0 and rows >= 512 for rows in chunks[:-1])


def test_short_ring_uses_smaller_chunks() -> None:
    def first(**limits: int) -> float:
        ring = Ring([1.0] * 4, **limits)
        ring.submit_request("long", 1024, 2)
        ring.run_until(lambda: bool(ring.tokens["long"]))
        return ring.queue.now

    assert first() < 0.8 * first(max_num_batched_tokens=1024)


#: Measured: eight layers on a core with AVX512-BF16 (`molink bench stage`).
CORE = Profile(
    decode=((1, 0.0069), (8, 0.0089), (64, 0.062)),
    prefill=((8, 0.0081), (16, 0.0153), (64, 0.055), (128, 0.109), (512, 0.451), (1024, 0.95)),
)


class Core(Executor):
    def seconds(self, decodes: int, rows: int) -> float:
        if not rows:
            return CORE.decode_s(decodes)
        return max(CORE.prefill_s(decodes + rows), CORE.decode_s(decodes))


def test_queued_chunks_leave_alone_beside_one_decode_volume() -> None:
    times = RingTimes((CORE,) * 3, [LinkFacts(0.015, 1e12)] * 3, 0)
    ring = Ring([1.0] * 3, 0.015, Core, profiles=times.profiles, micro_batches=0)
    ring.scheduler.set_times(times)
    for number in range(8):
        ring.submit_request(f"p{number}", 800 + 100 * number, 24)
    ring.run_until(lambda: bool(ring.tokens["p1"]))
    ring.steps.clear()
    beside = []

    def watch() -> bool:
        gauges = ring.scheduler.collect_stats()[1]
        if gauges["scheduler_prefill_in_flight"]:
            beside.append(gauges["scheduler_decode_in_flight"])
        return bool(ring.tokens["p4"])

    ring.run_until(watch)
    assert max(beside) == 1
    steps = [(decodes, rows) for stage, decodes, rows, _ in ring.steps if stage == 0]
    alone = sum(rows for decodes, rows in steps if not decodes)
    assert alone > 0.95 * sum(rows for _, rows in steps)
    ring.run_until(lambda: all(len(tokens) == 24 for tokens in ring.tokens.values()))
