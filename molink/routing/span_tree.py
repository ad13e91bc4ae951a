"""Estimates the prompt prefixes that each pipeline has cached: a radix tree over spans."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from molink.errors import InvariantError
from molink.routing.base import PipelineName
from molink.routing.cache_report import SPAN_TOKENS

#: Maximum spans of a pipeline of unknown capacity, and of all pipelines: 8 M tokens.
DEFAULT_SPANS = 8192
MAX_SPANS = 131_072


class SpanUse:
    """A span at one pipeline: its last use, and its uses per half window."""

    __slots__ = ("_before", "_count", "_half", "used_at")

    def __init__(self) -> None:
        self.used_at = float("-inf")
        self._half = self._count = self._before = 0

    def add_request(self, now: float, half_s: float) -> None:
        self._advance_half(int(now / half_s))
        self._count += 1
        self.used_at = now

    def count_requests(self, now: float, half_s: float) -> int:
        """Count requests in the last one to two half windows of ``half_s`` seconds."""
        self._advance_half(int(now / half_s))
        return self._count + self._before

    def _advance_half(self, half: int) -> None:
        if half != self._half:
            self._before = self._count if half == self._half + 1 else 0
            self._half, self._count = half, 0


class SpanTree:
    """Spans by pipeline. A span's digest covers its whole prefix, so it identifies its path.

    Each pipeline's spans are in LRU order. A path is used as a whole, and its first span counts as
    used last, so eviction never removes a span before its successors. A pipeline has at most as
    many spans as fit its cache, and all pipelines together have at most ``maximum``. Presence is an
    estimate from requests sent and from reports.
    """

    def __init__(self, half_s: float, maximum: int = MAX_SPANS) -> None:
        self._half_s = half_s
        self._max_spans = maximum
        self._nodes: dict[PipelineName, OrderedDict[int, SpanUse]] = {}
        self._capacities: dict[PipelineName, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))

    def count_spans(self, name: PipelineName) -> int:
        return len(self._nodes.get(name, ()))

    def match_prefix(self, name: PipelineName, spans: Sequence[int]) -> int:
        """Count the leading spans that a pipeline has."""
        nodes = self._nodes.get(name)
        if nodes is None:
            return 0
        for index, digest in enumerate(spans):
            if digest not in nodes:
                return index
        return len(spans)

    def use_spans(self, name: PipelineName, spans: Sequence[int], now: float) -> None:
        """Record a request with these spans, which will soon be cached."""
        nodes, half_s = self._nodes.setdefault(name, OrderedDict()), self._half_s
        for digest in reversed(spans[: self._capacity_of(name)]):
            use = nodes.get(digest)
            if use is None:
                use = nodes[digest] = SpanUse()
            else:
                nodes.move_to_end(digest)
            use.add_request(now, half_s)
        self._shrink(name)

    def add_spans(self, name: PipelineName, spans: Iterable[int]) -> None:
        """Record reported spans; new ones are the first to be evicted."""
        nodes = self._nodes.setdefault(name, OrderedDict())
        room = min(self._capacity_of(name), len(nodes) + self._max_spans - len(self))
        for digest in spans:
            if len(nodes) >= room:
                return
            if digest not in nodes:
                nodes[digest] = SpanUse()
                nodes.move_to_end(digest, last=False)

    def remove_spans(self, name: PipelineName, spans: Iterable[int]) -> None:
        """Remove spans that were evicted."""
        nodes = self._nodes_of(name)
        for digest in spans:
            nodes.pop(digest, None)

    def retain_spans(self, name: PipelineName, spans: frozenset[int], since: float) -> None:
        """Remove all other spans not used since ``since``."""
        nodes = self._nodes_of(name)
        for digest in [d for d, use in nodes.items() if d not in spans and use.used_at < since]:
            del nodes[digest]

    def drop_pipeline(self, name: PipelineName) -> None:
        self._nodes.pop(name, None)
        self._capacities.pop(name, None)

    def set_capacity(self, name: PipelineName, tokens: int) -> None:
        """Set the capacity of a pipeline's cache, in tokens."""
        self._capacities[name] = max(1, tokens // SPAN_TOKENS)
        self._shrink(name)

    def count_requests(self, name: PipelineName, digest: int, now: float) -> int:
        """Requests that used a span in the window."""
        use = self._nodes_of(name).get(digest)
        return 0 if use is None else use.count_requests(now, self._half_s)

    def estimate_evictions(
        self, name: PipelineName, spans: int, now: float, most: int = 64
    ) -> float:
        """Estimate the shared spans that are evicted if ``spans`` are added.

        It extrapolates from the first ``most`` spans.
        """
        nodes = self._nodes_of(name)
        lacking = len(nodes) + spans - self._capacity_of(name)
        if lacking <= 0:
            return 0.0
        seen = common = 0
        for use in nodes.values():
            if seen == min(most, lacking):
                break
            seen += 1
            common += use.count_requests(now, self._half_s) > 1
        return common * lacking / seen if seen else 0.0

    def validate(self) -> None:
        """Check the bounds.

        Raises:
            InvariantError: a bound is exceeded.
        """
        for name, nodes in self._nodes.items():
            if len(nodes) > self._capacity_of(name):
                raise InvariantError(f"{len(nodes)} spans of {name}, more than it has room for")
        if len(self) > self._max_spans:
            raise InvariantError(f"{len(self)} spans, more than {self._max_spans}")

    def _nodes_of(self, name: PipelineName) -> OrderedDict[int, SpanUse]:
        return self._nodes.get(name, OrderedDict())

    def _capacity_of(self, name: PipelineName) -> int:
        return min(self._capacities.get(name, DEFAULT_SPANS), self._max_spans)

    def _shrink(self, name: PipelineName) -> None:
        """Evict the least recently used spans: of this pipeline, then of the one with the most."""
        nodes, room = self._nodes_of(name), self._capacity_of(name)
        while len(nodes) > room:
            nodes.popitem(last=False)
        while len(self) > self._max_spans:
            max(self._nodes.values(), key=len).popitem(last=False)
