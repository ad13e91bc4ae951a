"""Real rings in virtual time, with links that take their time over each row of a prompt.

Each link has two lanes: decode rows and control take its latency, prefill rows arrive one burst
after another at its rate.
"""

import heapq
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
from molink.head.head import Head
from molink.head.limits import HeadLimits
from molink.head.request import Emission, HeadRequest
from molink.ring.board_limits import BoardLimits
from molink.ring.ring import Ring
from molink.ring.segment import Segment, SegmentResult, StageShape, StepDone
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Choice, RingBody, Sampled, Sampling, Token, Volume, VolumePart
from molinkd.worker.request_table import RequestTable

BLOCKS, BLOCK_SIZE, HIDDEN = 512, 16, 1
TILE = 16


def step_s(rows: int) -> float:
    """Reading the weights takes 4 ms, each row 0.1 ms, in full tiles."""
    return 0.004 + 1e-4 * -(-rows // TILE) * TILE


POINTS = tuple((rows, step_s(rows)) for rows in (1, 16, 64, 128, 256, 512))
PROFILE = Profile(decode=POINTS, prefill=POINTS, tile=TILE)


@dataclass
class Agenda:
    """What happens when."""

    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    order: Any = field(default_factory=itertools.count)

    def clock(self) -> float:
        return self.now

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), event))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, event = heapq.heappop(self.events)
            event()


@dataclass
class VirtualExecutor:
    """Steps take as long as the profile says; the last stage samples token 1."""

    agenda: Agenda
    is_last: bool
    steps: list[tuple[int, int]] = field(default_factory=list)

    def submit(self, segments: Sequence[Segment], done: Callable[[StepDone], None]) -> None:
        counts = {True: 0, False: 0}
        for segment in segments:
            rows = sum(group.count for group in segment.volume.rows)
            counts[segment.volume.prefill] += rows
            assert len(segment.data) == rows or segment.kept is not None
        self.steps.append((counts[False], counts[True]))
        seconds = step_s(sum(counts.values()))
        results = [self._result(segment.volume) for segment in segments]
        self.agenda.at(self.agenda.now + seconds, lambda: done(StepDone(results, seconds, None)))

    def _result(self, volume: Volume) -> SegmentResult:
        if not self.is_last:
            return SegmentResult(volume, bytearray(sum(g.count for g in volume.rows)), None)
        wanted = [group for group in volume.rows if group.sample]
        choices = tuple(Choice(g.request, g.start + g.count, 1, 0.0) for g in wanted)
        return SegmentResult(volume, None, Sampled(volume.tick, choices))


@dataclass
class VirtualLink:
    """An outlet to the next ring. ``rate`` is in rows/s; ``burst`` gives rows per arrival."""

    agenda: Agenda
    latency: float
    rate: float
    burst: Callable[[], int]
    cut_through: bool
    ring: Any = None
    full: bool = False
    _free_at: float = 0.0
    #: Volumes on their way: header, room for its rows, rows that have arrived.
    _volumes: dict[int, tuple[Volume, bytearray]] = field(default_factory=dict)
    _sent: dict[int, int] = field(default_factory=dict)

    def control(self, body: RingBody, payload: Any = None) -> None:
        data = None if payload is None else bytearray(payload)
        self._later(self.latency, lambda: self.ring.arrive(body, data))

    def volume(self, header: Volume, rows: Any) -> None:
        total = sum(group.count for group in header.rows)
        assert header.payload == Payload("u8", (total, HIDDEN))
        if not header.prefill:
            self._later(self.latency, lambda: self.ring.arrive(header, bytearray(rows)))
            return
        assert header.tick not in self._volumes
        self._volumes[header.tick] = header, bytearray(total)
        self._sent[header.tick] = 0
        self.more(header.tick, rows)

    def more(self, tick: int, rows: Any) -> None:
        left = len(rows)
        assert left
        while left:
            count = min(left, self.burst())
            self._free_at = max(self._free_at, self.agenda.now) + count / self.rate
            self.agenda.at(self._free_at + self.latency, lambda n=count: self._arrived(tick, n))
            left -= count

    def _arrived(self, tick: int, count: int) -> None:
        header, room = self._volumes[tick]
        before = self._sent[tick]
        self._sent[tick] = after = before + count
        assert after <= len(room)
        if after == len(room):
            del self._volumes[tick]
        if not self.cut_through:
            if after == len(room):
                self.ring.arrive(header, room, after)
        elif before:
            payload = Payload("u8", (count, HIDDEN))
            self.ring.arrive(VolumePart(tick, before, payload), None, after)
        else:
            self.ring.arrive(header, room, after)

    def handle(self, event: Any) -> None:
        pass

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        self.agenda.at(self.agenda.now + seconds, event)


