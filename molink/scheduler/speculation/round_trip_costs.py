"""The cost of drafts: the longer round trip of their volume."""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from molink.facts.drafts import MAX_DRAFTS
from molink.facts.profile import Profile
from molink.facts.ring_times import RingTimes

#: Maximum slowdown of a stage by a lookahead volume, relative to one row.
_MAX_SLOWDOWN = 1.5
_MEMO_SIZE = 4096
#: Contexts are rounded down to multiples of this for the memos.
_CONTEXT_STEP = 128
#: Draft model times are rounded to this for the memo, in seconds.
_STEP_S = 1e-4


@dataclass(frozen=True, slots=True)
class RingLoad:
    """The ring's load: ``rows`` decode rows per volume, ``volumes_in_flight`` such volumes.

    ``context`` tokens precede a row on average. ``has_prefill`` means that volumes carry chunks.
    """

    rows: int
    volumes_in_flight: int
    context: int
    has_prefill: bool = False

    @property
    def rounded_context(self) -> "RingLoad":
        """Return the load with its context rounded."""
        return replace(self, context=self.context - self.context % _CONTEXT_STEP)


class RoundTripCosts:
    """Round trips of one ring, predicted from measured stages and links."""

    def __init__(self, times: RingTimes) -> None:
        self._ring_times = times
        self._round_trips: dict[tuple[int, int, RingLoad], float] = {}
        #: Rows of lookahead volumes, by context.
        self._balanced_rows: dict[int, int] = {}

    def set_times(self, times: RingTimes) -> None:
        """Update stage and link times."""
        self._ring_times = times
        self._round_trips.clear()
        self._balanced_rows.clear()

    @property
    def mtp_s(self) -> float:
        """Return the seconds of one more MTP token at the last stage."""
        profiles = self._ring_times.profiles
        return profiles[-1].mtp_s if profiles else 0.0

    def round_trip_s(self, drafts: int, load: RingLoad, drafting_s: float = 0.0) -> float:
        """Return the seconds per token of a stream with ``drafts`` in its volume; 0 if unknown.

        ``drafting_s`` is the time that the first stage's device spends on a draft model before.
        """
        key = drafts, round(drafting_s / _STEP_S), load
        if key not in self._round_trips:
            if len(self._round_trips) >= _MEMO_SIZE:
                self._round_trips.clear()
            self._round_trips[key] = self._predict_s(drafts, load, key[1] * _STEP_S)
        return self._round_trips[key]

    def bottleneck_s(self, rows: int, context: float) -> float:
        """Return the seconds for which a decode volume occupies the slowest stage or link."""
        times = self._ring_times
        steps = (profile.decode_s(rows, context) for profile in times.profiles)
        return max((*steps, *(times.send_s(index, rows) for index in range(len(times.links)))))

    def balanced_rows(self, context: int) -> int:
        """Return the rows that the slowest link sends while the slowest stage computes.

        They are fewer if the stage would take much longer than for one row.
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
        return max(
            sum(steps) + times.transfer_s(rows), load.volumes_in_flight * max([*steps, *sends])
        )


def _step_s(profile: Profile, drafts: int, load: RingLoad) -> float:
    """Return the seconds of a decode step with ``drafts`` and the growth of its chunk, if any.

    A chunk shares the weights among all rows and fills whole tiles with the decode rows
    (:mod:`molink.scheduler.chunk_size`), so one more row costs one more tile.
    """
    seconds = profile.decode_s(load.rows + drafts, load.context)
    if load.has_prefill and len(profile.prefill) > 1:
        (fewer, low), (more, high) = profile.prefill[-2:]
        tiles = -(-drafts // profile.tile)
        seconds += tiles * profile.tile * max(0.0, high - low) / (more - fewer)
    return seconds
