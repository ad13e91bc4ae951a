"""The sending end of a link, with the test as stage and network, in virtual time."""

from typing import Any

import pytest

from molink.errors import Unavailable
from molink.facts.ring_times import LinkFacts
from molink.link.base import LinkName, OutConnectionEvents
from molink.link.estimate.estimator import LinkEstimator
from molink.link.heartbeat import StageProgress
from molink.link.out_link import (
    IDLE_PAUSE,
    MAX_BYTES,
    MAX_PROMPT_GAP,
    MIN_BYTES,
    MIN_RTT,
    SHARE_S,
    OutLink,
    OutLinkEvents,
    TcpKeepWarm,
)
from molink.link.policies.base import DecodeStartedEvent, LinkEstimatedEvent
from molink.link.policies.create import create_policy
from molink.link.sender import LinkSender, SenderLimits
from molink.sim.event_queue import EventQueue
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Ack,
    Channel,
    Frame,
    Heartbeat,
    LinkHello,
    Padding,
    RequestSlice,
    Tombstone,
    Volume,
)
from molink.wire.messages.serving import Cancel


class FakeChannel:
    """A connection that records what is sent."""

    def __init__(self, queue: EventQueue, events: OutConnectionEvents) -> None:
        self.queue = queue
        self.events = events
        self.sent: list[tuple[float, Any]] = []
        self.started = self.is_congested = self.broken = False
        self.redialled: list[float] = []

    def start(self) -> None:
        self.started = True

    def send(self, message: Any, payload: Any = None) -> None:
        if self.broken:
            raise Unavailable("broken")
        self.sent.append((self.queue.now, message))

    def reconnect_now(self) -> None:
        self.redialled.append(self.queue.now)

    def messages(self, kind: type) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]


class Bench:
    """An OutLink between a fake stage and a fake network."""

    def __init__(
        self,
        limits: SenderLimits | None = None,
        known: LinkFacts | None = None,
        probe: bool = False,
        policy: str = "fifo",
        keep_warm: bool = False,
    ) -> None:
        self.queue = EventQueue()
        self.channels: dict[Channel, FakeChannel] = {}
        self.progress = StageProgress(completed_seq=3, num_queued=0, has_requests=False)
        self.deaths: list[str] = []
        estimator = LinkEstimator(known)
        self.sender = LinkSender(7, create_policy(policy), limits, estimator=estimator)
        self.rooms: list[bool] = []
        self.estimates: list[LinkFacts] = []
        events = OutLinkEvents(
            lambda: self.progress,
            self.deaths.append,
            lambda: self.rooms.append(True),
            self.estimates.append,
        )
        name = LinkName("p", 2)
        how = {"probe": probe, "keep_warm": keep_warm}
        self.link = OutLink(self.queue, self.connect, self.sender, name, events, **how)
        self.link.start()
        self.decode, self.bulk = self.channels[Channel.DECODE], self.channels[Channel.BULK]

    def connect(self, channel: Channel, events: OutConnectionEvents) -> FakeChannel:
        self.channels[channel] = FakeChannel(self.queue, events)
        return self.channels[channel]

    def wait(self, seconds: float) -> None:
        """Let that much time pass."""
        until = self.queue.now + seconds
        self.queue.schedule_at(until, lambda: None)
        self.queue.run(until)

    def welcome(self) -> None:
        for channel, connection in self.channels.items():
            connection.events.on_connect()
            connection.events.on_message(Ack(7, channel, self.sender.oldest_frame(channel)), None)

    def heartbeat(self, **fields: Any) -> None:
        heartbeat = Heartbeat(
            **({"epoch": 7, "completed_seq": 1, "queued": 0, "sent_at": 0.0} | fields)
        )
        self.decode.events.on_message(heartbeat, None)


def volume(seq: int, rows: int, prefill: bool) -> tuple[Volume, bytes]:
    header = Volume(seq, prefill, (RequestSlice(1, 0, rows, 0),), Payload("f32", (rows, 2)))
    return header, bytes(8 * rows)


