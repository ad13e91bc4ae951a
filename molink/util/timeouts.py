"""Failure detection: how long a silent party still counts as alive."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds of silence after which a stage, worker, peer or leader counts as lost.

    All failure detectors of a swarm take their values from here. Bounds of other waits stand with
    what waits.
    """

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
