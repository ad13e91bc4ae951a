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
#: How many times as loaded as the least loaded one a pipeline may be before requests are sent
#: elsewhere that it has cached (the paper's ``T_hbal``).
T_HBAL = 1.5
#: By how much the share of answers in a pipeline's work is to be above the mean of all for a prompt
#: that nobody has cached to go there first.
DECODE_HEAVY_MARGIN = 0.2
#: Seconds that requests which were sent somewhere may take until reports have them.
UNREPORTED_S = 60.0


@dataclass(slots=True)
class _Candidate:
    """What a pipeline would be for a request: its ``L``, ``M`` and ``R`` in seconds."""

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
    """Sends a request to who has most of its prompt cached, else to who costs least.

    *Exploit.* Where more of the prompt is cached than is not, its key portion is: of those who have
    it, it goes to the one that costs least. That cost is the pipeline's load ``L``, what has to be
    evicted ``M`` and the prefill of what is missing ``R``, each in seconds of the slowest stage.

    *Explore.* Else it goes to whoever costs least; but to a pipeline that has much more to decode
    than others, as long as its load is no reason against that.

    *Rebalance.* If that load is above ``t_hbal`` times the lightest one, and it is done sooner
    elsewhere by more than it takes to compute it anew, it goes there, and is cached there, too.

    *Replicate.* So it does if the wait of those that begin alike has doubled, and they wait for
    longer than computing it anew takes.

    ``L`` is what is still to be done of what was sent there. (The paper has all that was sent in
    the window; but what is over keeps nobody waiting.) A token of an answer counts with what a
    further row adds to a step. ``M`` is the prefill of those spans which would be forgotten, and
    which several requests used in the window. (The paper has it once for each of these; but it is
    computed anew once at most, and who was the only one may have been the last.)
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

    # --- a request -------------------------------------------------------------------------------

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """Exploit if more is cached than is not, else explore."""
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
        # What is computed anew delays others, too: it counts twice.
        anew_s = cheapest.prefill_s - chosen.prefill_s
        if chosen.load_s > self._t_hbal * lightest and cheapest.cost_s + anew_s < chosen.cost_s:
            self._counts["redirected"] += 1
            return cheapest
        if others:
            anew = _cheapest(others)
            if self._prefix_waits.has_doubled(key_span, anew.prefill_s - chosen.prefill_s, now):
                self._counts["replicated"] += 1
                return anew
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
        """Its prefill is over, and how long it waited for that is known."""
        routed = self._load_tracker.on_first_token(key, now)
        if routed is not None and routed.key_span:
            self._prefix_waits.add_wait(
                routed.key_span, max(0.0, now - routed.sent_at - routed.prefill_s), now
            )

    def on_request_end(self, key: RequestKey, generated: int, now: float) -> None:
        """It is no load any more."""
        self._load_tracker.on_request_end(key, generated, now)

    # --- pipelines -------------------------------------------------------------------------------

    def on_cache_report(self, name: PipelineName, report: CacheReport, now: float) -> None:
        """Take in what its head says; what was sent there a moment ago may come to be cached."""
        if report.costs is not None:
            self._costs[name] = report.costs
        if report.capacity:
            self._tree.set_capacity(name, report.capacity)
        if report.is_full:
            self._tree.retain_spans(name, frozenset(report.added_spans), now - UNREPORTED_S)
        self._tree.remove_spans(name, report.evicted_spans)
        self._tree.add_spans(name, report.added_spans)

    def on_pipeline_removed(self, name: PipelineName) -> None:
        """Nothing is cached there any more."""
        self._tree.drop_pipeline(name)
        self._load_tracker.drop_pipeline(name)
        self._costs.pop(name, None)

    def cached_tokens(self, name: PipelineName) -> int:
        """About how many tokens are cached there."""
        return self._tree.count_spans(name) * SPAN_TOKENS

    @property
    def decision_counts(self) -> Mapping[str, int]:
        """How often it exploited, explored, redirected and replicated."""
        return self._counts

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being served, as far as is known."""
        return len(self._load_tracker) == 0

    def validate(self) -> None:
        """Check the bounds.

        Raises:
            InvariantError: one is broken.
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
    """The node that stands for all prompts which begin alike: at a power of two of spans."""
    depth = cached // SPAN_TOKENS
    return prompt.spans[(1 << (depth.bit_length() - 1)) - 1] if depth else 0