def test_the_hello_comes_first_and_is_repeated_until_it_is_answered() -> None:
    bench = Bench()
    bench.link.send_control(Tombstone(1))
    assert bench.decode.started
    bench.decode.events.on_connect()
    bench.wait(0.6)
    hello = LinkHello("p", 7, 2, Channel.DECODE)
    times = [time for time, message in bench.decode.sent if message == hello]
    assert times == pytest.approx([0.0, 0.25, 0.5], abs=0.01)
    assert len(bench.decode.sent) == 3
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 0), None)
    assert bench.decode.messages(Frame) == [Frame(7, Channel.DECODE, 0, Tombstone(1))]
    bench.wait(1.0)
    assert len(bench.decode.messages(LinkHello)) == 3
    sent = len(bench.decode.sent)
    bench.link.close()
    bench.wait(10.0)
    assert len(bench.decode.sent) == sent


def test_channels_are_sent_in_batches() -> None:
    bench = Bench(SenderLimits(max_message_bytes=8), policy="concurrent")
    bench.welcome()
    bench.link.send_volume(*volume(1, 100, prefill=True))
    bench.link.send_volume(*volume(2, 1, prefill=False))
    assert len(bench.bulk.messages(Frame)) < 100
    bench.wait(0.01)
    assert len(bench.bulk.messages(Frame)) == 100
    assert [frame.body.seq for frame in bench.decode.messages(Frame)] == [2]
    assert bench.link.stats.sent_frames == 101


def test_a_congested_channel_waits_until_it_has_drained() -> None:
    bench = Bench()
    bench.welcome()
    bench.bulk.is_congested = True
    bench.link.send_volume(*volume(1, 1, prefill=True))
    bench.wait(1.0)
    assert bench.bulk.messages(Frame) == []
    bench.bulk.is_congested = False
    bench.bulk.events.on_drained()
    assert len(bench.bulk.messages(Frame)) == 1


def test_reconnect_resends_only_missing_frames() -> None:
    bench = Bench()
    bench.welcome()
    for seq in range(5):
        bench.link.send_control(Tombstone(seq))
    bench.wait(0)
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 1), None)
    bench.decode.events.on_disconnect()
    bench.link.send_control(Tombstone(5))
    bench.decode.sent.clear()
    bench.decode.events.on_connect()
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 3), None)
    bench.wait(0.01)
    assert [frame.frame_number for frame in bench.decode.messages(Frame)] == [3, 4, 5]
    stats = bench.link.stats
    assert (stats.resent, stats.connects) == (2, 3)


def test_connection_break_while_sending_is_handled() -> None:
    bench = Bench()
    bench.welcome()
    bench.decode.broken = True
    bench.link.send_control(Tombstone(1))
    bench.wait(1.0)
    bench.decode.broken = False
    bench.decode.events.on_disconnect()
    bench.decode.events.on_connect()
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 0), None)
    assert [frame.frame_number for frame in bench.decode.messages(Frame)] == [0]


def test_heartbeats_are_frequent_while_requests_live() -> None:
    bench = Bench()
    bench.welcome()
    bench.wait(2.05)
    heartbeats = bench.decode.messages(Heartbeat)
    assert [heartbeat.sent_at for heartbeat in heartbeats] == [0.0, 1.0, 2.0]
    assert (heartbeats[0].epoch, heartbeats[0].completed_seq, heartbeats[0].queued) == (7, 3, 0)
    bench.progress = StageProgress(completed_seq=4, num_queued=1, has_requests=True)
    bench.link.handle_event(DecodeStartedEvent(1, 0.02))
    bench.wait(0.5)
    heartbeats = bench.decode.messages(Heartbeat)[3:]
    assert 4 <= len(heartbeats) <= 6
    assert heartbeats[0].queued == 1
    assert bench.bulk.messages(Heartbeat) == []


def test_the_round_trip_comes_from_the_echo() -> None:
    bench = Bench()
    bench.welcome()
    bench.wait(0.04)
    bench.heartbeat(echo=0.0, epoch=6)
    bench.heartbeat(echo=float("nan"))
    bench.heartbeat(echo=0.02)
    assert bench.link.stats.rtt == 0
    bench.heartbeat(echo=0.0)
    assert bench.link.stats.rtt == pytest.approx(0.04)
    assert bench.link.stats.min_rtt == pytest.approx(0.04)
    assert bench.estimates == [LinkFacts(pytest.approx(0.02))]


