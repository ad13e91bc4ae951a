"""Routers that ignore caches, and the fallback for failing routers."""

import logging
from collections.abc import Callable, Mapping, Sequence

from molink.routing.base import PipelineLoad, PipelineName, RequestKey, RoutedPrompt, Router
from molink.routing.cache_report import CacheReport


class RoundRobinRouter(Router):
    """Chooses the pipeline whose last choice is longest ago."""

    def __init__(self) -> None:
        self._last_chosen: dict[PipelineName, int] = {}
        self._num_chosen = 0

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        chosen = min(pipelines, key=lambda load: self._last_chosen.get(load.name, 0))
        self._num_chosen += 1
        self._last_chosen[chosen.name] = self._num_chosen
        return chosen

    def on_pipeline_removed(self, name: PipelineName) -> None:
        self._last_chosen.pop(name, None)


class LeastLoadedRouter(Router):
    """Chooses the pipeline with the fewest requests, regardless of their size."""

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """Break ties by the number of requests sent."""
        return min(pipelines, key=lambda load: (load.num_requests, load.total_sent))


log = logging.getLogger(__name__)


class FallbackRouter(Router):
    """Uses ``router`` until it fails, then the least loaded pipeline.

    The failure is logged once, with its traceback; ``lost`` in :attr:`decision_counts` is then 1.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._num_failures = 0
        self.reads_spans = router.reads_spans

    @property
    def decision_counts(self) -> Mapping[str, int]:
        return {**self._router.decision_counts, "lost": self._num_failures}

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """Choose one of ``pipelines`` in any case."""
        try:
            chosen = self._router.choose_pipeline(prompt, pipelines, now)
            if any(chosen is load for load in pipelines):
                return chosen
            raise LookupError(f"{chosen.name} does not accept requests")
        except Exception as error:  # a failing router must not fail requests
            self._fall_back(error)
            return self._router.choose_pipeline(prompt, pipelines, now)

    def on_first_token(self, key: RequestKey, cached: int, now: float) -> None:
        self._notify_router(lambda router: router.on_first_token(key, cached, now))

    def on_request_end(self, key: RequestKey, generated: int, now: float) -> None:
        self._notify_router(lambda router: router.on_request_end(key, generated, now))

    def on_cache_report(self, name: PipelineName, report: CacheReport, now: float) -> None:
        self._notify_router(lambda router: router.on_cache_report(name, report, now))

    def on_pipeline_removed(self, name: PipelineName) -> None:
        self._notify_router(lambda router: router.on_pipeline_removed(name))

    def _notify_router(self, notify: Callable[[Router], None]) -> None:
        try:
            notify(self._router)
        except Exception as error:  # a failing router must not fail requests
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        log.error("the router failed; requests now go to the least loaded pipeline", exc_info=error)
        self._router, self._num_failures = LeastLoadedRouter(), 1
        self.reads_spans = self._router.reads_spans
