"""What drafts cost: how much longer a turn of the ring is with them."""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from molink.facts.drafts import MAX_DRAFTS
from molink.facts.profile import Profile
from molink.facts.ringtimes import RingTimes

#: A volume that goes ahead may take a stage so many times as long as one row.
_SLOWER = 1.5
#: Turns that are remembered.
_REMEMBERED = 4096
#: Tokens before rows are rounded to these, so that what a turn takes can be remembered.
_BEFORE = 128
#: Seconds that a draft model takes are rounded to these, for the same reason.
_STEP_S = 1e-4


@dataclass(frozen=True, slots=True)
class RingLoad:
    """What the ring does: ``rows`` decode rows in a volume, ``flying`` such volumes in flight.

    ``context`` tokens come before a row, on average. ``prefilling``: chunks of prompts run beside
    the decode rows.
    """

    rows: int
    flying: int
    context: int
    prefilling: bool = False

    @property
    def rounded(self) -> "RingLoad":
        """One of few with about as many tokens before a row."""
        return replace(self, context=self.context - self.context % _BEFORE)


class TurnCosts:
    """Turns of one ring, by what its stages and links have been measured to take."""

    def __init__(self, times: RingTimes) -> None:
        self._times = times
        self._turns: dict[tuple[int, int, RingLoad], float] = {}
        #: Rows of volumes that go ahead, by context.
        self._paces: dict[int, int] = {}

    def set_times(self, times: RingTimes) -> None:
        """Stages have measured themselves or their links anew."""
        self._times = times
        self._turns.clear()
        self._paces.clear()

    def turn_s(self, drafts: int, load: RingLoad, guessing_s: float = 0.0) -> float:
        """What a stream waits for its next token with so many drafts in a volume; 0 if unknown.

        For ``guessing_s`` the first stage's device has to find them before.
        """
        key = drafts, round(guessing_s / _STEP_S), load
        if key not in self._turns:
            if len(self._turns) >= _REMEMBERED:
                self._turns.clear()
            self._turns[key] = self._measure(drafts, load, key[1] * _STEP_S)
        return self._turns[key]

    def busy_s(self, rows: int, context: float) -> float:
        """For how long a volume of decode rows keeps the slowest stage or link busy."""
        times = self._times
        steps = (profile.decode_s(rows, context) for profile in times.profiles)
        return max((*steps, *(times.send_s(index, rows) for index in range(len(times.links)))))

    def keeping_pace(self, context: int) -> int:
        """As many rows as the slowest link sends while the slowest stage computes.

        Fewer, if so many take that stage much longer than one.
        """
        if context not in self._paces:
            times = self._times
            send = max((times.send_s(index, 1) for index in range(len(times.links))), default=0.0)
            steps = [
                max(profile.decode_s(rows, context) for profile in times.profiles)
                for rows in range(1, 1 + MAX_DRAFTS)
            ]
            rows = bisect_right(steps, _SLOWER * steps[0])
            self._paces[context] = min(rows, math.ceil(steps[0] / send)) if send else rows
        return self._paces[context]

    def _measure(self, drafts: int, load: RingLoad, guessing_s: float) -> float:
        times, rows = self._times, load.rows + drafts
        if not times.profiles or not all(profile.known for profile in times.profiles):
            return 0.0
        steps = [_step_s(profile, drafts, load) for profile in times.profiles]
        steps[0] += guessing_s
        sends = [times.send_s(index, rows) for index in range(len(times.links))]
        return max(sum(steps) + times.transfer_s(rows), load.flying * max([*steps, *sends]))


def _step_s(profile: Profile, drafts: int, load: RingLoad) -> float:
    """Seconds of a decode step, and by how much ``drafts`` make a chunk beside it longer.

    A chunk reads the weights for all rows, so that none is for free; and with the decode rows it
    has as many as make whole tiles (:mod:`molink.scheduler.chunk`), so that one more is a tile
    more.
    """
    seconds = profile.decode_s(load.rows + drafts, load.context)
    if load.prefilling and len(profile.prefill) > 1:
        (fewer, low), (more, high) = profile.prefill[-2:]
        tiles = -(-drafts // profile.tile)
        seconds += tiles * profile.tile * max(0.0, high - low) / (more - fewer)
    return seconds
