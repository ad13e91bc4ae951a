"""Decides when a PC that may hold layers holds none.

Its user has drained it, the time of day forbids it, or other programs, such as a game, use its GPU.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

DRAINED_REASON = "drained"
CONTENTION_REASON = "paused while another program uses its GPU"
#: Shares of the GPU's time: other programs count as using it above the first, and no longer below
#: the second.
BUSY_SHARE = 0.3
FREE_SHARE = 0.15
#: Seconds of such use after which this PC pauses, and seconds without it after which it resumes.
PAUSE_DELAY_S = 15.0
RESUME_DELAY_S = 120.0
#: Time constant of the averaged share in seconds, so that a loading screen doesn't end a game.
_AVERAGING_TIME_S = 5.0
#: Seconds between samples above which the average restarts.
_MAX_GAP_S = 15.0
_MINUTES_PER_DAY = 24 * 60
_TIME_RANGE = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)")


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """A daily period in minutes after midnight, without its end; it may span midnight."""

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "DailyWindow":
        """Parse a window such as ``18:00-23:30``.

        Raises:
            ValueError: it is invalid.
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
        raise ValueError(f"not a daily period: {text!r}. Write for example 18:00-23:30.")

    def contains_minute(self, minute: int) -> bool:
        """Whether the minute is in the window."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        (h, m), (hh, mm) = divmod(self.start, 60), divmod(self.end, 60)
        return f"{h:02}:{m:02}-{hh:02}:{mm:02}"


class DeviceContention:
    """Detects whether other programs use the device so much that this PC should pause."""

    def __init__(self) -> None:
        self.busy = False
        self._mean = 0.0
        #: Time of the last sample, and time since which the average contradicts ``busy``.
        self._observed_at: float | None = None
        self._since: float | None = None

    def observe_usage(self, share: float, now: float) -> None:
        """Add a sample: other programs take ``share`` (0 to 1) of the device's time.

        Call it about once a second; a sample counts for the time since the previous one.
        """
        gap = math.inf if self._observed_at is None else now - self._observed_at
        self._observed_at = now
        if gap > _MAX_GAP_S:
            self._mean, self._since = share, None
        else:
            self._mean += (share - self._mean) * -math.expm1(-gap / _AVERAGING_TIME_S)
        changed = self._mean < FREE_SHARE if self.busy else self._mean >= BUSY_SHARE
        if not changed:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= (RESUME_DELAY_S if self.busy else PAUSE_DELAY_S):
            self.busy, self._since = not self.busy, None


class PausePolicy:
    """Decides whether this PC pauses."""

    def __init__(self, times: Sequence[str]) -> None:
        """``times`` are daily periods of pausing (:class:`DailyWindow`).

        Raises:
            ValueError: one is invalid.
        """
        self._windows = [DailyWindow.parse(text) for text in times]
        self.drained = False
        self.contention = DeviceContention()

    def pause_reason(self, minute: int) -> str:
        """Return why this PC pauses, for people; empty if it doesn't.

        ``minute`` is the minute of the local day.
        """
        if self.drained:
            return DRAINED_REASON
        window = next((time for time in self._windows if time.contains_minute(minute)), None)
        if window is not None:
            return f"paused from {window}".replace("-", " to ")
        return CONTENTION_REASON if self.contention.busy else ""