class Swarm:
    """A ring of real rings and its clients."""

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
        self.agenda = Agenda()
        given = {"micro_batches": stages, "profiles": (PROFILE,) * stages, "max_context": 1 << 13}
        given |= {"prefix_cache": False, **limits}
        self.head = Head(HeadLimits(BLOCKS, BLOCK_SIZE, **given), 1)
        #: When each request's tokens came.
        self.tokens: dict[str, list[float]] = {}
        self.over: set[str] = set()
        self.broken: list[str] = []
        self.executors = [VirtualExecutor(self.agenda, i == stages - 1) for i in range(stages)]
        self.rings = [self._ring(index, cut_through) for index in range(stages)]
        links = [
            VirtualLink(self.agenda, latency, rates[i % len(rates)], burst, cut_through)
            for i in range(stages)
        ]
        for index, link in enumerate(links):
            link.ring = self.rings[(index + 1) % stages]
            self.rings[index].open(link)

    def _ring(self, index: int, cut_through: bool) -> Ring:
        executor = self.executors[index]
        return Ring(
            StageShape(executor.is_last, HIDDEN, 100, "u8"),
            RequestTable(),
            executor,
            self.head if index == 0 else None,
            self if index == 0 else None,
            PROFILE,
            self.broken.append,
            self.agenda.clock,
            BoardLimits(blocks=BLOCKS, block_size=BLOCK_SIZE),
            cut_through=cut_through,
        )

    def deliver(self, emissions: Sequence[Emission], now: float) -> None:
        for emission in emissions:
            token = emission.message
            assert isinstance(token, Token)
            times = self.tokens[token.key]
            assert token.key not in self.over
            assert token.position == self.start[token.key] + len(times)
            times.append(now)
            if token.finish is not None:
                self.over.add(token.key)

    def close(self) -> None:
        raise AssertionError(self.broken)

    start: dict[str, int]

    def submit(self, key: str, prompt: int, answer: int) -> None:
        self.start = {**getattr(self, "start", {}), key: prompt}
        self.tokens[key] = []
        tokens, sampling = tuple(range(prompt)), Sampling(temperature=0.0)
        request = HeadRequest("d", key, tokens, prompt, answer, sampling, window=1 << 16)
        self.head.submit(request, self.agenda.now)
        self.rings[0].pump()

    def cancel(self, key: str) -> None:
        if key not in self.over:
            self.over.add(key)
            self.head.cancel("d", key, self.agenda.now)
            self.rings[0].pump()

    def check(self) -> None:
        assert not self.broken
        self.head.validate()
        for ring in self.rings:
            ring.scoreboard.validate()

    def check_idle(self) -> None:
        """Nothing is left of anything."""
        self.check()
        assert not self.head.live
        assert self.head.strays == 0
        _, gauges = self.head.stats()
        assert gauges["head_blocks_used"] == gauges["head_blocks_releasing"] == 0
        for ring in self.rings:
            assert not ring.progress.busy
            assert ring.scoreboard.waiting == ring.scoreboard.queued == 0
            assert ring.scoreboard.refused == 0
            assert not len(ring._collector)


def first_token_s(prompt: int, **options: Any) -> float:
    swarm = Swarm(4, **options)
    swarm.submit("a", prompt, 2)
    swarm.agenda.run(lambda: "a" in swarm.over)
    swarm.agenda.run(lambda: not swarm.head.live and not swarm.agenda.events)
    swarm.check_idle()
    return swarm.tokens["a"][0]


@pytest.mark.parametrize("chunk", [0, 512], ids=["the head's chunks", "one chunk"])
def test_a_prompts_transfer_is_paid_once_and_not_once_per_hop(chunk: int) -> None:
    rows, rate = 512, 500.0
    cut, stored = (
        first_token_s(rows, cut_through=on, rates=[rate], chunk_tokens=chunk)
        for on in (True, False)
    )
    transfer = rows / rate
    assert cut < 1.25 * transfer
    if chunk:
        assert stored > 3 * transfer
    else:
        assert cut < stored


def test_one_slow_link_is_what_counts() -> None:
    cut, stored = (
        first_token_s(512, cut_through=on, rates=[2000.0, 250.0, 1000.0], chunk_tokens=512)
        for on in (True, False)
    )
    assert cut < 1.2 * 512 / 250
    assert stored > 512 / 250 + 512 / 1000 + 512 / 2000


def test_who_decodes_waits_for_a_piece_and_not_for_a_prompt() -> None:
    def worst_gap(*, cut_through: bool) -> float:
        swarm = Swarm(3, cut_through=cut_through, rates=[1e5], chunk_tokens=2048)
        for number in range(6):
            swarm.submit(f"s{number}", 8, 4000)
        streams = [swarm.tokens[f"s{number}"] for number in range(6)]
        swarm.agenda.run(lambda: all(len(times) > 20 for times in streams))
        begin = swarm.agenda.now
        swarm.submit("long", 2048, 2)
        swarm.agenda.run(lambda: bool(swarm.tokens["long"]))
        swarm.check()
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
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_token_comes_once_and_nothing_is_left(
    stages: int, chunk: int, cut_through: bool, seed: int
) -> None:
    """Cancels come while half a volume has run, or is still arriving, anywhere in the ring."""
    rng = random.Random(seed)
    swarm = Swarm(
        stages,
        cut_through=cut_through,
        latency=rng.choice([0.0, 0.002, 0.05]),
        rates=[rng.choice([300.0, 3000.0, 1e6]) for _ in range(stages)],
        burst=lambda: rng.randint(1, rng.choice([1, 16, 100])),
        chunk_tokens=chunk,
        max_running=8,
    )
    wanted = {f"r{number}": rng.randint(1, 12) for number in range(rng.randint(1, 10))}
    for key, answer in wanted.items():
        prompt, when = rng.choice([1, 20, 300, 900]), rng.uniform(0, 2)
        swarm.agenda.at(when, lambda k=key, p=prompt, a=answer: swarm.submit(k, p, a))
        if rng.random() < 0.4:
            swarm.agenda.at(when + rng.expovariate(2), lambda k=key: swarm.cancel(k))
    while swarm.agenda.events:
        swarm.agenda.run(itertools.chain([False], itertools.repeat(True)).__next__)
        swarm.check()
    swarm.check_idle()
    assert set(wanted) == swarm.over
    for key, times in swarm.tokens.items():
        assert len(times) <= wanted[key]
