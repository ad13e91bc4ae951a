"""E2: exploitation and exploration of prefix caches (Preble, §4.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.facts.costs import UNKNOWN, Costs
from molink.routing.base import Key, Name, PipelineLoad, RoutedPrompt, Router
from molink.routing.loads import Loads, Routed
from molink.routing.report import CacheReport
from molink.routing.spans import SPAN
from molink.routing.tree import SpanTree
from molink.routing.waits import PrefixWaits

#: Seconds of history (the paper's ``H``).
WINDOW_S = 180.0
#: How many times as loaded as the least loaded one a pipeline may be before requests are sent
#: elsewhere that it has cached (the paper's ``T_hbal``).
T_HBAL = 1.5
#: By how much the share of answers in a pipeline's work is to be above the mean of all for a prompt
#: that nobody has cached to go there first.
DECODE_HEAVY = 0.2
#: Seconds that requests which were sent somewhere may take until reports have them.
UNREPORTED_S = 60.0


@dataclass(slots=True)
class _Place:
    """What a pipeline would be for a request: its ``L``, ``M`` and ``R`` in seconds."""

    load: PipelineLoad
    cached: int
    load_s: float
    evicted_s: float
    prefill_s: float
    answer_share: float

    @property
    def cost_s(self) -> float:
        return self.load_s + self.evicted_s + self.prefill_s


class E2(Router):
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
        decode_heavy: float = DECODE_HEAVY,
    ) -> None:
        self._t_hbal = t_hbal
        self._decode_heavy = decode_heavy
        self._tree = SpanTree(window_s / 2)
        self._loads = Loads(window_s)
        self._waits = PrefixWaits(window_s / 2)
        self._costs: dict[Name, Costs] = {}
        self._counts = dict.fromkeys(("exploited", "explored", "redirected", "replicated"), 0)

    # --- a request -------------------------------------------------------------------------------

    def choose(self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float) -> PipelineLoad:
        """Exploit if more is cached than is not, else explore."""
        self._loads.over(prompt.key, 0, now)
        places = [self._place(prompt, load, now) for load in up]
        having = [place for place in places if 2 * place.cached > prompt.tokens]
        key_span = _key_span(prompt, max(place.cached for place in places)) if having else 0
        chosen = self._exploit(places, having, key_span, now) if having else self._explore(places)
        name = chosen.load.name
        answer_s = self._loads.answer_tokens * self._costs_of(name).answer
        self._loads.place(prompt.key, Routed(name, now, chosen.prefill_s, answer_s, key_span))
        self._tree.use(name, prompt.spans, now)
        return chosen.load

    def _place(self, prompt: RoutedPrompt, load: PipelineLoad, now: float) -> _Place:
        name, costs = load.name, self._costs_of(load.name)
        spans = self._tree.match(name, prompt.spans)
        cached = min(spans * SPAN, prompt.tokens - 1)
        work = self._loads.of(name, now)
        evicted = self._tree.evicted_by(name, len(prompt.spans) - spans, now)
        sent = work.prefill_s + work.answer_s
        return _Place(
            load,
            cached,
            work.left_s(now),
            evicted * costs.prefill_s(SPAN),
            costs.prefill_s(prompt.tokens - cached, cached),
            work.answer_s / sent if sent else 0.0,
        )

    def _exploit(
        self, places: Sequence[_Place], having: Sequence[_Place], key_span: int, now: float
    ) -> _Place:
        chosen, cheapest = _cheapest(having), _cheapest(places)
        lightest = min(place.load_s for place in places)
        others = [place for place in places if place not in having]
        # What is computed anew delays others, too: it counts twice.
        anew_s = cheapest.prefill_s - chosen.prefill_s
        if chosen.load_s > self._t_hbal * lightest and cheapest.cost_s + anew_s < chosen.cost_s:
            self._counts["redirected"] += 1
            return cheapest
        if others:
            anew = _cheapest(others)
            if self._waits.doubled(key_span, anew.prefill_s - chosen.prefill_s, now):
                self._counts["replicated"] += 1
                return anew
        self._counts["exploited"] += 1
        return chosen

    def _explore(self, places: Sequence[_Place]) -> _Place:
        self._counts["explored"] += 1
        cheapest = _cheapest(places)
        mean = sum(place.answer_share for place in places) / len(places)
        heavy = max(places, key=lambda place: place.answer_share)
        if heavy.answer_share > mean + self._decode_heavy and (
            heavy.load_s <= self._t_hbal * cheapest.load_s
        ):
            return heavy
        return cheapest

    def began(self, key: Key, cached: int, now: float) -> None:
        """Its prefill is over, and how long it waited for that is known."""
        placed = self._loads.began(key, now)
        if placed is not None and placed.key_span:
            self._waits.add(placed.key_span, max(0.0, now - placed.at - placed.prefill_s), now)

    def over(self, key: Key, generated: int, now: float) -> None:
        """It is no load any more."""
        self._loads.over(key, generated, now)

    # --- pipelines -------------------------------------------------------------------------------

    def reported(self, name: Name, report: CacheReport, now: float) -> None:
        """Take in what its head says; what was sent there a moment ago may come to be cached."""
        if report.costs is not None:
            self._costs[name] = report.costs
        if report.room:
            self._tree.set_room(name, report.room)
        if report.whole:
            self._tree.keep(name, frozenset(report.added), now - UNREPORTED_S)
        self._tree.remove(name, report.evicted)
        self._tree.add(name, report.added)

    def gone(self, name: Name) -> None:
        """Nothing is cached there any more."""
        self._tree.forget(name)
        self._loads.forget(name)
        self._costs.pop(name, None)

    def cached_tokens(self, name: Name) -> int:
        """About how many tokens are cached there."""
        return self._tree.count(name) * SPAN

    @property
    def counts(self) -> Mapping[str, int]:
        """How often it exploited, explored, redirected and replicated."""
        return self._counts

    @property
    def idle(self) -> bool:
        """Whether nothing is being served, as far as is known."""
        return len(self._loads) == 0

    def validate(self) -> None:
        """Check the bounds.

        Raises:
            InvariantError: one is broken.
        """
        self._tree.validate()

    def _costs_of(self, name: Name) -> Costs:
        return self._costs.get(name, UNKNOWN)


def _cheapest(places: Sequence[_Place]) -> _Place:
    return min(places, key=lambda place: (place.cost_s, place.load.requests, place.load.sent))


def _key_span(prompt: RoutedPrompt, cached: int) -> int:
    """The node that stands for all prompts which begin alike: at a power of two of spans."""
    depth = cached // SPAN
    return prompt.spans[(1 << (depth.bit_length() - 1)) - 1] if depth else 0
