"""The window on a link with one queue, in virtual time."""

import random
import statistics
from collections import deque
from dataclasses import dataclass, field

import pytest

from molink.facts.ring_times import LinkFacts
from molink.link.estimate.estimator import LinkEstimator
from molink.link.policies.base import (
    ChannelReconnectedEvent,
    HeartbeatEchoedEvent,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
)
from molink.link.policies.credit import (
    FILL_FACTOR,
    FIRST_CHUNK,
    HIGH_DELAY,
    LOW_DELAY,
    MAX_CHUNK,
    MAX_SHARE,
    MAX_WINDOW,
    MIN_CHUNK,
    MIN_SHARE,
    SHARE_STEP,
    TARGET_DELAY,
    VOUCH_S,
    CreditWindow,
)
from molink.wire.messages.data_plane import Channel

MBPS = 1e6 / 8


@dataclass
class Bottleneck:
    """A queue served at ``rate`` bytes/s, and ``latency`` seconds each way; both may change.

    The window gets the product's estimates, from chunks and from a heartbeat every 100 ms.
    """

    rate: float
    latency: float
    estimator: LinkEstimator = field(default_factory=LinkEstimator)
    window: CreditWindow = field(default_factory=CreditWindow)
    now: float = 0.0
    #: Times and new rate and latency.
    changes: list[tuple[float, float, float]] = field(default_factory=list)
    #: For each chunk: when it was sent, how long it waited in the queue, when it had left, bytes.
    log: list[tuple[float, float, float, int]] = field(default_factory=list)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    _free_at: float = 0.0
    #: Times of acknowledgement and of sending, and bytes: 0 for a heartbeat.
    _acks: deque[tuple[float, float, int]] = field(default_factory=deque)
    _heartbeat_at: float = 0.0
    #: Upper bound of an acknowledgement's random delay.
    jitter: float = 0.0
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def send(self, total: float, until: float = 1e9) -> float:
        """Send ``total`` bytes as the window allows; returns the time when the last one arrives."""
        arrived = self.now
        while total > 0 and self.now < until:
            if self.now >= self._heartbeat_at:
                self._heartbeat_at = self.now + 0.1
                self.estimator.on_heartbeat_sent(self.now)
                self._transmit(0)
            chunk = int(min(total, self.window.chunk_bytes))
            opens_at = self.window.opens_at
            if self.window.has_credit(chunk) and opens_at <= self.now:
                total -= chunk
                arrived = self._transmit(chunk)
            elif self.window.has_credit(chunk) and not (self._acks and self._acks[0][0] < opens_at):
                self.now = opens_at
            else:
                self._step()
        while self._acks:
            self._step()
        return arrived

    def _transmit(self, nbytes: int) -> float:
        while self.changes and self.now >= self.changes[0][0]:
            _, self.rate, self.latency = self.changes.pop(0)
        start = max(self.now, self._free_at)
        self._free_at = start + nbytes / self.rate
        if nbytes:
            self.log.append((self.now, start - self.now, self._free_at, nbytes))
            self._tell(MessageSentEvent(Channel.BULK, nbytes))
        back = self._free_at + 2 * self.latency
        back += self._random.uniform(0, self.jitter)
        if self._acks:
            back = max(back, self._acks[-1][0])
        self._acks.append((back, self.now, nbytes))
        return self._free_at + self.latency

    def _step(self) -> None:
        self.now, sent_at, nbytes = self._acks.popleft()
        if nbytes:
            self._tell(MessageAcknowledgedEvent(Channel.BULK, nbytes, self.now - sent_at))
        elif self.estimator.on_heartbeat_echoed(sent_at, self.now):
            self._tell(HeartbeatEchoedEvent(self.now - sent_at))
        changes = self.estimator.poll_change(self.now)
        if changes is not None:
            self.window.handle(changes, self.now)
        self.sizes.append((self.now, self.window.size))

    def _tell(self, event: LinkEvent) -> None:
        self.estimator.handle(event, self.now)
        self.window.handle(event, self.now)

    def delays(self, first: float = 0.0, last: float = 1e9) -> list[float]:
        """Queueing delays of the chunks that were sent between two times, sorted."""
        return sorted(wait for sent_at, wait, _, _ in self.log if first <= sent_at < last)

    def used(self, first: float, last: float) -> float:
        """Share of the present rate at which bytes left between two times."""
        nbytes = sum(each for *_, left, each in self.log if first <= left < last)
        return nbytes / (self.rate * (last - first))


