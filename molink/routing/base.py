"""The interface of routers.

A router chooses a pipeline for each request, and chooses again if it is resubmitted. Prompts and
tokens don't pass through it. Late, wrong or missing information makes its choices worse but never
changes answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.routing.cache_report import CacheReport

#: Ids of requests and pipelines, chosen by the caller.
RequestKey = str
PipelineName = str


@dataclass(slots=True)
class PipelineLoad:
    """A pipeline that accepts requests: number being served, and total number sent."""

    name: PipelineName
    num_requests: int = 0
    total_sent: int = 0


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A request to route: its number of tokens, and the digests of its complete ``spans``."""

    key: RequestKey
    num_tokens: int
    spans: Sequence[int] = ()


class Router(Protocol):
    """Chooses pipelines. Implementations inherit from it and override the events they need."""

    #: Whether the router uses the spans of prompts; otherwise the caller need not compute them.
    reads_spans: bool = False

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """Choose one of ``pipelines``, all of which accept requests; there is at least one."""
        ...

    @property
    def decision_counts(self) -> Mapping[str, int]:
        """Counters of decisions, by name."""
        return {}

    def on_first_token(self, key: RequestKey, cached: int, now: float) -> None:
        """The first token of a request arrived; ``cached`` prompt tokens were cached."""
        return

    def on_request_end(self, key: RequestKey, generated: int, now: float) -> None:
        """A request ended or was lost after ``generated`` tokens."""
        return

    def on_cache_report(self, name: PipelineName, report: CacheReport, now: float) -> None:
        """A pipeline reported changes of its prefix cache."""
        return

    def on_pipeline_removed(self, name: PipelineName) -> None:
        """A pipeline ended, and its cache with it."""
        return
