"""Failure detection: how long a silent party still counts as alive."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds of silence after which a stage, worker, peer or leader counts as lost.

    All failure detectors of a swarm take their values from here. Those of peers and leaders adapt
    (:class:`SilenceLimit`): the values here are their longest. Bounds of other waits stand with
    what waits.
    """

    #: The shortest limit of an adaptive detector: a PC or network may stall for that long without a
    #: warning. TCP retries after about 0.2, 0.6, 1.4 and 3.0 s, so most cuts are over by then.
    shortest: float = 2.0
    #: No heartbeat from the next stage while requests live; heartbeats come every 100 ms.
    stage: float = 3.0
    #: The same while none lives; heartbeats are 1 s apart.
    idle_stage: float = 4.0
    #: No heartbeat from a stage that has not answered yet: it may still finish a step.
    new_stage: float = 60.0
    #: No answer from a worker to its daemon's ping.
    worker: float = 4.0
    #: The same where a failure has just been reported.
    suspected_worker: float = 1.5
    #: A worker that has loaded is missing from its peer's reports; these may lag.
    unreported_worker: float = 3.0
    #: No report from a peer to the coordinator; reports come every 500 ms.
    peer: float = 3.0
    #: No new connection of a peer whose control connection was closed.
    peer_reconnect: float = 0.5
    #: No report from a further device of a PC of which one device was lost: they fail together.
    co_located_peer: float = 1.0
    #: No heartbeat from the leader to its followers.
    leader: float = 3.0


TIMEOUTS = Timeouts()

#: The limit as a multiple of the longest recent wait.
_FACTOR = 3.0
#: Seconds for which waits are known before the limit follows them.
_WARM_UP = 5.0
#: Waits of this many seconds are remembered, and of as many again at most.
_WINDOW = 30.0


class SilenceLimit:
    """A silence limit that follows the longest recent wait for a party.

    On a quiet network a loss is noticed early, and a busy PC has the full patience. Failure
    detectors that adapt: Chen, Toueg and Aguilera, 2002; Hayashibara and others, 2004 (phi
    accrual). Times in monotonic seconds.
    """

    def __init__(self, longest: float) -> None:
        """``longest``: the limit in seconds until waits are known, and at most."""
        self._longest = longest
        #: The limit now.
        self.seconds = longest
        #: When it was first heard, again after a restart; when last, and since when waits count as
        #: this window's.
        self._began_at: float | None = None
        self._heard_at = self._window_at = -math.inf
        #: The longest wait of this window, and of the one before.
        self._wait = self._wait_before = 0.0

    def restart(self) -> None:
        """The party has to connect first, which takes a while. Known waits stay known."""
        self._began_at, self.seconds = None, self._longest

    def on_heard(self, now: float) -> None:
        """The party was heard, as it should be at regular intervals.

        A wait above the longest limit was a loss and no delay, so it doesn't count.
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