def test_new_link_is_probed_once() -> None:
    bench = Bench(probe=True)
    bench.welcome()
    bench.link.send_volume(*volume(1, 1, prefill=True))
    bench.wait(0.01)
    bodies = [frame.body for frame in bench.bulk.messages(Frame)]
    assert all(isinstance(body, Padding) for body in bodies[:-1])
    assert bodies[-1].seq == 1
    nbytes = [body.payload.nbytes for body in bodies[:-1]]
    assert nbytes == [16 * 1024] * 16
    bench.bulk.events.on_message(Ack(7, Channel.BULK, len(bodies)), None)
    assert bench.link.stats.rate > 0
    assert bench.estimates[-1].rate == bench.link.stats.rate
    bench.sender.validate()
    bench.bulk.sent.clear()
    bench.bulk.events.on_disconnect()
    bench.bulk.events.on_connect()
    bench.bulk.events.on_message(Ack(7, Channel.BULK, len(bodies)), None)
    bench.wait(0.01)
    assert bench.bulk.messages(Frame) == []


def test_remembered_link_is_not_probed() -> None:
    bench = Bench(known=LinkFacts(0.03, 1e7), probe=True)
    bench.welcome()
    bench.wait(0.01)
    assert bench.bulk.messages(Frame) == []
    assert bench.estimates[0] == LinkFacts(0.03, 1e7)
    assert bench.link.stats.rate == 1e7


@pytest.mark.parametrize("keep_warm", [True, False])
def test_the_bulk_channel_is_kept_warm_while_requests_live(keep_warm: bool) -> None:
    bench = Bench(known=LinkFacts(0.03, 1e7), policy="adaptive", keep_warm=keep_warm)
    bench.welcome()
    bench.link.send_volume(*volume(1, 1, prefill=True))
    bench.progress = StageProgress(completed_seq=3, num_queued=0, has_requests=True)

    def padding() -> list[int]:
        frames = bench.bulk.messages(Frame)
        return [each.body.payload.nbytes for each in frames if isinstance(each.body, Padding)]

    bench.wait(1.0)
    assert padding() == [], "something is under way"
    bench.bulk.events.on_message(Ack(7, Channel.BULK, 1), None)
    bench.wait(0.35)
    assert sum(padding()) == (50_000 if keep_warm else 0)
    if not keep_warm:
        return
    bench.progress = StageProgress(completed_seq=3, num_queued=0, has_requests=False)
    came = len(bench.bulk.messages(Frame))
    bench.bulk.events.on_message(Ack(7, Channel.BULK, came), None)
    bench.wait(3.0)
    assert sum(padding()) == 50_000, "no request lives"
    bench.sender.validate()


def test_writable_is_reported_when_the_link_has_drained() -> None:
    bench = Bench(SenderLimits(max_total_bytes=512))
    bench.welcome()
    bench.link.send_volume(*volume(1, 64, prefill=True))
    assert bench.link.is_full
    assert bench.rooms == []
    bench.bulk.events.on_message(Ack(7, Channel.BULK, 1), None)
    assert not bench.link.is_full
    assert bench.rooms == [True]
    bench.bulk.events.on_message(Ack(7, Channel.BULK, 1), None)
    assert bench.rooms == [True]


def test_a_dead_stage_is_reported_once() -> None:
    bench = Bench()
    bench.welcome()
    bench.heartbeat(queued=2)
    for _ in range(40):
        bench.wait(0.1)
        bench.heartbeat(queued=2)
    assert bench.deaths == ["2 volumes are queued and none has completed for 3.4 s"]
    bench.wait(10.0)
    assert len(bench.deaths) == 1


def test_ended_process_is_reported_at_once() -> None:
    bench = Bench()
    bench.welcome()
    bench.heartbeat()
    for channel in (bench.decode, bench.bulk):
        channel.events.on_disconnect()
    bench.wait(0.5)
    assert bench.deaths == [], "a connection that breaks is made again"
    for channel in (bench.decode, bench.bulk):
        channel.events.on_lost("its process has ended")
    assert bench.deaths == ["its process has ended"]


def test_silent_link_reconnects_before_it_is_dead() -> None:
    bench = Bench()
    bench.welcome()
    bench.heartbeat()
    bench.wait(1.0)
    bench.heartbeat()
    assert bench.decode.redialled == bench.bulk.redialled == []
    bench.wait(10.0)
    for channel in (bench.decode, bench.bulk):
        assert channel.redialled == pytest.approx([3.2], abs=0.3)
    assert len(bench.deaths) == 1


