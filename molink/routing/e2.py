"""E2: exploitation and exploration of prefix caches (Preble, §4.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.facts.ring_times import UNKNOWN_COSTS, RequestCosts
from molink.routing.base import PipelineLoad, PipelineName, RequestKey, RoutedPrompt, Router
from molink.routing.cache_report import SPAN_TOKENS, CacheReport
from molink.routing.load_tracker import LoadTracker, PrefixWaits, RoutedRequest
from molink.routing.span_tree import SpanTree

#: Seconds of history (the paper's ``H``).
WINDOW_S = 180.0
#: Load, relative to the lightest pipeline, above which cached requests are redirected (the paper's
#: ``T_hbal``).
T_HBAL = 1.5
#: Excess of a pipeline's share of decoding over the mean above which it gets uncached prompts.
DECODE_HEAVY_MARGIN = 0.2
#: Seconds that sent requests may take to appear in reports.
UNREPORTED_S = 60.0


@dataclass(slots=True)
class _Candidate:
    """A pipeline's costs for a request: ``L``, ``M`` and ``R`` in seconds."""

    load: PipelineLoad
    cached_tokens: int
    load_s: float
    evicted_s: float
    prefill_s: float
    answer_share: float

    @property
    def cost_s(self) -> float:
        return self.load_s + self.evicted_s + self.prefill_s