def percentile(values: list[float], share: float) -> float:
    return values[int(share * (len(values) - 1))]


def saturated(mbps: float, rtt: float, **options: object) -> Bottleneck:
    link = Bottleneck(mbps * MBPS, rtt / 2, **options)  # type: ignore[arg-type]
    link.send(1e12, until=10.0)
    return link


@pytest.mark.parametrize("mbps", [20, 100, 400])
@pytest.mark.parametrize("rtt", [0.002, 0.03, 0.06, 0.1])
def test_window_fills_the_link_with_a_short_queue(mbps: int, rtt: float) -> None:
    link = saturated(mbps, rtt)
    assert link.used(1.5, 9.5) >= 0.9
    delays = link.delays(1.5, 9.5)
    assert percentile(delays, 0.5) <= 0.015
    assert percentile(delays, 0.99) <= 0.025 if rtt < 0.1 else 0.040


@pytest.mark.parametrize("rtt", [0.002, 0.03, 0.06])
def test_window_is_stable(rtt: float) -> None:
    """In steady state the window stays within an eighth of its mean, for seconds."""
    sizes = [size for at, size in saturated(100, rtt).sizes if at > 2]
    mean = statistics.mean(sizes)
    assert max(sizes) < 1.125 * mean
    assert min(sizes) > 0.875 * mean
    assert 0.85 < mean / (100 * MBPS * (rtt + 0.005 + TARGET_DELAY)) < 1.15


def test_gigabit_lan_is_filled() -> None:
    link = saturated(1000, 0.002)
    assert link.used(1.5, 9.5) >= 0.97
    assert percentile(link.delays(1.5, 9.5), 0.99) <= 0.020


def test_uneven_acknowledgements_are_tolerated() -> None:
    link = saturated(100, 0.03, jitter=0.01)
    assert link.used(1.5, 9.5) >= 0.95
    assert percentile(link.delays(1.5, 9.5), 0.99) <= 0.030


@pytest.mark.parametrize(("known", "maximum"), [(False, 1.4), (True, 1.02)])
def test_whole_prefill_keeps_the_queue_short(known: bool, maximum: float) -> None:
    """14 MB at 100 Mbps with a round trip of 30 ms, compared with a single message."""
    link = Bottleneck(100 * MBPS, 0.015)
    if known:
        link.estimator = LinkEstimator(LinkFacts(link.latency, link.rate))
        link.window.handle(link.estimator.current_estimate(0.0), 0.0)
    took = link.send(14e6)
    assert took <= maximum * (14e6 / link.rate + link.latency)
    assert link.delays()[-1] <= 0.020


def test_window_follows_a_rate_drop() -> None:
    link = saturated(100, 0.03, changes=[(3.0, 20 * MBPS, 0.015)])
    assert link.delays(3.0, 5.0)[-1] <= 0.2
    assert link.delays(5.0, 9.5)[-1] <= 0.02
    assert link.used(3.0, 9.5) >= 0.97


def test_window_follows_a_rate_rise() -> None:
    link = saturated(20, 0.03, changes=[(3.0, 100 * MBPS, 0.015)])
    assert link.used(3.5, 9.5) >= 0.95
    assert percentile(link.delays(3.5, 9.5), 0.99) <= 0.020


