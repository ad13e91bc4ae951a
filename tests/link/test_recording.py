"""What is recorded of a policy, and what becomes of it when it is replayed."""

from collections.abc import Collection
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from molink.errors import UsageError
from molink.link.policies.base import (
    Acknowledged,
    Decision,
    DecodeFinished,
    DecodeStarted,
    Echoed,
    Event,
    LanePolicy,
    LinkEstimate,
    Produced,
    Reconnected,
    SendRows,
    Sent,
    Wait,
)
from molink.link.policies.create import POLICIES, create_policy
from molink.link.recording import Difference, RecordedPolicy, replay
from molink.wire.messages.data import Lane

BOTH = [Lane.DECODE, Lane.BULK]
#: One of each kind, with numbers that no short decimal is.
EVENTS: list[Event] = [
    Produced(0, Lane.BULK, 3, 8192),
    DecodeStarted(4, 0.1 + 0.2),
    DecodeFinished(4, 1 / 3),
    DecodeFinished(4),
    Sent(Lane.BULK, 8320),
    Acknowledged(Lane.DECODE, 128, 2 / 3),
    LinkEstimate(0.03, 1e-9, 1e300),
    Echoed(0.1 + 0.2),
    LinkEstimate(0.03, 5e-324),
    Reconnected(Lane.BULK),
]


class Echo:
    """Decides by what it was told last, so that nothing it is told may change."""

    name = "echo"
    one_lane = False

    def __init__(self) -> None:
        self.told: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float) -> None:
        self.told.append((event, now))

    def decide(self, now: float, ready: Collection[Lane]) -> Decision:
        return SendRows(len(self.told), 1) if Lane.BULK in ready else Wait(now + 1 / 3)


def test_every_kind_of_event_comes_back_exactly() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    lines: list[bytes] = []
    recorded, again = Echo(), Echo()
    recorder = RecordedPolicy(recorded, lines.append)
    for number, event in enumerate(EVENTS):
        recorder.handle(event, number / 7)
        recorder.decide(number / 7, BOTH)
        recorder.decide(number / 7, [Lane.DECODE])
    assert replay(lines, lambda name: again) == []
    assert again.told == recorded.told


def test_what_a_recording_looks_like() -> None:
    lines: list[bytes] = []
    recorder = RecordedPolicy(create_policy("fifo"), lines.append)
    recorder.handle(Produced(0, Lane.DECODE, 2, 16), 0.5)
    assert recorder.decide(0.75, BOTH) == SendRows(0, 2)
    assert recorder.decide(1.0, []) == Wait()
    assert b"".join(lines).decode().splitlines() == [
        '{"policy":"fifo","version":1}',
        '{"at":0.5,"event":"Produced","of":{"volume":0,"lane":0,"rows":2,"row_bytes":16}}',
        '{"at":0.75,"ready":[0,1],"send":[0,2]}',
        '{"at":1.0,"ready":[]}',
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_a_recorder_is_the_policy_that_it_wraps(name: str) -> None:
    policy = create_policy(name)
    recorder: LanePolicy = RecordedPolicy(policy, lambda _: None)
    assert (recorder.name, recorder.one_lane) == (name, policy.one_lane)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_decides_the_same_again(name: str, data: st.DataObject) -> None:
    lines: list[bytes] = []
    recorder = RecordedPolicy(create_policy(name), lines.append)
    now, volumes = 0.0, 0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.floats(0, 0.1))
        event = data.draw(st.sampled_from([*EVENTS, Produced(0, Lane.DECODE, 4, 64)]))
        if isinstance(event, Produced):
            event = replace(event, volume=volumes)
            volumes += 1
        recorder.handle(event, now)
        decision = recorder.decide(now, data.draw(st.sampled_from([BOTH, [Lane.BULK]])))
        if isinstance(decision, SendRows):
            recorder.handle(Sent(Lane.BULK, 100), now)
    assert replay(lines) == []


def test_a_decision_that_comes_out_otherwise_is_told_by_its_line() -> None:
    lines: list[bytes] = []
    recorder = RecordedPolicy(create_policy("fifo"), lines.append)
    recorder.handle(Produced(0, Lane.BULK, 2, 16), 0.5)
    recorder.decide(0.75, BOTH)
    lines[2] = lines[2].replace(b"[0,2]", b"[0,1]")
    assert replay(lines) == [Difference(3, 0.75, SendRows(0, 1), SendRows(0, 2))]
    assert replay([*lines[:2], b'{"at":0.75,"ready":[1]}']) == [
        Difference(3, 0.75, Wait(), SendRows(0, 2))
    ]


def test_a_recording_ends_at_its_bound_and_can_be_replayed_up_to_there() -> None:
    lines: list[bytes] = []
    recorder = RecordedPolicy(create_policy("fifo"), lines.append, maximum=1000)
    for number in range(100):
        recorder.handle(Produced(number, Lane.BULK, 1, 16), 0.0)
        assert recorder.decide(0.0, BOTH) == SendRows(number, 1)
    assert recorder.full
    assert 900 < sum(map(len, lines)) <= 1000
    assert replay(lines) == []


OPENED = b'{"policy":"fifo","version":1}'


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "is empty"),
        ([b"no json"], "line 1 of the recording: JSON is malformed"),
        ([b"{}"], "line 1 of the recording: .*policy"),
        ([b'{"policy":"fifo","version":2}'], "line 1 of the recording: version 2"),
        ([b'{"policy":"best","version":1}'], "line 1 .* no transmission policy 'best'"),
        ([OPENED, b""], "line 2 of the recording"),
        ([OPENED, b"[1]"], "line 2 of the recording"),
        ([OPENED, b"\xff\xfe"], "line 2 of the recording"),
        ([OPENED, b"{" * 100], "line 2 of the recording"),
        ([OPENED, b"[" * 4000], "line 2 of the recording"),
        ([OPENED, b'"' + b"x" * 5000 + b'"'], "line 2 of the recording: 5002 characters"),
        ([OPENED, OPENED], "line 2 of the recording"),
        ([OPENED, b'{"at":0,"event":"Guess","of":{}}'], "no event 'Guess'"),
        ([OPENED, b'{"at":0,"event":"Sent","of":{"lane":5,"nbytes":1}}'], "line 2 .*lane"),
        ([OPENED, b'{"at":0,"event":"Sent","of":{"lane":1}}'], "line 2 .*nbytes"),
        ([OPENED, b'{"at":0,"event":"Sent","of":{"lane":1,"nbytes":-1}}'], "nbytes of Sent is -1"),
        (
            [
                OPENED,
                b'{"at":0,"event":"Produced","of":{"volume":0,"lane":1,"rows":1,"row_bytes":0}}',
            ],
            "row_bytes of Produced is 0",
        ),
        ([OPENED, b'{"at":0,"ready":[7]}'], "line 2 of the recording"),
        ([OPENED, b'{"at":0,"ready":[1],"send":[1]}'], "line 2 of the recording"),
        ([OPENED, b'{"at":1e999,"ready":[1]}'], "line 2 of the recording"),
        ([OPENED, b'{"at":0,"ready":[1],"what":1}'], "line 2 of the recording"),
    ],
)
def test_garbage_is_refused_by_its_line(lines: list[bytes], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        replay(lines)


def test_lines_may_be_text() -> None:
    assert replay([OPENED.decode(), '{"at":0,"ready":[1]}\n']) == []