class E2Router(Router):
    """Routes a request to the pipeline with most of its prompt cached, or to the cheapest.

    *Exploit* if more than half of the prompt is cached: choose the cheapest of the pipelines that
    have it. The cost is the pipeline's load ``L``, the eviction ``M`` and the missing prefill
    ``R``, in seconds of the slowest stage.

    *Explore* otherwise: choose the cheapest of all, or a pipeline that decodes much more than the
    mean if its load permits.

    *Rebalance.* If the load exceeds ``t_hbal`` times the lightest one, and another pipeline is
    faster by more than the recomputation, the request is redirected and its prefix cached there
    too.

    *Replicate* if the wait of requests with the same prefix has doubled and exceeds recomputation.

    ``L`` is the outstanding work. (The paper counts all requests sent in the window.) A generated
    token counts as one more row in a step. ``M`` is the prefill of spans that would be evicted and
    that several requests used in the window. (The paper multiplies it by their uses. But they are
    recomputed at most once, and a span used only once may not be used again.)
    """

    reads_spans: bool = True

    def __init__(
        self,
        window_s: float = WINDOW_S,
        t_hbal: float = T_HBAL,
        decode_heavy: float = DECODE_HEAVY_MARGIN,
    ) -> None:
        self._t_hbal = t_hbal
        self._decode_heavy = decode_heavy
        self._tree = SpanTree(window_s / 2)
        self._load_tracker = LoadTracker(window_s)
        self._prefix_waits = PrefixWaits(window_s / 2)
        self._costs: dict[PipelineName, RequestCosts] = {}
        self._counts = dict.fromkeys(("exploited", "explored", "redirected", "replicated"), 0)

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        self._load_tracker.on_request_end(prompt.key, 0, now)
        candidates = [self._assess_pipeline(prompt, load, now) for load in pipelines]
        holders = [
            candidate for candidate in candidates if 2 * candidate.cached_tokens > prompt.num_tokens
        ]
        key_span = (
            _key_span(prompt, max(candidate.cached_tokens for candidate in candidates))
            if holders
            else 0
        )
        chosen = (
            self._exploit(candidates, holders, key_span, now)
            if holders
            else self._explore(candidates)
        )
        name = chosen.load.name
        answer_s = self._load_tracker.answer_tokens * self._costs_of(name).answer_s
        self._load_tracker.add_request(
            prompt.key, RoutedRequest(name, now, chosen.prefill_s, answer_s, key_span)
        )
        self._tree.use_spans(name, prompt.spans, now)
        return chosen.load

    def _assess_pipeline(self, prompt: RoutedPrompt, load: PipelineLoad, now: float) -> _Candidate:
        name, costs = load.name, self._costs_of(load.name)
        spans = self._tree.match_prefix(name, prompt.spans)
        cached = min(spans * SPAN_TOKENS, prompt.num_tokens - 1)
        work = self._load_tracker.work_of(name, now)
        evicted = self._tree.estimate_evictions(name, len(prompt.spans) - spans, now)
        sent = work.prefill_s + work.answer_s
        return _Candidate(
            load,
            cached,
            work.remaining_s(now),
            evicted * costs.prefill_s(SPAN_TOKENS),
            costs.prefill_s(prompt.num_tokens - cached, cached),
            work.answer_s / sent if sent else 0.0,
        )

    def _exploit(
        self,
        candidates: Sequence[_Candidate],
        holders: Sequence[_Candidate],
        key_span: int,
        now: float,
    ) -> _Candidate:
        chosen, cheapest = _cheapest(holders), _cheapest(candidates)
        lightest = min(candidate.load_s for candidate in candidates)
        others = [candidate for candidate in candidates if candidate not in holders]
        # Recomputation also delays other requests, so it counts twice.
        recompute_s = cheapest.prefill_s - chosen.prefill_s
        if (
            chosen.load_s > self._t_hbal * lightest
            and cheapest.cost_s + recompute_s < chosen.cost_s
        ):
            self._counts["redirected"] += 1
            return cheapest
        if others:
            replica = _cheapest(others)
            if self._prefix_waits.has_doubled(key_span, replica.prefill_s - chosen.prefill_s, now):
                self._counts["replicated"] += 1
                return replica
        self._counts["exploited"] += 1
        return chosen

    def _explore(self, candidates: Sequence[_Candidate]) -> _Candidate:
        self._counts["explored"] += 1
        cheapest = _cheapest(candidates)
        mean = sum(candidate.answer_share for candidate in candidates) / len(candidates)
        heavy = max(candidates, key=lambda candidate: candidate.answer_share)
        if heavy.answer_share > mean + self._decode_heavy and (
            heavy.load_s <= self._t_hbal * cheapest.load_s
        ):
            return heavy
        return cheapest

    def on_first_token(self, key: RequestKey, cached: int, now: float) -> None:
        """Record the wait before the prefill."""
        routed = self._load_tracker.on_first_token(key, now)
        if routed is not None and routed.key_span:
            self._prefix_waits.add_wait(
                routed.key_span, max(0.0, now - routed.sent_at - routed.prefill_s), now
            )

    def on_request_end(self, key: RequestKey, generated: int, now: float) -> None:
        self._load_tracker.on_request_end(key, generated, now)

    def on_cache_report(self, name: PipelineName, report: CacheReport, now: float) -> None:
        """Update costs, capacity and spans; recently sent spans may be missing from the report."""
        if report.costs is not None:
            self._costs[name] = report.costs
        if report.capacity:
            self._tree.set_capacity(name, report.capacity)
        if report.is_full:
            self._tree.retain_spans(name, frozenset(report.added_spans), now - UNREPORTED_S)
        self._tree.remove_spans(name, report.evicted_spans)
        self._tree.add_spans(name, report.added_spans)

    def on_pipeline_removed(self, name: PipelineName) -> None:
        self._tree.drop_pipeline(name)
        self._load_tracker.drop_pipeline(name)
        self._costs.pop(name, None)

    def cached_tokens(self, name: PipelineName) -> int:
        """Estimate the number of tokens that a pipeline has cached."""
        return self._tree.count_spans(name) * SPAN_TOKENS

    @property
    def decision_counts(self) -> Mapping[str, int]:
        return self._counts

    @property
    def is_idle(self) -> bool:
        """Whether no request is being served."""
        return len(self._load_tracker) == 0

    def validate(self) -> None:
        """Check the bounds.

        Raises:
            InvariantError: one is exceeded.
        """
        self._tree.validate()

    def _costs_of(self, name: PipelineName) -> RequestCosts:
        return self._costs.get(name, UNKNOWN_COSTS)


def _cheapest(candidates: Sequence[_Candidate]) -> _Candidate:
    return min(
        candidates,
        key=lambda candidate: (
            candidate.cost_s,
            candidate.load.num_requests,
            candidate.load.total_sent,
        ),
    )


def _key_span(prompt: RoutedPrompt, cached: int) -> int:
    """Return the span that identifies prompts with the same prefix: one at a power of two."""
    depth = cached // SPAN_TOKENS
    return prompt.spans[(1 << (depth.bit_length() - 1)) - 1] if depth else 0
