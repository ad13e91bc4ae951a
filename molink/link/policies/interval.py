"""Predicts how long the link stays free of decode rows: ``T_a`` of the MoLink paper (§4).

The paper has three cases by the start of the prefill transmission (``t_c``) and of the current or
next decode step (``t_s``, lasting ``T_d``):

1. ``t_c = t_s``: both start together, ``T_a = T_d``.
2. ``t_c > t_s``: the step runs, ``T_a = t_s + T_d - t_c``.
3. ``t_c < t_s``: no step runs. The first batch of the latest iteration finished here at ``t_p`` and
   finishes here again one round trip later, ``T_a = t_p + T_o + T_m - t_c``.

So ``T_a`` is the next finish of decode rows minus ``t_c``. The executor's events provide it: a
start carries ``T_d`` (cases 1 and 2), a finish the sum of case 3. All times are seconds.
"""

from molink.link.policies.base import DecodeFinishedEvent, DecodeStartedEvent, LinkEvent

#: Decode rows that are late by more than this many seconds, and by more than their predicted
#: round trip, are no longer expected.
OVERDUE = 0.1


class IdleInterval:
    """Tracks until when the link is free of decode rows.

    Beyond the paper: while a step is late the interval is 0, and a step that is far too late
    (:data:`OVERDUE`), as after the last request, is no longer expected.
    """

    def __init__(self) -> None:
        #: When the next decode rows should finish, and when they are no longer expected; ``None``
        #: if none are.
        self._expected: tuple[float, float] | None = None

    def handle(self, event: LinkEvent, now: float) -> None:
        """Record the start or finish of a decode step."""
        match event:
            case DecodeStartedEvent(predicted=seconds):
                self._expect(seconds, now)
            case DecodeFinishedEvent(next_predicted=None):
                self._expected = None
            case DecodeFinishedEvent(next_predicted=seconds) if seconds is not None:
                self._expect(seconds, now)

    def _expect(self, seconds: float, now: float) -> None:
        self._expected = now + seconds, now + seconds + max(OVERDUE, seconds)

    def interval_at(self, t_c: float) -> float | None:
        """Return ``T_a`` of a transmission that starts at ``t_c``.

        ``None`` if no decode rows are expected.
        """
        if self._expected is None:
            return None
        finished_at, given_up_at = self._expected
        return None if t_c >= given_up_at else max(0.0, finished_at - t_c)
