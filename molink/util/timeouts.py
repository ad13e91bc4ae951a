"""Failure detection: how long a silent party still counts as alive."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds of silence after which a stage, worker, peer or leader counts as lost.

    All failure detectors of a swarm take their values from here. The detectors of peers and leaders
    adapt (:class:`SilenceLimit`); the values here are their maxima. Timeouts of other waits are
    defined where the waiting is done.
    """

    #: The minimum limit of an adaptive detector: a PC or network may stall that long without
    #: warning. TCP retries after about 0.2, 0.6, 1.4 and 3.0 s, so most cuts are over by then.
    shortest: float = 2.0
    #: No heartbeat from the next stage while requests are live; heartbeats come every 100 ms.
    stage: float = 3.0
    #: No heartbeat from the next stage without live requests; heartbeats are 1 s apart.
    idle_stage: float = 4.0
    #: No heartbeat from a stage that has not answered yet, since it may still be finishing a step.
    new_stage: float = 60.0
    #: No answer from a worker to its daemon's ping.
    worker: float = 4.0
    #: No answer from a worker to its daemon's ping, if a failure was just reported.
    suspected_worker: float = 1.5
    #: A loaded worker is missing from its peer's reports, which may lag.
    unreported_worker: float = 3.0
    #: No report from a peer to the coordinator; reports come every 500 ms.
    peer: float = 3.0
    #: No new connection of a peer whose control connection was closed.
    peer_reconnect: float = 0.5
    #: No report from a further device of a PC that lost one device, since devices fail together.
    co_located_peer: float = 1.0
    #: No heartbeat from the leader to its followers.
    leader: float = 3.0


TIMEOUTS = Timeouts()

#: The limit as a multiple of the longest recent wait.
_FACTOR = 3.0
#: Seconds of recorded waits before the limit follows them.
_WARM_UP = 5.0
#: Seconds of a window of waits; the current and the previous window count.
_WINDOW = 30.0


class SilenceLimit:
    """A silence limit that follows the longest recent wait for a party.

    On a quiet network a loss is detected early, and a busy PC gets the maximum limit. Compare the
    adaptive failure detectors of Chen, Toueg and Aguilera, 2002, and of Hayashibara and others,
    2004 (phi accrual). Times are monotonic seconds.
    """

    def __init__(self, longest: float) -> None:
        """``longest`` is the maximum limit in seconds, and the limit until waits are known."""
        self._longest = longest
        #: The current limit.
        self.seconds = longest
        #: When the party was first heard (since a restart), when it was last heard, and when the
        #: current window began.
        self._began_at: float | None = None
        self._heard_at = self._window_at = -math.inf
        #: The longest wait of the current window, and of the previous one.
        self._wait = self._wait_before = 0.0

    def restart(self) -> None:
        """Expect the party to connect first, which takes a while; keep known waits."""
        self._began_at, self.seconds = None, self._longest

    def on_heard(self, now: float) -> None:
        """Record that the party was heard, which should happen at regular intervals.

        A wait above the maximum limit was a loss, not a delay, so it doesn't count.
        """
        if self._began_at is None:
            self._began_at = now
        if now - self._window_at >= _WINDOW:
            self._wait_before, self._wait, self._window_at = self._wait, 0.0, now
        wait, self._heard_at = now - self._heard_at, now
        if wait <= self._longest:
            self._wait = max(self._wait, wait)
        if now - self._began_at >= _WARM_UP:
            limit = _FACTOR * max(self._wait, self._wait_before)
            self.seconds = min(max(limit, TIMEOUTS.shortest), self._longest)
