"""Properties of every policy under any sequence of events."""

from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from molink.errors import UsageError
from molink.link.policies.adaptive import MAX_CHUNK_INTERVAL
from molink.link.policies.base import (
    ChannelReconnectedEvent,
    DecodeFinishedEvent,
    DecodeStartedEvent,
    LinkAction,
    LinkEstimatedEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.create import POLICIES, create_policy
from molink.wire.messages.data_plane import Channel

BOTH = (Channel.DECODE, Channel.BULK)
#: Bytes of one message.
MESSAGE = 192 * 1024


@dataclass
class Wire:
    """Drives a policy as a sender does, and counts its rows."""

    name: str
    now: float = 0.0
    ready: Collection[Channel] = BOTH
    #: Rows produced but not sent, by volume, with their size and kind.
    left: dict[int, tuple[int, int, Channel]] = field(default_factory=dict)
    volumes: int = 0
    #: Messages in flight.
    flying: list[tuple[Channel, int, float]] = field(default_factory=list)
    decisions: list[LinkAction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = create_policy(self.name)

    def produce(self, kind: Channel, rows: int, row_bytes: int) -> None:
        self.left[self.volumes] = (rows, row_bytes, kind)
        self.policy.handle(RowsProducedEvent(self.volumes, kind, rows, row_bytes), self.now)
        self.volumes += 1

    def grow(self, which: int, rows: int) -> None:
        if self.volumes == 0:
            return
        volume = which % self.volumes
        before, row_bytes, kind = self.left[volume]
        self.left[volume] = (before + rows, row_bytes, kind)
        self.policy.handle(RowsProducedEvent(volume, kind, rows, row_bytes), self.now)

    def decide(self) -> LinkAction:
        decision = self.policy.choose_action(self.now, self.ready)
        self.decisions.append(decision)
        if isinstance(decision, SendRowsAction):
            left, row_bytes, kind = self.left[decision.volume]
            assert 1 <= decision.rows <= left, "no rows are sent that aren't there"
            channel = Channel.BULK if self.policy.single_channel else kind
            assert channel in self.ready
            self.left[decision.volume] = (left - decision.rows, row_bytes, kind)
            self._transmit(channel, decision.rows * row_bytes)
        return decision

    def _transmit(self, channel: Channel, nbytes: int) -> None:
        while nbytes > 0:
            fragment = min(nbytes, MESSAGE)
            self.policy.handle(MessageSentEvent(channel, fragment + 128), self.now)
            self.flying.append((channel, fragment + 128, self.now))
            nbytes -= fragment

    def acknowledge(self, count: int) -> None:
        for channel, nbytes, sent_at in self.flying[:count]:
            self.policy.handle(
                MessageAcknowledgedEvent(channel, nbytes, self.now - sent_at), self.now
            )
        del self.flying[:count]

    def reconnect(self, channel: Channel) -> None:
        """Send everything in flight on ``channel`` again."""
        self.policy.handle(ChannelReconnectedEvent(channel), self.now)
        for each, nbytes, _ in self.flying:
            if each is channel:
                self.policy.handle(MessageSentEvent(each, nbytes), self.now)

    def drain(self) -> None:
        """With ready channels and acknowledged messages, all rows are sent in bounded time."""
        self.ready = BOTH
        for _ in range(10_000):
            if not any(rows for rows, _, _ in self.left.values()):
                return
            decision = self.decide()
            if isinstance(decision, WaitAction):
                assert self.flying or decision.until is not None, "nobody would ever ask again"
                if decision.until is not None:
                    assert decision.until > self.now, "it would ask again at once"
                    self.now = decision.until
                else:
                    self.now += 0.001
                    self.acknowledge(1)
        raise AssertionError(f"{self.name} starves {self.left}")


rows_of = st.integers(1, 60)
row_bytes_of = st.sampled_from([128, 4096, 8192, 65_536])
step = st.one_of(
    st.tuples(st.just("produce"), st.sampled_from(Channel), rows_of, row_bytes_of),
    st.tuples(st.just("grow"), st.integers(0, 50), rows_of),
    st.tuples(st.just("decide"), st.integers(1, 20)),
    st.tuples(st.just("acknowledge"), st.integers(1, 5)),
    st.tuples(st.just("pass"), st.floats(0, 0.2)),
    st.tuples(st.just("ready"), st.sets(st.sampled_from(Channel))),
    st.tuples(st.just("start"), st.floats(0, 0.1)),
    st.tuples(st.just("finish"), st.one_of(st.none(), st.floats(0, 0.3))),
    st.tuples(st.just("estimate"), st.one_of(st.none(), st.floats(1e5, 1e9))),
    st.tuples(st.just("reconnect"), st.sampled_from(Channel)),
)


def play(wire: Wire, what: str, *args: object) -> None:
    match what, args:
        case "decide", (int(times),):
            for _ in range(times):
                wire.decide()
        case "pass", (float(seconds),):
            wire.now += seconds
        case "ready", (set(channels),):
            wire.ready = sorted(channels)
        case "start", (float(predicted),):
            wire.policy.handle(DecodeStartedEvent(4, predicted), wire.now)
        case "finish", (float() | None as after,):
            wire.policy.handle(DecodeFinishedEvent(4, after), wire.now)
        case "estimate", (float() | None as rate,):
            wire.policy.handle(LinkEstimatedEvent(0.03, 0.03, rate), wire.now)
        case _:
            getattr(wire, what)(*args)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=st.lists(step, min_size=10, max_size=40))
@settings(max_examples=60, deadline=None)
def test_all_rows_are_sent(name: str, steps: list[tuple[str]]) -> None:
    wire, twin = Wire(name), Wire(name)
    for each in steps:
        play(wire, *each)
        play(twin, *each)
    wire.drain()
    twin.drain()
    assert wire.decisions == twin.decisions, "the same events, the same decisions"
    assert isinstance(wire.decide(), WaitAction)


#: No decision is asked for until a chunk is due again.
LATE = [
    ("produce", Channel.DECODE, 1, 128),
    ("produce", Channel.BULK, 1, 128),
    ("produce", Channel.BULK, 1, 128),
    ("pass", 2 * MAX_CHUNK_INTERVAL),
    ("decide", 1),
    ("pass", 2 * MAX_CHUNK_INTERVAL),
    ("decide", 1),
]


@pytest.mark.parametrize("name", ["adaptive", "adaptive-unpredicted"])
@given(steps=st.lists(step, min_size=10, max_size=40))
@example(steps=LATE)
@settings(max_examples=60, deadline=None)
def test_decode_waits_for_one_chunk_at_most(name: str, steps: list[tuple[str]]) -> None:
    """Between two decode volumes, at most one chunk; and after one, none for 50 ms."""
    wire = Wire(name)
    chunk_at = -MAX_CHUNK_INTERVAL
    waited = False

    def decide() -> None:
        nonlocal chunk_at, waited
        waiting = Channel.DECODE in wire.ready and any(
            rows for rows, _, kind in wire.left.values() if kind is Channel.DECODE
        )
        decision = wire.decide()
        if not isinstance(decision, SendRowsAction):
            assert not waiting, "a decode volume that can go goes"
            return
        _, row_bytes, kind = wire.left[decision.volume]
        if kind is Channel.BULK:
            assert decision.rows == 1 or decision.rows * row_bytes <= 256 * 1024
            assert not (waiting and waited), "a second chunk while a decode volume waits"
            assert not waiting or wire.now >= chunk_at + MAX_CHUNK_INTERVAL
            waited = waiting
            if waiting:
                chunk_at = wire.now
        else:
            waited = False

    for what, *args in steps:
        if what == "decide":
            for _ in range(args[0]):  # type: ignore[call-overload]
                decide()
        else:
            play(wire, what, *args)


def test_policies_by_name() -> None:
    assert POLICIES == ("concurrent", "fifo", "molink", "adaptive", "adaptive-unpredicted")
    for name in POLICIES:
        assert create_policy(name).name == name
    assert [name for name in POLICIES if create_policy(name).single_channel] == ["fifo", "molink"]
    with pytest.raises(UsageError, match="choose from concurrent, fifo, molink, adaptive"):
        create_policy("lifo")