def test_silence_is_detected_sooner_with_live_requests() -> None:
    bench = Bench()
    bench.progress = StageProgress(completed_seq=3, num_queued=0, has_requests=True)
    bench.welcome()
    bench.heartbeat()
    bench.wait(1.0)
    assert bench.decode.redialled == []
    bench.wait(10.0)
    for channel in (bench.decode, bench.bulk):
        assert channel.redialled[0] == pytest.approx(1.5, abs=0.2)
    (reason,) = bench.deaths
    assert reason in ("no heartbeat for 3.0 s", "no heartbeat for 3.1 s")


def test_acknowledgement_of_an_old_connection_accepts_nothing() -> None:
    bench = Bench()
    bench.welcome()
    bench.link.send_control(Tombstone(1))
    bench.decode.events.on_disconnect()
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 1), None)
    bench.link.send_control(Tombstone(2))
    assert len(bench.decode.messages(Frame)) == 1
    bench.welcome()
    assert [frame.body for frame in bench.decode.messages(Frame)[1:]] == [
        Tombstone(1),
        Tombstone(2),
    ]


def test_next_stage_that_lost_its_state_is_dead() -> None:
    bench = Bench()
    bench.welcome()
    bench.link.send_control(Tombstone(1))
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 1), None)
    bench.decode.events.on_disconnect()
    bench.decode.events.on_connect()
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 0), None)
    assert bench.deaths == ["it lost its state: frame 0 of DECODE again"]


def test_repeated_acknowledgement_is_ignored() -> None:
    bench = Bench()
    bench.welcome()
    bench.link.send_control(Tombstone(1))
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 1), None)
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 0), None)
    assert not bench.deaths


def test_invalid_messages_are_ignored() -> None:
    bench = Bench()
    bench.welcome()
    bench.link.send_control(Tombstone(1))
    before = bench.link.stats.unacknowledged_bytes
    for message in (Ack(6, Channel.DECODE, 1), Ack(7, Channel.BULK, 1), Cancel("k")):
        bench.decode.events.on_message(message, None)
    bench.decode.events.on_message(Ack(7, Channel.DECODE, 99), None)
    assert bench.link.stats.unacknowledged_bytes == before
    assert bench.link.stats.stale_acks == 1
    assert not bench.link.is_full
    bench.link.send_control(Tombstone(2))


FAST = LinkEstimatedEvent(0.06, 0.06, 12.5e6)


def lately(estimate: LinkEstimatedEvent = FAST, at: float = 0.0) -> TcpKeepWarm:
    keep_warm = TcpKeepWarm()
    keep_warm.on_prefill(at)
    keep_warm.on_sent(at)
    return keep_warm


def test_padding_takes_a_fortieth_of_the_link() -> None:
    keep_warm = lately()
    assert keep_warm.due_bytes(FAST, IDLE_PAUSE - 0.01) == 0
    assert keep_warm.due_bytes(FAST, IDLE_PAUSE) == 62_500
    assert pytest.approx(1 / 40) == SHARE_S / (IDLE_PAUSE + 0.01)
    keep_warm.on_sent(IDLE_PAUSE)
    assert keep_warm.due_bytes(FAST, IDLE_PAUSE + 0.1) == 0
    assert keep_warm.due_bytes(FAST, 2 * IDLE_PAUSE) == 62_500


def test_padding_needs_a_recent_prompt() -> None:
    assert TcpKeepWarm().due_bytes(FAST, 100.0) == 0
    keep_warm = lately()
    for seq in range(100):
        keep_warm.on_sent(seq / 5)
    assert keep_warm.due_bytes(FAST, MAX_PROMPT_GAP + 10.1) == 0
    never = TcpKeepWarm()
    never.on_sent(0.0)
    assert never.due_bytes(FAST, 1.0) == 0, "what is sent may be noise"


def test_padding_is_bounded() -> None:
    keep_warm = lately()
    assert keep_warm.due_bytes(LinkEstimatedEvent(0.0, 0.06, None), 1.0) == 0
    assert keep_warm.due_bytes(LinkEstimatedEvent(0.06, 0.06, MIN_BYTES / SHARE_S - 1000), 1.0) == 0
    assert keep_warm.due_bytes(LinkEstimatedEvent(MIN_RTT / 2, MIN_RTT / 2, 12.5e6), 1.0) == 0
    assert keep_warm.due_bytes(LinkEstimatedEvent(0.06, 0.06, 125e6), 1.0) == MAX_BYTES
