"""The estimator against a small simulated link in virtual time that changes."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.ring_times import LinkFacts
from molink.link.estimate.estimator import LinkEstimator
from molink.link.policies.base import (
    ChannelReconnectedEvent,
    DecodeStartedEvent,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
)
from molink.wire.messages.data_plane import Channel

MBPS = 125_000.0
_HEARTBEAT = 0.1
_ACK_EVERY, _ACK_DELAY = 8, 0.005
_HEARTBEAT_BYTES = 64


@dataclass
class Path:
    """The bottleneck's rate in bytes/s, the one-way latency and its jitter in seconds."""

    rate: float
    latency: float
    jitter: float = 0.0
    padding: random.Random = field(default_factory=lambda: random.Random(1))

    def delay(self) -> float:
        return self.padding.random() * self.jitter


@dataclass
class _InChannel:
    waiting: list[tuple[int, float]] = field(default_factory=list)
    last: float = 0.0
    back: float = 0.0


class Pipe:
    """Runs one estimator's sender against a path; ``seen`` has what it estimated, and when."""

    def __init__(self, path: Path, estimator: LinkEstimator | None = None) -> None:
        self.path = path
        self.estimator = estimator or LinkEstimator()
        self.now = 0.0
        self.in_flight = dict.fromkeys(Channel, 0)
        self.seen: list[tuple[float, LinkFacts]] = []
        self.told: list[tuple[float, LinkEstimatedEvent]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()
        self._queue: deque[tuple[int, Callable[[], None], Channel]] = deque()
        self._channels = {channel: _InChannel() for channel in Channel}
        #: Called after every acknowledgement: what sends when there is room.
        self.refill: Callable[[], None] = lambda: None

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), act))

    def every(self, period: float, act: Callable[[], None], until: float = 1e9) -> None:
        def again() -> None:
            if self.now < until:
                act()
                self.at(self.now + period, again)

        self.at(self.now, again)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
            if (changes := self.estimator.poll_change(self.now)) is not None:
                self.told.append((self.now, changes))
            self.seen.append((self.now, self.estimator.current_facts(self.now)))
        self.now = until

    # --- sending -----------------------------------------------------------------------------

    def heartbeats(self) -> None:
        self.every(_HEARTBEAT, self.heartbeat)

    def heartbeat(self) -> None:
        sent_at = self.now
        self.estimator.on_heartbeat_sent(sent_at)
        self._carry(_HEARTBEAT_BYTES, lambda: self._answer(sent_at))

    def _answer(self, sent_at: float) -> None:
        back = self._back(Channel.DECODE)

        def come_back() -> None:
            assert self.estimator.on_heartbeat_echoed(sent_at, self.now)

        self.at(back, come_back)

    def send(self, nbytes: int, channel: Channel = Channel.BULK) -> None:
        sent_at = self.now
        self.in_flight[channel] += nbytes
        self._tell(MessageSentEvent(channel, nbytes))
        self._carry(nbytes, lambda: self._arrive(channel, nbytes, sent_at), channel)

    def _carry(
        self, nbytes: int, arrive: Callable[[], None], channel: Channel = Channel.DECODE
    ) -> None:
        """Through the narrowest point, which serves one message after another, and across."""
        self._queue.append((nbytes, arrive, channel))
        if len(self._queue) == 1:
            self._serve()

    def _serve(self) -> None:
        nbytes, arrive, channel = self._queue[0]
        self.at(self.now + nbytes / self.path.rate, lambda: self._served(arrive, channel))

    def _served(self, arrive: Callable[[], None], channel: Channel) -> None:
        self._queue.popleft()
        into = self._channels[channel]
        into.last = max(into.last, self.now + self.path.latency + self.path.delay())
        self.at(into.last, arrive)
        if self._queue:
            self._serve()

    def fill(self, window: int, chunk: int, left: list[int]) -> None:
        """Send ``left[0]`` bytes in chunks, at most ``window`` bytes of them under way."""

        def refill() -> None:
            while left[0] > 0 and self.in_flight[Channel.BULK] + chunk <= window:
                left[0] -= chunk
                self.send(chunk)

        self.refill = refill
        refill()

    # --- receiving ---------------------------------------------------------------------------

    def _arrive(self, channel: Channel, nbytes: int, sent_at: float) -> None:
        waiting = self._channels[channel].waiting
        waiting.append((nbytes, sent_at))
        if channel is Channel.BULK or len(waiting) >= _ACK_EVERY:
            self._acknowledge(channel)
        elif len(waiting) == 1:
            self.at(self.now + _ACK_DELAY, lambda: self._acknowledge(channel))

    def _acknowledge(self, channel: Channel) -> None:
        waiting, self._channels[channel].waiting = self._channels[channel].waiting, []
        if waiting:
            back = self._back(channel)
            nbytes, newest = sum(each for each, _ in waiting), waiting[-1][1]
            self.at(back, lambda: self._landed(channel, nbytes, newest))

    def _back(self, channel: Channel) -> float:
        """When what leaves the receiver now will be back: nothing overtakes on a connection."""
        into = self._channels[channel]
        into.back = max(into.back, self.now + self.path.latency + self.path.delay())
        return into.back

    def _landed(self, channel: Channel, nbytes: int, newest: float) -> None:
        self.in_flight[channel] -= nbytes
        self._tell(MessageAcknowledgedEvent(channel, nbytes, self.now - newest))
        self.refill()

    def _tell(self, event: LinkEvent) -> None:
        self.estimator.handle(event, self.now)


