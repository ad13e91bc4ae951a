"""A long prompt among streams that decode: the real head and scoreboards in virtual time.

Each stage computes one step at a time, as a worker does: whatever of the next decode volume and the
next prefill volume has arrived. Steps take as long as a profile says, messages a fixed latency.
"""

import heapq
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import pytest

from molink.facts.profile import Profile
from molink.facts.ringtimes import LinkFacts
from molink.head.head import Head
from molink.head.limits import HeadLimits
from molink.head.request import HeadRequest
from molink.ring.board_limits import BoardLimits
from molink.ring.scoreboard import Scoreboard
from molink.ring.work import Work
from molink.wire.messages.data import (
    MAX_MICRO_BATCHES,
    Choice,
    Release,
    Sampled,
    Sampling,
    Token,
    Tombstone,
    Volume,
)

BLOCKS, BLOCK_SIZE = 1024, 16
PROMPT, STREAMS = 4096, 8
#: A GPU: reading the weights takes 20 ms, from 64 rows on it computes 0.1 ms a row, in full tiles.
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
class Stage:
    speed: float
    board: Scoreboard = field(
        default_factory=lambda: Scoreboard(BoardLimits(blocks=BLOCKS, block_size=BLOCK_SIZE))
    )
    busy: bool = False


class VirtualRing:
    """Runs in virtual time; ``steps`` are (stage, decode rows, prefill rows, seconds)."""

    def __init__(self, speeds: Sequence[float], latency: float = 0.0, **limits: Any) -> None:
        self.stages = [Stage(speed) for speed in speeds]
        given = {"profiles": tuple(map(profile, speeds)), "micro_batches": len(speeds)} | limits
        given |= {"prefix_cache": False}
        self.head = Head(HeadLimits(BLOCKS, BLOCK_SIZE, max_context=1 << 14, **given), 1)
        self.latency = latency
        self.now = 0.0
        self.steps: list[tuple[int, int, int, float]] = []
        #: When each request's tokens came.
        self.tokens: dict[str, list[float]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def submit(self, key: str, prompt: int, answer: int) -> None:
        sampling = Sampling(temperature=0.0)
        self.tokens[key] = []
        tokens = tuple(range(prompt))
        request = HeadRequest("d", key, tokens, prompt, answer, sampling, window=1 << 20)
        self.head.submit(request, self.now)
        self._pump(0)

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def _pump(self, index: int) -> None:
        """As :meth:`molink.ring.ring.Ring._pump` does."""
        stage = self.stages[index]
        if stage.busy:
            return
        while index == 0 and stage.board.queued == 0:
            batch = self.head.next(self.now)
            if batch is None:
                break
            for control in batch.control:
                data = None if control.ids is None else array("i", control.ids).tobytes()
                stage.board.arrive(control.body, data, self.now)
            for volume in batch.volumes:
                stage.board.arrive(volume.header, volume.tokens, self.now)
        work = stage.board.take(self.now)
        self._pass_on(index, stage.board.complete((), self.now))
        if work is not None:
            self._start(index, work)

    def _start(self, index: int, work: Work) -> None:
        stage = self.stages[index]
        decodes, rows = (
            sum(group.count for group in part.volume.rows) if part is not None else 0
            for part in (work.decode, work.prefill)
        )
        seconds = (matmul_s(decodes + rows) + attention_s(decodes)) / stage.speed
        self.steps.append((index, decodes, rows, seconds))
        stage.busy = True
        self._later(seconds, lambda: self._done(index, work))

    def _done(self, index: int, work: Work) -> None:
        stage = self.stages[index]
        stage.busy = False
        for part in work.parts:
            self._leave(index, part.volume, part.data)
        self._pass_on(index, stage.board.complete(work.ticks, self.now))
        self._pump(index)

    def _leave(self, index: int, volume: Volume, data: object) -> None:
        if index + 1 < len(self.stages):
            self._later(self.latency, lambda: self._arrive(index + 1, volume, data))
        else:
            wanted = [group for group in volume.rows if group.sample]
            choices = tuple(Choice(g.request, g.start + g.count, 1, 0.0) for g in wanted)
            sampled = Sampled(volume.tick, choices, ())
            self._go_home(sampled)

    def _pass_on(self, index: int, controls: Sequence[Any]) -> None:
        for control in controls:
            body, data = control.body, control.data
            if index + 1 < len(self.stages):
                self._later(self.latency, lambda b=body, d=data: self._arrive(index + 1, b, d))
            elif isinstance(body, Release | Tombstone):
                self._go_home(body)

    def _go_home(self, body: Sampled | Release | Tombstone) -> None:
        if len(self.stages) > 1:
            self._later(self.latency, lambda: self._home(body))
        else:
            self._home(body)  # the only stage has no link

    def _arrive(self, index: int, body: Any, data: object) -> None:
        self.stages[index].board.arrive(body, data, self.now)
        self._pump(index)

    def _home(self, body: Sampled | Release | Tombstone) -> None:
        if isinstance(body, Sampled):
            for emission in self.head.sampled(body, {}, self.now):
                assert isinstance(emission.message, Token)
                self.tokens[emission.message.key].append(self.now)
        elif isinstance(body, Release):
            self.head.released(body.tick, self.now)
        self.head.validate()
        self._pump(0)


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def long_prompt(ring: VirtualRing) -> tuple[float, list[float], float]:
    """Streams decode, then a long prompt comes.

    Returns how long a token took before that, the times between tokens until the prompt's first
    one, and how long it took to come.
    """
    for number in range(STREAMS):
        ring.submit(f"s{number}", 16, 4000)
    streams = [ring.tokens[f"s{number}"] for number in range(STREAMS)]
    ring.run(lambda: all(len(times) >= 40 for times in streams))
    alone = max(times[-1] - times[-2] for times in streams)
    begin, last = ring.now, [len(times) - 1 for times in streams]
    ring.steps.clear()
    ring.submit("long", PROMPT, 4)
    ring.run(lambda: bool(ring.tokens["long"]))
    during = [gap for times, at in zip(streams, last, strict=True) for gap in gaps(times[at:])]
    return alone, during, ring.now - begin


def test_a_long_prompt_lets_everyone_have_a_token_in_each_iteration() -> None:
    ring = VirtualRing([1.0])
    alone, during, _ = long_prompt(ring)
    steps = [(decodes, rows) for _, decodes, rows, _ in ring.steps]
    chunks = [rows for _, rows in steps if rows]
    assert [decodes for decodes, rows in steps if rows] == [STREAMS] * len(chunks)
    assert len(steps) <= len(chunks) + 2, "every stream has a token in every step"
    assert sum(chunks) == PROMPT
    assert all((rows + STREAMS) % TILE == 0 for rows in chunks[:-1])
    assert max(during) <= 1.7 * alone


def test_a_whole_prompt_at_once_stalls_everyone() -> None:
    ring = VirtualRing([1.0], chunk_tokens=PROMPT)
    alone, during, _ = long_prompt(ring)
    assert [rows for _, _, rows, _ in ring.steps if rows] == [PROMPT]
    assert max(during) > 10 * alone


@pytest.mark.parametrize("latency", [0.0, 0.001, 0.015])
@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.5], [0.5, 1.0, 2.0, 1.0]])
def test_in_a_ring_tokens_take_about_twice_as_long_at_most(
    speeds: list[float], latency: float
) -> None:
    alone, during, first = long_prompt(VirtualRing(speeds, latency))
    assert p99(during) <= 2.1 * alone
    _, stalled, _ = long_prompt(VirtualRing(speeds, latency, chunk_tokens=PROMPT))
    assert max(stalled) > 3 * alone
    # Chunks read the weights again and again, but the stages work at the same time.
    assert first < 4 * PROMPT * 1e-4 / min(speeds) * len(speeds)


