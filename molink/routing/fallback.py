"""A router whose loss is no loss of requests."""

import logging
from collections.abc import Callable, Mapping, Sequence

from molink.routing.base import Key, Name, PipelineLoad, RoutedPrompt, Router
from molink.routing.least_loaded import LeastLoaded
from molink.routing.report import CacheReport

log = logging.getLogger(__name__)


class WithFallback(Router):
    """Does as ``router`` does until it fails; from then on requests go to who has the fewest.

    What was wrong is logged once, with where it happened; ``lost`` in :attr:`counts` is 1 then.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lost = 0
        self.reads_spans = router.reads_spans

    @property
    def counts(self) -> Mapping[str, int]:
        """As of the one that is asked."""
        return {**self._router.counts, "lost": self._lost}

    def choose(self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float) -> PipelineLoad:
        """One of ``up`` in any case."""
        try:
            chosen = self._router.choose(prompt, up, now)
            if any(chosen is load for load in up):
                return chosen
            raise LookupError(f"{chosen.name} is none of those that take requests")
        except Exception as error:  # whatever is wrong with it, requests are to be served
            self._fall_back(error)
            return self._router.choose(prompt, up, now)

    def began(self, key: Key, cached: int, now: float) -> None:
        """As :class:`Router` says."""
        self._tell(lambda router: router.began(key, cached, now))

    def over(self, key: Key, generated: int, now: float) -> None:
        """As :class:`Router` says."""
        self._tell(lambda router: router.over(key, generated, now))

    def reported(self, name: Name, report: CacheReport, now: float) -> None:
        """As :class:`Router` says."""
        self._tell(lambda router: router.reported(name, report, now))

    def gone(self, name: Name) -> None:
        """As :class:`Router` says."""
        self._tell(lambda router: router.gone(name))

    def _tell(self, tell: Callable[[Router], None]) -> None:
        try:
            tell(self._router)
        except Exception as error:  # whatever is wrong with it, requests are to be served
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        log.error("the router failed, requests go to who has the fewest now", exc_info=error)
        self._router, self._lost = LeastLoaded(), 1
        self.reads_spans = self._router.reads_spans
