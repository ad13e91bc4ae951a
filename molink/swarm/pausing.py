"""When a PC that offers to hold layers holds none: its user says so, or the time of day."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

DRAINED = "drained by its user"
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


class Pausing:
    """Whether this PC's offer to hold layers stands at a time."""

    def __init__(self, times: Sequence[str]) -> None:
        """``times``: see :class:`DailyTime`.

        Raises:
            ValueError: one of them is none.
        """
        self._times = [DailyTime.parse(text) for text in times]
        self.drained = False

    def reason(self, minute: int) -> str:
        """Why it doesn't, for a person; empty if it does. ``minute`` after midnight, local time."""
        if self.drained:
            return DRAINED
        held = next((time for time in self._times if time.holds(minute)), None)
        return f"paused from {held}".replace("-", " to ") if held is not None else ""
