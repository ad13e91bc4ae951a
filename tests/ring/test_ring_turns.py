"""What the outgoing link's policy hears of decode steps, and when."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from molink.facts.profile import Profile
from molink.facts.ringtimes import LinkFacts
from molink.link.policies.base import DecodeFinished, DecodeStarted
from molink.ring.ring import Ring, RingConfig
from molink.ring.stage import StageShape
from molink.ring.work import Segment, SegmentResult, StepDone
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Admit, Release, Rows, Sampling, Volume
from molinkd.worker.request_table import RequestTable

STEP = 0.25
PROFILE = Profile(decode=((64, STEP),), prefill=((64, STEP),))


class Outlet:
    """Keeps everything in the order in which it came."""

    full = False

    def __init__(self) -> None:
        self.log: list[Any] = []

    def control(self, body: Any, payload: Any = None) -> None:
        self.log.append(type(body))

    def volume(self, header: Volume, rows: Any) -> None:
        self.log.append(header.tick)

    def more(self, tick: int, rows: Any) -> None:
        self.log.append(tick)

    def handle(self, event: Any) -> None:
        self.log.append(event)


class Steps:
    """Runs a step when it is told to."""

    def submit(self, segments: Sequence[Segment], done: Callable[[StepDone], None]) -> None:
        self.segments, self.done = segments, done

    def end(self) -> None:
        results = [SegmentResult(each.volume, bytearray(8), None) for each in self.segments]
        self.done(StepDone(results, STEP, None))


def test_a_decode_step_is_over_when_its_rows_are_on_their_way() -> None:
    now = 0.0
    steps, outlet = Steps(), Outlet()
    shape = StageShape(1, 3, 2, 16, "f32")
    config = RingConfig(shape, PROFILE, (PROFILE,) * 3)
    ring = Ring(config, RequestTable(), steps, None, lambda: now, pytest.fail)
    ring.open(outlet)
    ring.arrive(Admit(1, 0, Sampling(), 4), None)
    ring.arrive(Volume(2, False, (Rows(0, 4, 1, 1, (2,)),), Payload("f32", (1, 2))), bytearray(8))
    now = STEP
    steps.end()
    assert outlet.log[1:] == [
        DecodeStarted(1, STEP),
        2,
        DecodeFinished(1, next_predicted=3 * STEP),
    ]
    ring.link_measured(LinkFacts(0.01, 1e6), now)
    ring.arrive(Volume(3, False, (Rows(0, 5, 1, 2, ()),), Payload("f32", (1, 2))), bytearray(8))
    now = 4 * STEP
    steps.end()
    turn = 3 * STEP + 0.01 + 8 / 1e6
    assert outlet.log[-1].next_predicted == pytest.approx(turn)
    ring.arrive(Release(4, 0, 3), None)
    assert not ring._turns._expected