# --- how it adapts ---------------------------------------------------------------------------

FAST, SLOW = 100 * MBPS, 20 * MBPS
NEAR, FAR = 0.030, 0.090
#: When the link changes, by when the estimate has to agree, and until when it is watched.
CHANGE, ADAPTED, END = 6.0, 8.0, 12.0
PROBES, PROBE = 16, 16 * 1024
#: Bytes in flight: a little more than the link holds itself while it is fast and near.
WINDOW, CHUNK = 850_000, 50_000


def probe(pipe: Pipe) -> None:
    for _ in range(PROBES):
        pipe.send(PROBE)


def steady(pipe: Pipe) -> None:
    """Prefills without end, in chunks."""
    pipe.fill(WINDOW, CHUNK, [1 << 40])


def prefills(pipe: Pipe) -> None:
    """4 MB every 2 s, in chunks."""
    left = [0]
    pipe.fill(WINDOW, CHUNK, left)

    def more() -> None:
        left[0] = max(left[0], 0) + 4_000_000
        pipe.refill()

    pipe.every(2.0, more)


def gaps(pipe: Pipe) -> None:
    """6 chunks every 90 ms, between decodes."""

    def chunks() -> None:
        if pipe.in_flight[Channel.BULK] < 600_000:
            for _ in range(6):
                pipe.send(62_500)

    pipe.every(0.09, chunks)


def whole(pipe: Pipe) -> None:
    """Prefills without end, of which 8 MiB stand in the queue."""
    pipe.fill(8 << 20, 192 * 1024, [1 << 40])


def decodes(pipe: Pipe) -> None:
    """Sends decode rows only."""


Load = Callable[[Pipe], None]


def run(load: Load, before: Path, rate: float, latency: float, end: float = END) -> Pipe:
    """A link like ``before`` that gets another rate and latency at :data:`CHANGE`."""
    path = replace(before, padding=random.Random(1))
    pipe = Pipe(path)
    pipe.heartbeats()
    pipe.every(0.11, lambda: pipe.send(14_000, Channel.DECODE))
    pipe.at(0.01, lambda: probe(pipe))
    pipe.at(0.6, lambda: load(pipe))

    def change() -> None:
        path.rate, path.latency = rate, latency

    pipe.at(CHANGE, change)
    pipe.run(end)
    return pipe


def rates(pipe: Pipe, begin: float, end: float = END) -> list[float]:
    return [facts.rate or 0.0 for at, facts in pipe.seen if begin <= at <= end]


def latencies(pipe: Pipe, begin: float, end: float = END) -> list[float]:
    return [facts.latency or 0.0 for at, facts in pipe.seen if begin <= at <= end]


def agree(values: list[float], truth: float, share: float) -> bool:
    return (1 - share) * truth <= min(values) and max(values) <= (1 + share) * truth


@pytest.mark.parametrize("jitter", [0.0, 0.001])
@pytest.mark.parametrize("load", [steady, prefills, gaps, whole])
@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST)])
def test_the_rate_is_known_within_two_seconds_of_its_change(
    load: Load, before: float, after: float, jitter: float
) -> None:
    pipe = run(load, Path(before, NEAR, jitter), after, NEAR)
    assert agree(rates(pipe, 4.0, CHANGE), before, 0.15)
    assert agree(rates(pipe, ADAPTED), after, 0.15)
    assert agree(latencies(pipe, 4.0), NEAR, 0.15)


