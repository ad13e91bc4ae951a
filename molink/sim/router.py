"""Who says which of several pipelines serves a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.bench.planned import PlannedRequest
from molink.errors import UsageError

#: Names that :func:`create_router` knows.
ROUTERS = ("round-robin", "least-loaded")


@dataclass(slots=True)
class PipelineLoad:
    """What a router knows of a pipeline: ``requests`` that it serves, and was ``sent`` so far."""

    number: int
    requests: int = 0
    sent: int = 0


class Router(Protocol):
    """Chooses a pipeline for each request, as it arrives or once it was lost.

    Whatever a router remembers (which prefixes it has sent where, say) is its own.
    """

    def choose(self, request: PlannedRequest, up: Sequence[PipelineLoad]) -> PipelineLoad:
        """One of ``up``: the pipelines that take requests now, in their order, at least one."""


class RoundRobin:
    """Each in its turn; who is not there is passed over."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: PlannedRequest, up: Sequence[PipelineLoad]) -> PipelineLoad:
        """The next one."""
        chosen = next((load for load in up if load.number > self._last), up[0])
        self._last = chosen.number
        return chosen


class LeastLoaded:
    """The one with the fewest requests, as a daemon chooses among the pipelines of a model."""

    def choose(self, request: PlannedRequest, up: Sequence[PipelineLoad]) -> PipelineLoad:
        """Of several with as few the one that was sent the fewest."""
        return min(up, key=lambda load: (load.requests, load.sent))


def create_router(name: str) -> Router:
    """The router of that name.

    Raises:
        UsageError: there is none.
    """
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
        case _:
            raise UsageError(f"--router is one of {', '.join(ROUTERS)}, not {name!r}")
