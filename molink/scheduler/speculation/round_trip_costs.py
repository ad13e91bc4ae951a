"""What drafts cost: how much longer a turn of the ring is with them."""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from molink.facts.drafts import MAX_DRAFTS
from molink.facts.profile import Profile
from molink.facts.ring_times import RingTimes

#: A volume that goes ahead may take a stage so many times as long as one row.
_MAX_SLOWDOWN = 1.5
#: Turns that are remembered.
_MEMO_SIZE = 4096
#: Tokens before rows are rounded to these, so that what a turn takes can be remembered.
_CONTEXT_STEP = 128
#: Seconds that a draft model takes are rounded to these, for the same reason.
_STEP_S = 1e-4


@dataclass(frozen=True, slots=True)
class RingLoad:
    """What the ring does: ``rows`` decode rows in a volume, ``flying`` such volumes in flight.

    ``context`` tokens come before a row, on average. ``has_prefill``: chunks of prompts run beside
    the decode rows.
    """

    rows: int
    flying: int
    context: int
    has_prefill: bool = False

    @property
    def rounded_context(self) -> "RingLoad":
        """One of few with about as many tokens before a row."""
        return replace(self, context=self.context - self.context % _CONTEXT_STEP)


class RoundTripCosts:
    """Turns of one ring, by what its stages and links have been measured to take."""

    def __init__(self, times: RingTimes) -> None:
        self._ring_times = times
        self._round_trips: dict[tuple[int, int, RingLoad], float] = {}
        #: Rows of volumes that go ahead, by context.
        self._balanced_rows: dict[int, int] = {}

    def set_times(self, times: RingTimes) -> None:
        """Stages have measured themselves or their links anew."""
        self._ring_times = times
        self._round_trips.clear()
        self._balanced_rows.clear()

    def round_trip_s(self, drafts: int, load: RingLoad, drafting_s: float = 0.0) -> float:
        """What a stream waits for its next token with so many drafts in a volume; 0 if unknown.

        For ``guessing_s`` the first stage's device has to find them before.
        """
        key = drafts, round(drafting_s / _STEP_S), load
        if key not in self._round_trips:
            if len(self._round_trips) >= _MEMO_SIZE:
                self._round_trips.clear()
            self._round_trips[key] = self._predict_s(drafts, load, key[1] * _STEP_S)
        return self._round_trips[key]

    def bottleneck_s(self, rows: int, context: float) -> float:
        """For how long a volume of decode rows keeps the slowest stage or link busy."""
        times = self._ring_times
        steps = (profile.decode_s(rows, context) for profile in times.profiles)
        return max((*steps, *(times.send_s(index, rows) for index in range(len(times.links)))))

    def balanced_rows(self, context: int) -> int:
        """As many rows as the slowest link sends while the slowest stage computes.

        Fewer, if so many take that stage much longer than one.
        """
        if context not in self._balanced_rows:
            times = self._ring_times
            send = max((times.send_s(index, 1) for index in range(len(times.links))), default=0.0)
            steps = [
                max(profile.decode_s(rows, context) for profile in times.profiles)
                for rows in range(1, 1 + MAX_DRAFTS)
            ]
            rows = bisect_right(steps, _MAX_SLOWDOWN * steps[0])
            self._balanced_rows[context] = min(rows, math.ceil(steps[0] / send)) if send else rows
        return self._balanced_rows[context]

    def _predict_s(self, drafts: int, load: RingLoad, drafting_s: float) -> float:
        times, rows = self._ring_times, load.rows + drafts
        if not times.profiles or not all(profile.is_known for profile in times.profiles):
            return 0.0
        steps = [_step_s(profile, drafts, load) for profile in times.profiles]
        steps[0] += drafting_s
        sends = [times.send_s(index, rows) for index in range(len(times.links))]
        return max(sum(steps) + times.transfer_s(rows), load.flying * max([*steps, *sends]))


def _step_s(profile: Profile, drafts: int, load: RingLoad) -> float:
    """Seconds of a decode step, and by how much ``drafts`` make a chunk beside it longer.

    A chunk reads the weights for all rows, so that none is for free; and with the decode rows it
    has as many as make whole tiles (:mod:`molink.scheduler.chunk_size`), so that one more is a tile
    more.
    """
    seconds = profile.decode_s(load.rows + drafts, load.context)
    if load.has_prefill and len(profile.prefill) > 1:
        (fewer, low), (more, high) = profile.prefill[-2:]
        tiles = -(-drafts // profile.tile)
        seconds += tiles * profile.tile * max(0.0, high - low) / (more - fewer)
    return seconds