def test_window_follows_a_latency_rise() -> None:
    link = saturated(100, 0.03, changes=[(3.0, 100 * MBPS, 0.045)])
    assert link.used(5.0, 9.5) >= 0.95
    assert percentile(link.delays(5.0, 9.5), 0.99) <= 0.030


def test_window_follows_a_latency_drop() -> None:
    link = saturated(100, 0.03, changes=[(3.0, 100 * MBPS, 0.005)])
    assert link.delays(3.0, 9.5)[-1] <= 0.050
    assert link.delays(5.0, 9.5)[-1] <= 0.030
    assert link.used(3.0, 9.5) >= 0.96


def test_two_chunks_always_fit() -> None:
    window = CreditWindow()
    assert window.has_credit(1 << 20)
    window.handle(MessageSentEvent(Channel.BULK, 1 << 20), 0.0)
    assert window.has_credit(1 << 20)
    window.handle(MessageSentEvent(Channel.BULK, 1 << 20), 0.0)
    assert not window.has_credit(1)
    assert window.in_flight == 2 << 20


def test_window_counts_the_bulk_channel_only() -> None:
    window = CreditWindow()
    window.handle(MessageSentEvent(Channel.DECODE, 1000), 0.0)
    window.handle(ChannelReconnectedEvent(Channel.DECODE), 0.0)
    window.handle(MessageAcknowledgedEvent(Channel.DECODE, 1000, 0.03), 0.03)
    assert window.in_flight == 0


def test_resent_bytes_count_once() -> None:
    window = CreditWindow()
    for _ in range(3):
        window.handle(MessageSentEvent(Channel.BULK, 1000), 0.0)
    window.handle(ChannelReconnectedEvent(Channel.BULK), 1.0)
    assert window.in_flight == 0
    for _ in range(3):
        window.handle(MessageSentEvent(Channel.BULK, 1000), 1.0)
    window.handle(MessageAcknowledgedEvent(Channel.BULK, 3000, 0.03), 1.03)
    window.handle(MessageAcknowledgedEvent(Channel.BULK, 3000, 0.03), 1.04)
    assert window.in_flight == 0


def test_a_chunk_is_five_milliseconds_of_the_rate() -> None:
    window = CreditWindow()
    assert window.chunk_bytes == FIRST_CHUNK
    for mbps, chunk in ((100, 62_500), (10, MIN_CHUNK), (1000, MAX_CHUNK)):
        window.handle(LinkEstimatedEvent(0.03, 0.03, mbps * MBPS), 0.0)
        assert window.chunk_bytes == chunk
    assert window.size == 1000 * MBPS * (0.03 + TARGET_DELAY) + MAX_CHUNK
    window.handle(LinkEstimatedEvent(0.3, 0.3, 1000 * MBPS), 0.0)
    assert window.size == MAX_WINDOW


def acknowledged(window: CreditWindow, queued: float, times: int = 1) -> float:
    """A full window of 100 Mbps and 30 ms has its oldest chunk acknowledged, ``queued`` s late."""
    for _ in range(times):
        while window.has_credit(62_500):
            window.handle(MessageSentEvent(Channel.BULK, 62_500), 0.0)
        window.handle(MessageAcknowledgedEvent(Channel.BULK, 62_500, 0.035 + queued), 0.0)
    return window.size


def test_delay_corrects_the_estimate_within_bounds() -> None:
    window = CreditWindow()
    window.handle(LinkEstimatedEvent(0.03, 0.03, 100 * MBPS), 0.0)
    wanted = 100 * MBPS * (0.03 + TARGET_DELAY) + 62_500
    assert window.size == wanted
    assert acknowledged(window, TARGET_DELAY, 100) == wanted
    grown = acknowledged(window, 0.0)
    assert grown == pytest.approx(wanted * (1 + SHARE_STEP * 62_500 / wanted))
    assert acknowledged(window, 0.0, 1000) == pytest.approx(MAX_SHARE * wanted)
    assert acknowledged(window, TARGET_DELAY, 1000) == pytest.approx(wanted)
    assert acknowledged(window, 0.1, 1000) == pytest.approx(MIN_SHARE * wanted)
    window.handle(LinkEstimatedEvent(0.03, 0.03, 20 * MBPS), 0.0)
    assert window.size < 0.25 * wanted


