"""How long the link stays free of decode rows: ``T_a`` of the MoLink paper (§4).

Symbols: ``t_c`` when the prefill transmission starts, ``t_s`` when the decode execution that runs
(or comes next) starts, ``t_d`` how long it takes, ``t_p`` when the first decode batch of the latest
iteration finished, ``t_o`` and ``t_m`` what a turn of the ring takes in computing and in
transmissions. All in seconds.
"""

from molink.link.policies.base import DecodeFinished, DecodeStarted, Event

#: A decode execution that is later than predicted by this much is not expected any more.
OVERDUE = 0.1


def idle_interval(t_s: float, t_d: float, t_c: float) -> float:
    """The general form: until the decode execution is over, and its rows need the link."""
    return t_s + t_d - t_c


def first_chunk(t_d: float) -> float:
    """Case 1, ``t_c = t_s``: the transmission starts together with a decode execution."""
    return t_d


def during_decode(t_s: float, t_d: float, t_c: float) -> float:
    """Case 2, ``t_c > t_s``: a decode execution is running."""
    return t_d + t_s - t_c


def after_last_decode(t_p: float, t_o: float, t_m: float, t_c: float) -> float:
    """Case 3, ``t_c < t_s``: none runs, and the first batch of the iteration comes next.

    It finished here at ``t_p``, so after a whole turn it will have finished here again.
    """
    return t_p + t_o + t_m - t_c


class IdleInterval:
    """Knows by the executor's events until when the link is free of decode rows.

    ``DecodeFinished.next_predicted`` brings case 3: it is ``t_p + t_o + t_m`` less the time of the
    event. Where the paper has no answer, ours: a late execution leaves an interval of 0, and one
    that is later than :data:`OVERDUE` is taken for gone, as after the last request of all.
    """

    def __init__(self) -> None:
        #: Start and predicted duration of the decode execution that runs.
        self._running: tuple[float, float] | None = None
        #: When the rows of the next decode execution are expected, if none runs.
        self._next_at: float | None = None

    def handle(self, event: Event, now: float) -> None:
        """Take note of the executor's start or finish; other events don't matter."""
        match event:
            case DecodeStarted():
                self._running = (now, event.predicted)
            case DecodeFinished():
                self._running = None
                after = event.next_predicted
                self._next_at = None if after is None else now + after

    def at(self, t_c: float) -> float | None:
        """``T_a`` for a transmission that starts now; ``None`` if no decode rows are expected."""
        given_up_at = self.given_up_at
        if given_up_at is None or t_c >= given_up_at:
            return None
        if self._running is not None:
            t_s, t_d = self._running
            left = first_chunk(t_d) if t_c == t_s else during_decode(t_s, t_d, t_c)
        else:
            assert self._next_at is not None
            left = self._next_at - t_c  # after_last_decode: its first three terms came summed
        return max(0.0, left)

    @property
    def given_up_at(self) -> float | None:
        """When what is expected will be taken for gone, if it doesn't come."""
        if self._running is not None:
            return sum(self._running) + OVERDUE
        return None if self._next_at is None else self._next_at + OVERDUE