@pytest.mark.parametrize("jitter", [0.0, 0.001])
@pytest.mark.parametrize("load", [steady, prefills, gaps, decodes])
@pytest.mark.parametrize(("before", "after"), [(NEAR, FAR), (FAR, NEAR)])
def test_the_latency_is_known_within_two_seconds_of_its_change(
    load: Load, before: float, after: float, jitter: float
) -> None:
    pipe = run(load, Path(FAST, before, jitter), FAST, after)
    assert agree(latencies(pipe, 4.0, CHANGE), before, 0.15)
    assert agree(latencies(pipe, ADAPTED), after, 0.15)
    assert agree(rates(pipe, ADAPTED + 1.0), FAST, 0.15)


@pytest.mark.parametrize("load", [steady, prefills, gaps])
def test_unchanged_estimate_is_not_reported(load: Load) -> None:
    pipe = run(load, Path(FAST, NEAR), FAST, NEAR)
    told = [changes.rate for at, changes in pipe.told if at >= 4.0]
    assert len([rate for rate, after in pairwise(told) if rate != after]) <= 1
    assert max(rates(pipe, 4.0)) <= 1.05 * min(rates(pipe, 4.0))


def test_small_messages_do_not_lower_the_rate() -> None:
    pipe = run(
        lambda pipe: pipe.fill(WINDOW, CHUNK, [4_000_000]), Path(FAST, NEAR), FAST, NEAR, end=60.0
    )
    assert agree(rates(pipe, 2.0, 60.0), FAST, 0.1)
    assert agree(latencies(pipe, 2.0, 60.0), NEAR, 0.1)


@pytest.mark.parametrize("one_is_late", [False, True])
def test_tcp_backpressure_does_not_lower_the_rate(one_is_late: bool) -> None:
    """A TCP window that restarts or recovers isn't a slower link: heartbeats are on time.

    One of three heartbeats may be late because of an event loop.
    """
    pipe = Pipe(Path(FAST, NEAR))
    pipe.heartbeats()
    back, heartbeats = pipe._back, count()

    def late(channel: Channel) -> float:
        return back(channel) + (0.01 if one_is_late and next(heartbeats) % 3 == 0 else 0.0)

    pipe._back = late  # type: ignore[method-assign]
    pipe.at(0.01, lambda: probe(pipe))
    pipe.at(0.6, lambda: steady(pipe))
    carry, free = pipe._carry, [0.0]

    def held(nbytes: int, arrive: Callable[[], None], channel: Channel = Channel.DECODE) -> None:
        if channel is Channel.DECODE or pipe.now < CHANGE:
            carry(nbytes, arrive, channel)
            return
        free[0] = max(free[0], pipe.now) + nbytes / (40 * MBPS)
        pipe.at(free[0], lambda: carry(nbytes, arrive, channel))

    pipe._carry = held  # type: ignore[method-assign]
    pipe.run(END)
    assert agree(rates(pipe, 2.0), FAST, 0.1)


@pytest.mark.parametrize("rate", [SLOW, FAST])
def test_a_probe_gives_a_first_rate(rate: float) -> None:
    pipe = Pipe(Path(rate, NEAR))
    pipe.heartbeats()
    pipe.at(0.0, lambda: probe(pipe))
    pipe.run(0.4)
    assert agree([pipe.estimator.current_facts(0.4).rate or 0.0], rate, 0.15)


def test_a_probe_on_a_fast_link_gives_a_lower_bound() -> None:
    pipe = Pipe(Path(1000 * MBPS, 0.0005))
    pipe.heartbeats()
    pipe.at(0.05, lambda: probe(pipe))
    pipe.run(0.2)
    assert 300 * MBPS < (pipe.estimator.current_facts(0.2).rate or 0.0) <= 1000 * MBPS


# --- single events ---------------------------------------------------------------------------


def test_new_link_is_unknown() -> None:
    estimator = LinkEstimator()
    assert estimator.current_facts(0.0) == LinkFacts()
    assert estimator.poll_change(0.0) is None
    assert not estimator.on_heartbeat_echoed(0.0, 1.0)


