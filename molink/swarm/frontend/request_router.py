"""Which pipeline each request of an endpoint goes to, where several serve its model.

Every endpoint has a router of its own: none is in anybody's way, and none can be lost without the
endpoint. What it knows comes with the answers that it asked for.
"""

from collections.abc import Iterable, Mapping, Sequence

from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.cache_report import CacheReport, span_digests
from molink.routing.simple_routers import FallbackRouter
from molink.swarm.frontend.stream import PipelineEpoch


class RequestRouter:
    """Asks ``router`` for each request, and tells it what becomes of it.

    A cache is that of a pipeline in one epoch; in the next it is empty.
    """

    def __init__(self, router: Router) -> None:
        self._router = FallbackRouter(router)
        self._loads: dict[PipelineEpoch, PipelineLoad] = {}
        #: Where each request was sent.
        self._chosen: dict[str, PipelineEpoch] = {}
        #: The last report of each.
        self._versions: dict[PipelineEpoch, int] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """What the router has decided, by name."""
        return self._router.decision_counts

    def choose_pipeline(
        self, key: str, prompt: Sequence[int], targets: Sequence[PipelineEpoch], now: float
    ) -> PipelineEpoch | None:
        """One of ``targets``, ``None`` if there are none; a request that was lost asks again.

        Where there is one only, nobody has to be asked.
        """
        self.on_request_finished(key, 0, now)
        if not targets:
            return None
        candidates = [
            self._loads.setdefault(target, PipelineLoad(_target_name(target))) for target in targets
        ]
        chosen = candidates[0]
        if len(candidates) > 1:
            spans = span_digests(prompt) if self._router.reads_spans else ()
            chosen = self._router.choose_pipeline(
                RoutedPrompt(key, len(prompt), spans), candidates, now
            )
        target = targets[candidates.index(chosen)]
        chosen.num_requests += 1
        chosen.total_sent += 1
        self._chosen[key] = target
        return target

    def cache_version_for(self, target: PipelineEpoch, others: int) -> int | None:
        """What to ask a head for with a submission (``Submit.cache``), if there are ``others``."""
        if others == 0 or not self._router.reads_spans:
            return None
        return self._versions.get(target, -1)

    def on_first_token(self, key: str, cached: int, now: float) -> None:
        """The first token of a request has come."""
        self._router.on_first_token(key, cached, now)

    def on_request_finished(self, key: str, generated: int, now: float) -> None:
        """A request is over, or was lost."""
        target = self._chosen.pop(key, None)
        if target is None:
            return
        self._router.on_request_end(key, generated, now)
        load = self._loads.get(target)
        if load is not None:
            load.num_requests -= 1

    def on_cache_report(self, target: PipelineEpoch, report: CacheReport, now: float) -> None:
        """A head has told of its cache; one that is gone, or older news, is of no interest."""
        if target in self._loads and report.version >= self._versions.get(target, -1):
            self._versions[target] = report.version
            self._router.on_cache_report(_target_name(target), report, now)

    def retain_pipelines(self, live: Iterable[PipelineEpoch]) -> None:
        """Forget all pipelines and epochs but those."""
        for target in self._loads.keys() - set(live):
            del self._loads[target]
            self._versions.pop(target, None)
            self._router.on_pipeline_removed(_target_name(target))


def _target_name(target: PipelineEpoch) -> str:
    return f"{target.pipeline}/{target.epoch}"
