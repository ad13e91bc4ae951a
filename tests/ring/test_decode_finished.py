"""When a stage tells the link policy that a decode step has finished."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts
from molink.link.policies.base import DecodeFinishedEvent, DecodeStartedEvent
from molink.ring.ring import Ring, RingConfig
from molink.ring.stage import StageShape
from molink.ring.step import StepInput, StepOutput, StepResult
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import Admit, Release, RequestSlice, SamplingParams, Volume
from molinkd.worker.request_table import RequestTable

STEP = 0.25
PROFILE = Profile(decode=((64, STEP),), prefill=((64, STEP),))


class Outlet:
    """Records everything that is sent, in order."""

    is_full = False

    def __init__(self) -> None:
        self.log: list[Any] = []

    def send_control(self, body: Any, payload: Any = None) -> None:
        self.log.append(type(body))

    def send_volume(self, header: Volume, rows: Any) -> None:
        self.log.append(header.seq)

    def send_more_rows(self, seq: int, rows: Any) -> None:
        self.log.append(seq)

    def handle_event(self, event: Any) -> None:
        self.log.append(event)


class Steps:
    """An executor whose steps end when the test says so."""

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        self.step_inputs, self.done = step_inputs, done

    def end(self) -> None:
        results = [StepOutput(each.volume, bytearray(8), None) for each in self.step_inputs]
        self.done(StepResult(results, STEP, None))


def test_decode_finish_is_reported_after_its_rows_are_queued() -> None:
    now = 0.0
    steps, outlet = Steps(), Outlet()
    shape = StageShape(1, 3, 2, 16, "f32")
    config = RingConfig(shape, PROFILE, (PROFILE,) * 3)
    ring = Ring(config, RequestTable(), steps, None, lambda: now, pytest.fail)
    ring.open(outlet)
    ring.on_message(Admit(1, 0, SamplingParams(), 4), None)
    ring.on_message(
        Volume(2, False, (RequestSlice(0, 4, 1, 1, (2,)),), Payload("f32", (1, 2))), bytearray(8)
    )
    now = STEP
    steps.end()
    assert outlet.log[1:] == [
        DecodeStartedEvent(1, STEP),
        2,
        DecodeFinishedEvent(1, next_predicted=3 * STEP),
    ]
    ring.on_link_measured(LinkFacts(0.01, 1e6), now)
    ring.on_message(
        Volume(3, False, (RequestSlice(0, 5, 1, 2, ()),), Payload("f32", (1, 2))), bytearray(8)
    )
    now = 4 * STEP
    steps.end()
    round_trip = 3 * STEP + 0.01 + 8 / 1e6
    assert outlet.log[-1].next_predicted == pytest.approx(round_trip)
    ring.on_message(Release(4, 0, 3), None)
    assert not ring._round_trips._expected
