"""What a sender can tell of its link: latency and rate, without I/O."""

from molink.facts.ring_times import LinkFacts
from molink.link.estimate.rate import RateMeter
from molink.link.heartbeat import BUSY_INTERVAL, RoundTripEstimator
from molink.link.policies.base import (
    ChannelReconnectedEvent,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
)

#: Relative changes that are worth telling a policy: of the rate and the least round trip, and of
#: the smoothed one, which never rests; and the seconds below which a change of round trips is none,
#: as much as an event loop is late.
NOTICEABLE_SHARE = 0.05
_NOTICEABLE_SMOOTH = 0.2
_NOTICEABLE_SECONDS = 0.0003
#: Seconds between two looks for the least round trip: it is asked for with each acknowledgement,
#: thousands of times a second, and changes with heartbeats.
_CHECK_INTERVAL = BUSY_INTERVAL
#: Seconds by which a heartbeat is late if there is a queue, and how many have to be on end: a
#: single one may be late because a loop was.
_QUEUE_DELAY = 0.004
_LATE_HEARTBEATS = 2


class LinkEstimator:
    """Estimates one link from what its sender knows.

    It hears of messages that are sent and acknowledged (:meth:`handle`) and of heartbeats that
    leave and come back. Latency is half the least round trip of late, rate the greatest of late
    that the link delivered while it had something to deliver. Both follow a link that changes
    within 2 s, and stay as they are while nothing tells otherwise.
    """

    def __init__(self, start: LinkFacts | None = None) -> None:
        """``start`` is what is remembered of the link: replaced as soon as it is measured."""
        start = start or LinkFacts()
        self._round_trip = RoundTripEstimator(None if start.latency is None else 2 * start.latency)
        self._meter = RateMeter(start.rate)
        self._now = 0.0
        #: The least round trip, and when to look for it again.
        self._cached_min_rtt: float | None = None
        self._check_at = 0.0
        self._reported: LinkEstimatedEvent | None = None
        #: As it was when somebody last asked for news.
        self._last_polled: tuple[float, float, float | None] | None = None
        #: Heartbeats on end that were late.
        self._late_heartbeats = 0

    # --- events ------------------------------------------------------------------------------

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take note of messages that were sent or acknowledged; other events are ignored."""
        now = self._at(now)
        match event:
            case MessageSentEvent():
                self._meter.on_sent(event.channel, event.nbytes, now)
            case MessageAcknowledgedEvent(channel, nbytes, elapsed):
                minimum = self._minimum()
                if (minimum is None or elapsed < minimum) and self._round_trip.add_upper_bound(
                    elapsed, now
                ):
                    self._check_at = now
                self._meter.on_acknowledged(channel, nbytes, elapsed, self._minimum(), now)
            case ChannelReconnectedEvent():
                self._meter.reset_channel(event.channel)

    def on_heartbeat_sent(self, now: float) -> None:
        """A heartbeat leaves on the decode channel."""
        now = self._at(now)
        self._round_trip.on_sent(now, self._meter.in_flight, self._meter.queue_delay(now))

    def on_heartbeat_echoed(self, sent_at: float, now: float) -> bool:
        """The heartbeat that left at ``sent_at`` is back; ``False`` if none did."""
        now = self._check_at = self._at(now)
        known = self._round_trip.on_echo(sent_at, self._meter.rate, now)
        minimum = self._minimum()
        if known and minimum is not None:
            is_late = now - sent_at - minimum > _QUEUE_DELAY
            self._late_heartbeats = self._late_heartbeats + 1 if is_late else 0
            self._meter.is_queued = self._late_heartbeats >= _LATE_HEARTBEATS
        return known

    def _at(self, now: float) -> float:
        if now > self._now:
            self._now = now
        return self._now

    # --- what is known -----------------------------------------------------------------------

    def _minimum(self) -> float | None:
        if self._now >= self._check_at:
            self._cached_min_rtt = self._round_trip.min_rtt(self._now, self._meter.rate)
            self._check_at = self._now + _CHECK_INTERVAL
        return self._cached_min_rtt

    def current_facts(self, now: float) -> LinkFacts:
        """One-way latency and rate."""
        self._at(now)
        minimum = self._minimum()
        return LinkFacts(None if minimum is None else minimum / 2, self._meter.rate)

    def current_estimate(self, now: float) -> LinkEstimatedEvent:
        """The same for a policy; round trips that are unknown are 0."""
        self._at(now)
        return LinkEstimatedEvent(
            self._round_trip.smoothed_rtt, self._minimum() or 0.0, self._meter.rate
        )

    def poll_change(self, now: float) -> LinkEstimatedEvent | None:
        """The estimate, if it is worth telling since it was told last."""
        self._at(now)
        rtt, minimum, rate = self._round_trip.smoothed_rtt, self._minimum() or 0.0, self._meter.rate
        if (rtt, minimum, rate) == self._last_polled:
            return None
        self._last_polled = rtt, minimum, rate
        estimate, told = LinkEstimatedEvent(rtt, minimum, rate), self._reported
        if told is None:
            if estimate.rate is None and not estimate.min_rtt:
                return None
        elif not (
            _differ(estimate.rate or 0.0, told.rate or 0.0, NOTICEABLE_SHARE, 0.0)
            or _differ(estimate.min_rtt, told.min_rtt, NOTICEABLE_SHARE, _NOTICEABLE_SECONDS)
            or _differ(estimate.rtt, told.rtt, _NOTICEABLE_SMOOTH, _NOTICEABLE_SECONDS)
        ):
            return None
        self._reported = estimate
        return estimate


def _differ(one: float, other: float, share: float, floor: float) -> bool:
    return abs(one - other) > max(share * other, floor)
