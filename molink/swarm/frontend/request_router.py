"""Routes each request of an endpoint to one of the pipelines that serve its model.

Each endpoint has its own router, so there is no bottleneck and no single point of failure. Answers
carry the cache reports that the router requests.
"""

from collections.abc import Iterable, Mapping, Sequence

from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.cache_report import CacheReport, span_digests
from molink.routing.simple_routers import FallbackRouter
from molink.swarm.frontend.stream import PipelineEpoch
from molink.wire.messages.serving import Request


class RequestRouter:
    """Asks ``router`` about each request, and reports outcomes to it.

    Each epoch of a pipeline starts with an empty cache, so it counts as another target.
    """

    def __init__(self, router: Router) -> None:
        self._router = FallbackRouter(router)
        self._loads: dict[PipelineEpoch, PipelineLoad] = {}
        #: Target of each request.
        self._chosen: dict[str, PipelineEpoch] = {}
        #: Version of the last cache report of each target.
        self._versions: dict[PipelineEpoch, int] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of the router's decisions, by name."""
        return self._router.decision_counts

    def choose_pipeline(
        self, key: str, request: Request, targets: Sequence[PipelineEpoch], now: float
    ) -> PipelineEpoch | None:
        """Choose one of ``targets``; ``None`` if there are none. A lost request chooses again."""
        prompt = request.prompt_token_ids
        self.on_request_finished(key, 0, now)
        if not targets:
            return None
        candidates = [
            self._loads.setdefault(target, PipelineLoad(_target_name(target))) for target in targets
        ]
        chosen = candidates[0]
        if len(candidates) > 1:
            spans = (
                span_digests(prompt, cache_scope=request.cache_scope)
                if self._router.reads_spans
                else ()
            )
            chosen = self._router.choose_pipeline(
                RoutedPrompt(key, len(prompt), spans), candidates, now
            )
        target = targets[candidates.index(chosen)]
        chosen.num_requests += 1
        chosen.total_sent += 1
        self._chosen[key] = target
        return target

    def cache_version_for(self, target: PipelineEpoch, others: int) -> int | None:
        """Return ``Submit.cache_version`` for a submission that ``others`` could also serve."""
        if others == 0 or not self._router.reads_spans:
            return None
        return self._versions.get(target, -1)

    def on_first_token(self, key: str, cached: int, now: float) -> None:
        """Report the first token of a request."""
        self._router.on_first_token(key, cached, now)

    def on_request_finished(self, key: str, generated: int, now: float) -> None:
        """Report a finished or lost request."""
        target = self._chosen.pop(key, None)
        if target is None:
            return
        self._router.on_request_end(key, generated, now)
        load = self._loads.get(target)
        if load is not None:
            load.num_requests -= 1

    def on_cache_report(self, target: PipelineEpoch, report: CacheReport, now: float) -> None:
        """Handle a cache report, unless it is outdated."""
        if target in self._loads and report.version >= self._versions.get(target, -1):
            self._versions[target] = report.version
            self._router.on_cache_report(_target_name(target), report, now)

    def retain_pipelines(self, live: Iterable[PipelineEpoch]) -> None:
        """Drop all targets but ``live``."""
        for target in self._loads.keys() - set(live):
            del self._loads[target]
            self._versions.pop(target, None)
            self._router.on_pipeline_removed(_target_name(target))


def _target_name(target: PipelineEpoch) -> str:
    return f"{target.pipeline}/{target.epoch}"