def test_remembered_facts_count_until_measured() -> None:
    estimator = LinkEstimator(LinkFacts(0.03, 1e7))
    assert estimator.poll_change(0.0) == LinkEstimatedEvent(0.06, 0.06, 1e7)
    assert estimator.poll_change(0.1) is None
    estimator.on_heartbeat_sent(1.0)
    assert estimator.on_heartbeat_echoed(1.0, 1.02)
    assert not estimator.on_heartbeat_echoed(1.0, 1.03), "it came back already"
    assert estimator.current_facts(1.02) == LinkFacts(pytest.approx(0.01), 1e7)
    pipe = Pipe(Path(SLOW, NEAR), LinkEstimator(LinkFacts(0.005, FAST)))
    pipe.heartbeats()
    pipe.at(0.1, lambda: steady(pipe))
    pipe.run(4.0)
    assert agree(rates(pipe, 2.0), SLOW, 0.15)
    assert agree(latencies(pipe, 2.0), NEAR, 0.15)


def test_unknown_echo_is_ignored() -> None:
    estimator = LinkEstimator()
    estimator.on_heartbeat_sent(1.0)
    for echo in (math.nan, 0.5, -1.0):
        assert not estimator.on_heartbeat_echoed(echo, 1.1)
    assert estimator.on_heartbeat_echoed(1.0, 1.1)
    assert estimator.current_facts(1.1).latency == pytest.approx(0.05)


def test_broken_connection_clears_messages_in_flight() -> None:
    estimator = LinkEstimator()
    for channel in Channel:
        estimator.handle(MessageSentEvent(channel, 1000), 0.0)
        estimator.handle(ChannelReconnectedEvent(channel), 1.0)
        estimator.handle(MessageSentEvent(channel, 1000), 1.0)
        estimator.handle(MessageAcknowledgedEvent(channel, 1000, 0.1), 1.1)
    assert estimator._meter.in_flight == 0


def test_resent_message_arrives_once() -> None:
    estimator = LinkEstimator()
    for at in (0.0, 10.0):
        for each in range(3):
            estimator.handle(MessageSentEvent(Channel.BULK, 1000), at + each / 10)
    estimator.handle(MessageAcknowledgedEvent(Channel.BULK, 3000, 0.1), 10.3)
    assert estimator._meter.in_flight == 0


amounts = st.integers(1, 256 * 1024)
seconds = st.floats(0, 20)
events = st.one_of(
    st.builds(MessageSentEvent, st.sampled_from(Channel), amounts),
    st.builds(MessageAcknowledgedEvent, st.sampled_from(Channel), amounts, seconds),
    st.builds(ChannelReconnectedEvent, st.sampled_from(Channel)),
    st.just(DecodeStartedEvent(1, 0.1)),
    st.sampled_from(["leaves", "back"]),
    st.floats(),
)


@given(st.lists(st.tuples(events, st.one_of(st.just(0.0), st.floats(-1, 5)))))
def test_estimate_is_always_valid(
    story: list[tuple[LinkEvent | str | float, float]],
) -> None:
    estimator, now, left = LinkEstimator(), 0.0, 0.0
    for event, pause in story:
        now += pause
        if event == "leaves":
            left = now
            estimator.on_heartbeat_sent(now)
        elif event == "back":
            estimator.on_heartbeat_echoed(left, now)
        elif isinstance(event, float):
            estimator.on_heartbeat_echoed(event, now)
        elif not isinstance(event, str):
            estimator.handle(event, now)
        facts = estimator.current_facts(now)
        for value in (facts.latency, facts.rate):
            assert value is None or (math.isfinite(value) and value >= 0)
        assert facts.rate is None or 0 < facts.rate <= 1e12
        assert estimator._meter.in_flight >= 0
        changes = estimator.poll_change(now)
        assert changes is None or math.isfinite(changes.rtt + changes.min_rtt)


def test_rate_is_at_least_the_carried_bytes() -> None:
    """The link is never busy with single, even messages, but it carries their bytes."""
    pipe = Pipe(Path(FAST, NEAR), LinkEstimator(LinkFacts(NEAR, SLOW)))
    pipe.heartbeats()
    pipe.every(0.02, lambda: pipe.send(100_000))
    pipe.run(4.0)
    assert agree(rates(pipe, 1.0), 40 * MBPS, 0.05)
