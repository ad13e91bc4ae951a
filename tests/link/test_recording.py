"""Recordings of a policy's events, and their replay."""

from collections.abc import Collection
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from molink.errors import UsageError
from molink.link.policies.base import (
    ChannelPolicy,
    ChannelReconnectedEvent,
    DecodeFinishedEvent,
    DecodeStartedEvent,
    HeartbeatEchoedEvent,
    LinkAction,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.create import POLICIES, create_policy
from molink.link.recording import RecordingPolicy, ReplayDifference, replay_recording
from molink.wire.messages.data_plane import Channel

BOTH = [Channel.DECODE, Channel.BULK]
#: One event of each kind, with numbers that have no short decimal.
EVENTS: list[LinkEvent] = [
    RowsProducedEvent(0, Channel.BULK, 3, 8192),
    DecodeStartedEvent(4, 0.1 + 0.2),
    DecodeFinishedEvent(4, 1 / 3),
    DecodeFinishedEvent(4),
    MessageSentEvent(Channel.BULK, 8320),
    MessageAcknowledgedEvent(Channel.DECODE, 128, 2 / 3),
    LinkEstimatedEvent(0.03, 1e-9, 1e300),
    HeartbeatEchoedEvent(0.1 + 0.2),
    LinkEstimatedEvent(0.03, 5e-324),
    ChannelReconnectedEvent(Channel.BULK),
]


class Echo:
    """Decides by the last event, so that every recorded field matters."""

    name = "echo"
    single_channel = False

    def __init__(self) -> None:
        self.told: list[tuple[LinkEvent, float]] = []

    def handle(self, event: LinkEvent, now: float) -> None:
        self.told.append((event, now))

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        return (
            SendRowsAction(len(self.told), 1) if Channel.BULK in ready else WaitAction(now + 1 / 3)
        )


def test_every_kind_of_event_comes_back_exactly() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(LinkEvent))
    lines: list[bytes] = []
    recorded, again = Echo(), Echo()
    recorder = RecordingPolicy(recorded, lines.append)
    for number, event in enumerate(EVENTS):
        recorder.handle(event, number / 7)
        recorder.choose_action(number / 7, BOTH)
        recorder.choose_action(number / 7, [Channel.DECODE])
    assert replay_recording(lines, lambda name: again) == []
    assert again.told == recorded.told


def test_recording_format() -> None:
    lines: list[bytes] = []
    recorder = RecordingPolicy(create_policy("fifo"), lines.append)
    recorder.handle(RowsProducedEvent(0, Channel.DECODE, 2, 16), 0.5)
    assert recorder.choose_action(0.75, BOTH) == SendRowsAction(0, 2)
    assert recorder.choose_action(1.0, []) == WaitAction()
    assert b"".join(lines).decode().splitlines() == [
        '{"policy":"fifo","version":1}',
        '{"at":0.5,"event":"RowsProducedEvent","of":{"volume":0,"channel":0,"rows":2,"row_bytes":16}}',
        '{"at":0.75,"ready":[0,1],"send":[0,2]}',
        '{"at":1.0,"ready":[]}',
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_recording_policy_delegates(name: str) -> None:
    policy = create_policy(name)
    recorder: ChannelPolicy = RecordingPolicy(policy, lambda _: None)
    assert (recorder.name, recorder.single_channel) == (name, policy.single_channel)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_replays_identically(name: str, data: st.DataObject) -> None:
    lines: list[bytes] = []
    recorder = RecordingPolicy(create_policy(name), lines.append)
    now, volumes = 0.0, 0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.floats(0, 0.1))
        event = data.draw(st.sampled_from([*EVENTS, RowsProducedEvent(0, Channel.DECODE, 4, 64)]))
        if isinstance(event, RowsProducedEvent):
            event = replace(event, volume=volumes)
            volumes += 1
        recorder.handle(event, now)
        decision = recorder.choose_action(now, data.draw(st.sampled_from([BOTH, [Channel.BULK]])))
        if isinstance(decision, SendRowsAction):
            recorder.handle(MessageSentEvent(Channel.BULK, 100), now)
    assert replay_recording(lines) == []


