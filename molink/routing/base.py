"""What every router answers, and what it is told.

A router is asked once for each request, and again for one that was lost. Nothing else of a request
passes it: prompts and tokens go between the endpoint and the pipeline. What it is told later may be
late, wrong or missing; then its choices are worse, and answers are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.routing.report import CacheReport

#: A request, and a pipeline, as the one who asks calls them.
Key = str
Name = str


@dataclass(slots=True)
class PipelineLoad:
    """A pipeline that takes requests: it serves ``requests``, and was ``sent`` so many in all."""

    name: Name
    requests: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A request to be placed: its number of ``tokens``, and the digests of its whole ``spans``."""

    key: Key
    tokens: int
    spans: Sequence[int] = ()


class Router(Protocol):
    """Chooses a pipeline. Implementations inherit from it, and take the events they need."""

    #: Whether it reads the spans of a prompt: without, nobody needs to make them.
    reads_spans: bool = False

    def choose(self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float) -> PipelineLoad:
        """One of ``up``: the pipelines that take requests now, in their order, at least one."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """How often what was decided, by name."""
        return {}

    def began(self, key: Key, cached: int, now: float) -> None:
        """The first token of a request has come; ``cached`` prompt tokens were in the cache."""
        return

    def over(self, key: Key, generated: int, now: float) -> None:
        """A request is over, or was lost, with so many tokens."""
        return

    def reported(self, name: Name, report: CacheReport, now: float) -> None:
        """What a pipeline's head says of its cache."""
        return

    def gone(self, name: Name) -> None:
        """A pipeline has ended, and its cache with it."""
        return