def test_underused_window_does_not_grow() -> None:
    window = CreditWindow()
    window.handle(LinkEstimatedEvent(0.03, 0.03, 100 * MBPS), 0.0)
    before = window.size
    window.handle(MessageSentEvent(Channel.BULK, 62_500), 0.0)
    window.handle(MessageAcknowledgedEvent(Channel.BULK, 62_500, 0.03), 0.03)
    assert window.size == before


def test_empty_window_fills_gradually() -> None:
    window = CreditWindow()
    window.handle(LinkEstimatedEvent(0.03, 0.03, 100 * MBPS), 0.0)
    window.handle(MessageSentEvent(Channel.BULK, 62_500), 1.0)  # 5 ms of the link's rate
    assert window.opens_at == pytest.approx(1.0 + 0.005 / FILL_FACTOR - TARGET_DELAY)
    for _ in range(5):
        window.handle(MessageSentEvent(Channel.BULK, 62_500), 1.0)
    assert window.opens_at == pytest.approx(1.0 + 0.030 / FILL_FACTOR - TARGET_DELAY)
    window.handle(ChannelReconnectedEvent(Channel.BULK), 1.001)
    assert window.opens_at < 1.001


def late(window: CreditWindow, now: float) -> float:
    """The window's size after a window of chunks was acknowledged 100 ms late."""
    for _ in range(8):
        window.handle(MessageAcknowledgedEvent(Channel.BULK, 62_500, 0.135), now)
    return window.size


@pytest.mark.parametrize(
    "message",
    [
        HeartbeatEchoedEvent(0.03 + HIGH_DELAY / 2),
        MessageAcknowledgedEvent(Channel.DECODE, 12_500, 0.031 + HIGH_DELAY / 2),
    ],
)
def test_chunks_late_by_a_loss_do_not_shrink_the_window(message: LinkEvent) -> None:
    """As long as the decode channel finds no queue, the link has none."""
    window = CreditWindow()
    window.handle(LinkEstimatedEvent(0.03, 0.03, 100 * MBPS), 0.0)
    whole = window.size
    window.handle(message, 1.0)
    assert late(window, 1.0) == whole
    assert late(window, 1.0 + VOUCH_S / 2) == whole
    assert late(window, 1.0 + VOUCH_S) < whole


def test_chunks_late_by_a_queue_shrink_it() -> None:
    window = CreditWindow()
    window.handle(LinkEstimatedEvent(0.03, 0.03, 100 * MBPS), 0.0)
    whole = window.size
    window.handle(HeartbeatEchoedEvent(0.03), 1.0)
    window.handle(HeartbeatEchoedEvent(0.03 + 2 * HIGH_DELAY), 1.1)
    assert late(window, 1.1) < whole


def test_window_does_not_grow_with_a_queued_heartbeat() -> None:
    window = CreditWindow()
    window.handle(LinkEstimatedEvent(0.03, 0.03, 100 * MBPS), 0.0)
    whole = window.size
    window.handle(HeartbeatEchoedEvent(0.03 + 2 * LOW_DELAY), -VOUCH_S / 2)
    assert acknowledged(window, 0.0) == whole
    window.handle(HeartbeatEchoedEvent(0.03 + LOW_DELAY / 2), 0.0)
    assert acknowledged(window, 0.0) == whole, "the queue was there just now"
    window = CreditWindow()
    window.handle(LinkEstimatedEvent(0.03, 0.03, 100 * MBPS), 0.0)
    window.handle(HeartbeatEchoedEvent(0.03 + 2 * LOW_DELAY), -VOUCH_S)
    assert acknowledged(window, 0.0) > whole