def test_who_decodes_takes_a_chunk_along() -> None:
    ring = VirtualRing([1.0, 1.0])
    long_prompt(ring)
    first_stage = [(decodes, rows) for stage, decodes, rows, _ in ring.steps if stage == 0]
    assert all(decodes for decodes, rows in first_stage if rows), "no chunk goes by itself"


def test_with_fewer_streams_than_micro_batches_prompts_have_some_of_their_own() -> None:
    ring = VirtualRing([1.0, 1.0, 1.0], latency=0.03)
    ring.submit("s", 16, 4000)
    ring.run(lambda: len(ring.tokens["s"]) >= 10)
    ring.steps.clear()
    ring.submit("long", PROMPT, 4)
    ring.run(lambda: bool(ring.tokens["long"]))
    alone = [rows for stage, decodes, rows, _ in ring.steps if stage == 0 and rows and not decodes]
    beside = [rows for stage, decodes, rows, _ in ring.steps if stage == 0 and rows and decodes]
    assert alone
    assert beside


def auto(latency: float) -> VirtualRing:
    """Three stages, which decide how many volumes are in flight by links that they know."""
    ring = VirtualRing([1.0] * 3, latency, micro_batches=0, stages=3)
    ring.head.set_links([LinkFacts(latency, 1e12)] * 3)
    return ring


