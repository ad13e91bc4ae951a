"""Which pipeline each request of an endpoint goes to, where several serve its model.

Every endpoint has a router of its own: none is in anybody's way, and none can be lost without the
endpoint. What it knows comes with the answers that it asked for.
"""

from collections.abc import Iterable, Mapping, Sequence

from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.fallback import WithFallback
from molink.routing.report import CacheReport
from molink.routing.spans import span_digests
from molink.swarm.frontend.stream import HeadEpoch


class RequestRouting:
    """Asks ``router`` for each request, and tells it what becomes of it.

    A cache is that of a pipeline in one epoch; in the next it is empty.
    """

    def __init__(self, router: Router) -> None:
        self._router = WithFallback(router)
        self._loads: dict[HeadEpoch, PipelineLoad] = {}
        #: Where each request was sent.
        self._chosen: dict[str, HeadEpoch] = {}
        #: The last report of each.
        self._versions: dict[HeadEpoch, int] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """What the router has decided, by name."""
        return self._router.counts

    def choose(
        self, key: str, prompt: Sequence[int], targets: Sequence[HeadEpoch], now: float
    ) -> HeadEpoch | None:
        """One of ``targets``, ``None`` if there are none; a request that was lost asks again.

        Where there is one only, nobody has to be asked.
        """
        self.over(key, 0, now)
        if not targets:
            return None
        up = [self._loads.setdefault(target, PipelineLoad(_name(target))) for target in targets]
        chosen = up[0]
        if len(up) > 1:
            spans = span_digests(prompt) if self._router.reads_spans else ()
            chosen = self._router.choose(RoutedPrompt(key, len(prompt), spans), up, now)
        target = targets[up.index(chosen)]
        chosen.requests += 1
        chosen.sent += 1
        self._chosen[key] = target
        return target

    def wants(self, target: HeadEpoch, others: int) -> int | None:
        """What to ask a head for with a submission (``Submit.cache``), if there are ``others``."""
        if others == 0 or not self._router.reads_spans:
            return None
        return self._versions.get(target, -1)

    def began(self, key: str, cached: int, now: float) -> None:
        """The first token of a request has come."""
        self._router.began(key, cached, now)

    def over(self, key: str, generated: int, now: float) -> None:
        """A request is over, or was lost."""
        target = self._chosen.pop(key, None)
        if target is None:
            return
        self._router.over(key, generated, now)
        load = self._loads.get(target)
        if load is not None:
            load.requests -= 1

    def reported(self, target: HeadEpoch, report: CacheReport, now: float) -> None:
        """A head has told of its cache; one that is gone, or older news, is of no interest."""
        if target in self._loads and report.version >= self._versions.get(target, -1):
            self._versions[target] = report.version
            self._router.reported(_name(target), report, now)

    def keep(self, there: Iterable[HeadEpoch]) -> None:
        """Forget all pipelines and epochs but those."""
        for target in self._loads.keys() - set(there):
            del self._loads[target]
            self._versions.pop(target, None)
            self._router.gone(_name(target))


def _name(target: HeadEpoch) -> str:
    return f"{target.pipeline}/{target.epoch}"
