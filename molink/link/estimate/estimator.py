"""Estimates a link's latency and rate at the sender, without I/O."""

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
from molink.util.change_detector import differs

#: Changes worth reporting to a policy: relative changes of the rate and the minimum round trip, a
#: larger one of the smoothed round trip, which always fluctuates, and a minimum in seconds, the
#: jitter of an event loop.
NOTICEABLE_SHARE = 0.05
_NOTICEABLE_SMOOTH = 0.2
_NOTICEABLE_SECONDS = 0.0003
#: Seconds between updates of the minimum round trip. It is needed for each acknowledgement,
#: thousands of times a second, but only changes with heartbeats.
_CHECK_INTERVAL = BUSY_INTERVAL
#: Seconds by which a queue delays a heartbeat, and the number of consecutive late heartbeats that
#: prove a queue. A single heartbeat may be late because of an event loop.
_QUEUE_DELAY = 0.004
_LATE_HEARTBEATS = 2


class LinkEstimator:
    """Estimates one link from sent and acknowledged messages and from heartbeats.

    Latency is half the recent minimum round trip. The rate is the recent maximum that the link
    delivered while it was busy. Both follow a changing link within 2 s and stay constant without
    new evidence.
    """

    def __init__(self, start: LinkFacts | None = None) -> None:
        """``start`` is a remembered estimate, which the first measurement replaces."""
        start = start or LinkFacts()
        self._round_trip = RoundTripEstimator(None if start.latency is None else 2 * start.latency)
        self._meter = RateMeter(start.rate)
        self._now = 0.0
        #: The minimum round trip, and when to update it.
        self._cached_min_rtt: float | None = None
        self._check_at = 0.0
        self._reported: LinkEstimatedEvent | None = None
        #: The figures at the last poll.
        self._last_polled: tuple[float, float, float | None] | None = None
        #: Consecutive late heartbeats.
        self._late_heartbeats = 0

    # --- events ----------------------------------------------------------------------------------

    def handle(self, event: LinkEvent, now: float) -> None:
        """Record sent and acknowledged messages; other events are ignored."""
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
        """Record a heartbeat on the decode channel."""
        now = self._at(now)
        self._round_trip.on_sent(now, self._meter.in_flight, self._meter.queue_delay(now))

    def on_heartbeat_echoed(self, sent_at: float, now: float) -> bool:
        """Record the echo of the heartbeat sent at ``sent_at``; ``False`` if there is none."""
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

    # --- estimates -------------------------------------------------------------------------------

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
        """The estimate for a policy; unknown round trips are 0."""
        self._at(now)
        return LinkEstimatedEvent(
            self._round_trip.smoothed_rtt, self._minimum() or 0.0, self._meter.rate
        )

    def poll_change(self, now: float) -> LinkEstimatedEvent | None:
        """Return the estimate if it has changed noticeably since the last one returned."""
        self._at(now)
        rtt, minimum, rate = self._round_trip.smoothed_rtt, self._minimum() or 0.0, self._meter.rate
        if (rtt, minimum, rate) == self._last_polled:
            return None
        self._last_polled = rtt, minimum, rate
        estimate, reported = LinkEstimatedEvent(rtt, minimum, rate), self._reported
        if reported is None:
            if estimate.rate is None and not estimate.min_rtt:
                return None
        elif not (
            differs(estimate.rate or 0.0, reported.rate or 0.0, NOTICEABLE_SHARE)
            or differs(estimate.min_rtt, reported.min_rtt, NOTICEABLE_SHARE, _NOTICEABLE_SECONDS)
            or differs(estimate.rtt, reported.rtt, _NOTICEABLE_SMOOTH, _NOTICEABLE_SECONDS)
        ):
            return None
        self._reported = estimate
        return estimate