def test_differing_decision_is_reported_by_line() -> None:
    lines: list[bytes] = []
    recorder = RecordingPolicy(create_policy("fifo"), lines.append)
    recorder.handle(RowsProducedEvent(0, Channel.BULK, 2, 16), 0.5)
    recorder.choose_action(0.75, BOTH)
    lines[2] = lines[2].replace(b"[0,2]", b"[0,1]")
    assert replay_recording(lines) == [
        ReplayDifference(3, 0.75, SendRowsAction(0, 1), SendRowsAction(0, 2))
    ]
    assert replay_recording([*lines[:2], b'{"at":0.75,"ready":[1]}']) == [
        ReplayDifference(3, 0.75, WaitAction(), SendRowsAction(0, 2))
    ]


def test_truncated_recording_can_be_replayed() -> None:
    lines: list[bytes] = []
    recorder = RecordingPolicy(create_policy("fifo"), lines.append, maximum=1000)
    for number in range(100):
        recorder.handle(RowsProducedEvent(number, Channel.BULK, 1, 16), 0.0)
        assert recorder.choose_action(0.0, BOTH) == SendRowsAction(number, 1)
    assert recorder.is_full
    assert 900 < sum(map(len, lines)) <= 1000
    assert replay_recording(lines) == []


OPENED = b'{"policy":"fifo","version":1}'
SENT = b'{"at":0,"event":"MessageSentEvent","of":{%s}}'


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "is empty"),
        ([b"no json"], "line 1 of the recording: JSON is malformed"),
        ([b"{}"], "line 1 of the recording: .*policy"),
        ([b'{"policy":"fifo","version":2}'], "line 1 of the recording: version 2"),
        ([b'{"policy":"best","version":1}'], "line 1 .* unknown link policy 'best'"),
        ([OPENED, b""], "line 2 of the recording"),
        ([OPENED, b"[1]"], "line 2 of the recording"),
        ([OPENED, b"\xff\xfe"], "line 2 of the recording"),
        ([OPENED, b"{" * 100], "line 2 of the recording"),
        ([OPENED, b"[" * 4000], "line 2 of the recording"),
        ([OPENED, b'"' + b"x" * 5000 + b'"'], "line 2 of the recording: 5002 characters"),
        ([OPENED, OPENED], "line 2 of the recording"),
        ([OPENED, b'{"at":0,"event":"Guess","of":{}}'], "unknown event 'Guess'"),
        (
            [OPENED, b'{"at":0,"event":"MessageSentEvent","of":{"channel":5,"nbytes":1}}'],
            "line 2 .*channel",
        ),
        ([OPENED, b'{"at":0,"event":"MessageSentEvent","of":{"channel":1}}'], "line 2 .*nbytes"),
        (
            [OPENED, b'{"at":0,"event":"MessageSentEvent","of":{"channel":1,"nbytes":-1}}'],
            "nbytes of MessageSentEvent is -1",
        ),
        (
            [
                OPENED,
                b'{"at":0,"event":"RowsProducedEvent","of":{"volume":0,"channel":1,"rows":1,"row_bytes":0}}',
            ],
            "row_bytes of RowsProducedEvent is 0",
        ),
        ([OPENED, b'{"at":0,"ready":[7]}'], "line 2 of the recording"),
        ([OPENED, b'{"at":0,"ready":[1],"send":[1]}'], "line 2 of the recording"),
        ([OPENED, b'{"at":1e999,"ready":[1]}'], "line 2 of the recording"),
        ([OPENED, b'{"at":0,"ready":[1],"what":1}'], "line 2 of the recording"),
    ],
)
def test_invalid_line_is_reported_by_number(lines: list[bytes], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        replay_recording(lines)


def test_lines_may_be_text() -> None:
    assert replay_recording([OPENED.decode(), '{"at":0,"ready":[1]}\n']) == []
