"""What every router answers, and what it is told.

A router is asked once for each request, and again for one that was lost. Nothing else of a request
passes it: prompts and tokens go between the endpoint and the pipeline. What it is told later may be
late, wrong or missing; then its choices are worse, and answers are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.routing.cache_report import CacheReport

#: A request, and a pipeline, as the one who asks calls them.
RequestKey = str
PipelineName = str


@dataclass(slots=True)
class PipelineLoad:
    """A pipeline that takes requests: it serves ``num_requests``, and was ``total_sent`` so many in
    all."""

    name: PipelineName
    num_requests: int = 0
    total_sent: int = 0


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A request to be placed: its number of ``num_tokens``, and the digests of its whole
    ``spans``."""

    key: RequestKey
    num_tokens: int
    spans: Sequence[int] = ()


class Router(Protocol):
    """Chooses a pipeline. Implementations inherit from it, and take the events they need."""

    #: Whether it reads the spans of a prompt: without, nobody needs to make them.
    reads_spans: bool = False

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """One of ``up``: the pipelines that take requests now, in their order, at least one."""
        ...

    @property
    def decision_counts(self) -> Mapping[str, int]:
        """How often what was decided, by name."""
        return {}

    def on_first_token(self, key: RequestKey, cached: int, now: float) -> None:
        """The first token of a request has come; ``cached`` prompt tokens were in the cache."""
        return

    def on_request_end(self, key: RequestKey, generated: int, now: float) -> None:
        """A request is over, or was lost, with so many tokens."""
        return

    def on_cache_report(self, name: PipelineName, report: CacheReport, now: float) -> None:
        """What a pipeline's head says of its cache."""
        return

    def on_pipeline_removed(self, name: PipelineName) -> None:
        """A pipeline has ended, and its cache with it."""
        return
