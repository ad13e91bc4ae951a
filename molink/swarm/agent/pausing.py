"""When a PC that offers to hold layers holds none.

Its user says so, or the time of day; or somebody uses its GPU for something else, such as a game.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

DRAINED = "drained by its user"
USED = "paused while its GPU is used by something else"
#: The part of the GPU's time from which on others use it, and the one below which they don't.
BUSY, FREE = 0.3, 0.15
#: For how long, in seconds, until this PC gets out of their way; and until it comes back.
BUSY_S, FREE_S = 15.0, 120.0
#: A mean over about so long, in seconds, is what counts: a loading screen ends no game.
_MEAN_S = 5.0
#: Looks further apart than this, in seconds, say nothing of the time between them.
_GAP_S = 15.0
_DAY = 24 * 60
_TIMES = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)")


@dataclass(frozen=True, slots=True)
class DailyTime:
    """A time of each day in minutes after midnight, ``begin`` included, ``end`` not.

    It may last over midnight.
    """

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "DailyTime":
        """``18:00-23:30``.

        Raises:
            ValueError: it is none.
        """
        match = _TIMES.fullmatch(text.strip())
        if match is not None:
            hour, minute, last_hour, last_minute = map(int, match.groups())
            begin, end = 60 * hour + minute, 60 * last_hour + last_minute
            if begin < _DAY and end <= _DAY and begin != end and max(minute, last_minute) < 60:
                return cls(begin, end)
        raise ValueError(f"not a time of the day: {text!r}. Write for example 18:00-23:30.")

    def holds(self, minute: int) -> bool:
        """Whether it is that time."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        (h, m), (hh, mm) = divmod(self.begin, 60), divmod(self.end, 60)
        return f"{h:02}:{m:02}-{hh:02}:{mm:02}"


class OthersUse:
    """Whether others use the device so much that this PC gets out of their way."""

    def __init__(self) -> None:
        self.busy = False
        self._mean = 0.0
        #: When it was looked at last; and since when it is other than ``busy`` says.
        self._seen: float | None = None
        self._since: float | None = None

    def observe(self, share: float, now: float) -> None:
        """Others take ``share`` (0 to 1) of the device's time at ``now``.

        To be called every second or so. The last look counts for the time since the one before.
        """
        gap = math.inf if self._seen is None else now - self._seen
        self._seen = now
        if gap > _GAP_S:
            self._mean, self._since = share, None
        else:
            self._mean += (share - self._mean) * -math.expm1(-gap / _MEAN_S)
        changed = self._mean < FREE if self.busy else self._mean >= BUSY
        if not changed:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= (FREE_S if self.busy else BUSY_S):
            self.busy, self._since = not self.busy, None


class Pausing:
    """Whether this PC's offer to hold layers stands at a time."""

    def __init__(self, times: Sequence[str]) -> None:
        """``times``: see :class:`DailyTime`.

        Raises:
            ValueError: one of them is none.
        """
        self._times = [DailyTime.parse(text) for text in times]
        self.drained = False
        #: Of the device, by other programs.
        self.others = OthersUse()

    def reason(self, minute: int) -> str:
        """Why it doesn't, for a person; empty if it does. ``minute`` after midnight, local time."""
        if self.drained:
            return DRAINED
        held = next((time for time in self._times if time.holds(minute)), None)
        if held is not None:
            return f"paused from {held}".replace("-", " to ")
        return USED if self.others.busy else ""
