"""When a PC that offers to hold layers holds none.

Its user says so, or the time of day; or somebody uses its GPU for something else, such as a game.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

DRAINED_REASON = "drained by its user"
CONTENTION_REASON = "paused while its GPU is used by something else"
#: The part of the GPU's time from which on others use it, and the one below which they don't.
BUSY, FREE = 0.3, 0.15
#: For how long, in seconds, until this PC gets out of their way; and until it comes back.
BUSY_S, FREE_S = 15.0, 120.0
#: A mean over about so long, in seconds, is what counts: a loading screen ends no game.
_AVERAGING_TIME_S = 5.0
#: Looks further apart than this, in seconds, say nothing of the time between them.
_MAX_GAP_S = 15.0
_MINUTES_PER_DAY = 24 * 60
_TIME_RANGE = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)")


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """A time of each day in minutes after midnight, ``start`` included, ``end`` not.

    It may last over midnight.
    """

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "DailyWindow":
        """``18:00-23:30``.

        Raises:
            ValueError: it is none.
        """
        match = _TIME_RANGE.fullmatch(text.strip())
        if match is not None:
            hour, minute, last_hour, last_minute = map(int, match.groups())
            start, end = 60 * hour + minute, 60 * last_hour + last_minute
            if (
                start < _MINUTES_PER_DAY
                and end <= _MINUTES_PER_DAY
                and start != end
                and max(minute, last_minute) < 60
            ):
                return cls(start, end)
        raise ValueError(f"not a time of the day: {text!r}. Write for example 18:00-23:30.")

    def contains_minute(self, minute: int) -> bool:
        """Whether it is that time."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        (h, m), (hh, mm) = divmod(self.start, 60), divmod(self.end, 60)
        return f"{h:02}:{m:02}-{hh:02}:{mm:02}"


class DeviceContention:
    """Whether others use the device so much that this PC gets out of their way."""

    def __init__(self) -> None:
        self.busy = False
        self._mean = 0.0
        #: When it was looked at last; and since when it is other than ``busy`` says.
        self._observed_at: float | None = None
        self._since: float | None = None

    def observe_usage(self, share: float, now: float) -> None:
        """Others take ``share`` (0 to 1) of the device's time at ``now``.

        To be called every second or so. The last look counts for the time since the one before.
        """
        gap = math.inf if self._observed_at is None else now - self._observed_at
        self._observed_at = now
        if gap > _MAX_GAP_S:
            self._mean, self._since = share, None
        else:
            self._mean += (share - self._mean) * -math.expm1(-gap / _AVERAGING_TIME_S)
        changed = self._mean < FREE if self.busy else self._mean >= BUSY
        if not changed:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= (FREE_S if self.busy else BUSY_S):
            self.busy, self._since = not self.busy, None


class PausePolicy:
    """Whether this PC's offer to hold layers stands at a time."""

    def __init__(self, times: Sequence[str]) -> None:
        """``times``: see :class:`DailyWindow`.

        Raises:
            ValueError: one of them is none.
        """
        self._windows = [DailyWindow.parse(text) for text in times]
        self.drained = False
        #: Of the device, by other programs.
        self.contention = DeviceContention()

    def pause_reason(self, minute: int) -> str:
        """Why it doesn't, for a person; empty if it does. ``minute`` after midnight, local time."""
        if self.drained:
            return DRAINED_REASON
        window = next((time for time in self._windows if time.contains_minute(minute)), None)
        if window is not None:
            return f"paused from {window}".replace("-", " to ")
        return CONTENTION_REASON if self.contention.busy else ""