def test_where_a_turn_is_mostly_latency_chunks_go_in_between() -> None:
    latency = 0.2
    _, _, paired = long_prompt(VirtualRing([1.0] * 3, latency))
    alone, during, first = long_prompt(ring := auto(latency))
    assert first < paired / 3
    assert p99(during) <= 1.3 * alone
    chunks = [rows for stage, _, rows, _ in ring.steps if stage == 0 and rows]
    assert sum(chunks) == PROMPT


def test_chunks_in_flight_have_no_more_rows_than_a_stage_has_room_for() -> None:
    ring = auto(2.0)
    bound = ring.head.limits.unpaired_rows
    maximum = 0.0
    for number, prompt in enumerate((4000, 3000, 2000, 1000)):
        ring.submit(f"p{number}", prompt, 2)

    def over() -> bool:
        nonlocal maximum
        maximum = max(maximum, ring.head.stats()[1]["head_prefill_rows_in_flight"])
        return all(len(times) == 2 for times in ring.tokens.values())

    ring.run(over)
    assert bound / 2 < maximum <= bound


def test_chunks_that_are_back_are_forgotten() -> None:
    ring = auto(0.2)
    for number in range(6):
        ring.submit(f"p{number}", PROMPT, 2)
    ring.run(lambda: all(len(times) == 2 for times in ring.tokens.values()))
    assert sum(rows > 0 for stage, _, rows, _ in ring.steps if stage == 0) > MAX_MICRO_BATCHES
    assert len(ring.head._batcher._alone) <= MAX_MICRO_BATCHES


def test_where_it_is_not_they_ride_with_decode_rows() -> None:
    ring = auto(0.001)
    alone, during, _ = long_prompt(ring)
    first_stage = [(decodes, rows) for stage, decodes, rows, _ in ring.steps if stage == 0]
    assert all(decodes for decodes, rows in first_stage if rows), "no chunk goes by itself"
    assert p99(during) <= 2.1 * alone


def test_while_nobody_decodes_chunks_are_large() -> None:
    ring = VirtualRing([1.0])
    ring.submit("long", PROMPT, 2)
    ring.run(lambda: bool(ring.tokens["long"]))
    chunks = [rows for _, _, rows, _ in ring.steps if rows]
    assert sum(chunks) == PROMPT
    assert all(rows % TILE == 0 and rows >= 512 for rows in chunks[:-1])


def test_a_short_ring_of_long_prompts_is_filled_by_smaller_chunks() -> None:
    def first(**limits: int) -> float:
        ring = VirtualRing([1.0] * 4, **limits)
        ring.submit("long", 1024, 2)
        ring.run(lambda: bool(ring.tokens["long"]))
        return ring.now

    assert first() < 0.8 * first(chunk_tokens=1024)
