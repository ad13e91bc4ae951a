"""How long the link stays free of decode rows: ``T_a`` of the MoLink paper (§4).

The paper has three cases, by when the prefill transmission starts (``t_c``) and the decode
execution that runs or comes next does (``t_s``, for ``T_d``):

1. ``t_c = t_s``: both start together, ``T_a = T_d``.
2. ``t_c > t_s``: it is running, ``T_a = t_s + T_d - t_c``.
3. ``t_c < t_s``: none runs; the first batch of the latest iteration finished here at ``t_p`` and
   will have finished here again a turn of the ring later, ``T_a = t_p + T_o + T_m - t_c``.

So ``T_a`` is always the moment at which the next decode rows are finished, less ``t_c``. The
executor's events tell that moment: a start brings ``T_d`` (cases 1 and 2), a finish the sum of case
3. All in seconds.
"""

from molink.link.policies.base import DecodeFinishedEvent, DecodeStartedEvent, LinkEvent

#: Decode rows that are later than expected by this much, in seconds, and by as much again as it was
#: until then when that was predicted, are not expected any more.
OVERDUE = 0.1


class IdleInterval:
    """Knows by the executor's events until when the link is free of decode rows.

    Where the paper has no answer, ours: a late execution leaves an interval of 0, and one that is
    far too late (:data:`OVERDUE`) is taken for gone, as after the last request of all.
    """

    def __init__(self) -> None:
        #: When the next decode rows should be finished, and when they are given up; ``None`` if
        #: none are expected.
        self._expected: tuple[float, float] | None = None

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take note of the executor's start or finish; other events don't matter."""
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
        """``T_a`` for a transmission that starts now; ``None`` if no decode rows are expected."""
        if self._expected is None:
            return None
        finished_at, given_up_at = self._expected
        return None if t_c >= given_up_at else max(0.0, finished_at - t_c)
