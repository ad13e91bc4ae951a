"""How many micro-batches are in flight: ``K``, from the pipeline degree ``N`` to ``2N``.

With as many micro-batches as stages each one comes back late by its transmissions, and stages idle
meanwhile; with more of them, each is smaller and every one reads all weights anew. As the MoLink
paper (§4) has it, every count is tried on the measured profile and the best one taken: what is
known of the stages (``T_d``), of the links, and how many streams decode at the moment.

A ring with ``K`` equal micro-batches and steps that take as long as predicted is a closed chain of
stages and links, each serving one micro-batch at a time. Its period, which is what a stream waits
for its next token, is the longer of a whole turn of one micro-batch and ``K`` times the slowest
stage or link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.facts.profile import Profile, smallest_near_best
from molink.facts.ringtimes import LinkFacts, RingTimes
from molink.scheduler.depth import NONE, Unpaired, rows_ahead, unpaired

#: A count is only left for one that promises so much less time per token.
WORTH = 0.005
_REMEMBERED = 1024
#: Tokens before a row are rounded to these, so that what was decided can be remembered.
_BEFORE = 128


@dataclass(frozen=True, slots=True)
class Prospect:
    """What ``count`` micro-batches promise: ``rows`` decode rows in each, seconds per token.

    ``busy`` is the share of the time in which the slowest stage computes.
    """

    count: int
    rows: int
    token_s: float
    busy: float


def prospects(times: RingTimes, streams: int, context: float = 0) -> list[Prospect]:
    """What every count from ``N`` to ``2N`` promises to ``streams`` decoding streams.

    They have ``context`` tokens each, on average.
    """
    degree = len(times.profiles)
    return [_prospect(times, count, streams, context) for count in range(degree, 2 * degree + 1)]


def best_of(curve: Sequence[Prospect]) -> Prospect:
    """The smallest count that is as good as any, or nearly so."""
    best = smallest_near_best(range(len(curve)), [each.token_s for each in curve], 1 + WORTH)
    return curve[best]


def _prospect(times: RingTimes, count: int, streams: int, context: float) -> Prospect:
    rows = max(1, -(-streams // count))
    flying = min(count, -(-streams // rows)) or 1
    steps = [profile.decode_s(rows, context) for profile in times.profiles]
    sends = [times.send_s(index, rows) for index in range(len(times.links))]
    slowest = max([*steps, *sends], default=0.0)
    token_s = max(times.turn_s(rows, context), flying * slowest)
    busy = flying * max(steps, default=0.0) / token_s if token_s else 0.0
    return Prospect(count, rows, token_s, busy)


class MicroBatches:
    """Decides ``K`` for one ring; ``fixed`` if that is not 0, ``degree`` while nothing is known."""

    def __init__(
        self,
        fixed: int,
        degree: int,
        profiles: Sequence[Profile],
        row_bytes: int,
        *,
        may_unpair: bool = True,
    ) -> None:
        self._fixed = fixed
        self._profiles = _known(profiles, degree)
        #: Whether prefill volumes may go without decode rows beyond the ``K``.
        self.may_unpair = may_unpair and bool(self._profiles)
        self._row_bytes = row_bytes
        self._links = (LinkFacts(),) * degree
        #: By streams and their context: the best count, and what each promises, in seconds.
        self._curves: dict[tuple[int, int], tuple[Prospect, dict[int, float]]] = {}
        #: By rows, tokens before them, decode rows of a micro-batch, and their context.
        self._unpaired: dict[tuple[int, int, int, int], Unpaired] = {}
        #: By micro-batches in flight.
        self._ahead: dict[int, int | None] = {}
        #: Micro-batches in flight now.
        self.count = fixed or degree

    def set_times(self, times: RingTimes) -> None:
        """Stages have measured themselves or their links anew.

        Where not all stages were known at first, none is.
        """
        self._profiles = _known(times.profiles, len(self._profiles))
        self._links = tuple(times.links)
        self._curves.clear()
        self._unpaired.clear()
        self._ahead.clear()

    def update(self, streams: int, context: int = 0) -> int:
        """``K`` while ``streams`` streams decode, of ``context`` tokens each on average."""
        if self.decides and streams:
            self.count = self._decide(streams, _rounded(context))
        return self.count

    @property
    def decides(self) -> bool:
        """Whether ``K`` is not fixed and the stages are known."""
        return bool(self._profiles) and not self._fixed

    def unpaired(self, rows: int, before: int, streams: int, context: int = 0) -> Unpaired:
        """What holds for chunks of ``rows`` rows that go unpaired; see :func:`unpaired`.

        None may where that is switched off or nothing is known of the stages.
        """
        if not self.may_unpair:
            return NONE
        riding = -(-streams // self.count)
        key = rows, _rounded(before), riding, _rounded(context)
        if key not in self._unpaired:
            if len(self._unpaired) >= _REMEMBERED:
                self._unpaired.clear()
            self._unpaired[key] = unpaired(self._times, *key)
        return self._unpaired[key]

    @property
    def rows_ahead(self) -> int | None:
        """Rows of a chunk of which there are as many in flight; see :func:`rows_ahead`."""
        if self.count not in self._ahead:
            self._ahead[self.count] = rows_ahead(self._times, self.count)
        return self._ahead[self.count]

    def _decide(self, streams: int, context: int) -> int:
        if (streams, context) not in self._curves:
            if len(self._curves) >= _REMEMBERED:
                self._curves.clear()
            curve = prospects(self._times, streams, context)
            now = {each.count: each.token_s for each in curve}
            self._curves[streams, context] = best_of(curve), now
        best, token_s = self._curves[streams, context]
        return best.count if best.token_s < (1 - WORTH) * token_s[self.count] else self.count

    @property
    def _times(self) -> RingTimes:
        return RingTimes(self._profiles, self._links, self._row_bytes)


def _known(profiles: Sequence[Profile], degree: int) -> tuple[Profile, ...]:
    """Those of all ``degree`` stages, or none."""
    known = len(profiles) == degree and all(profile.known for profile in profiles)
    return tuple(profiles) if known else ()


def _rounded(tokens: int) -> int:
    return tokens - tokens % _BEFORE
