"""HyStart: leave slow start before the queue overflows (Ha and Rhee, 2011; Linux's parameters)."""

from math import inf

from molink.sim.congestion.base import SEGMENT_BYTES, SegmentsAcked

#: Smaller windows don't look, in segments.
_MIN_WINDOW = 16
#: Acknowledgements of one train are no further apart, in seconds.
_TRAIN_GAP = 0.002
#: Round trips that are looked at before their least one counts.
_SAMPLES = 8
#: How much longer than the least the round trips of a full link are: an eighth, within bounds.
_DELAY_SHARE = 1 / 8
_MIN_DELAY, _MAX_DELAY = 0.004, 0.016


class HyStart:
    """Two signs that a window is as large as the link: a long train, or longer round trips."""

    def __init__(self, paced: bool = False) -> None:
        """``paced``: then a train may be a whole round trip long, as pacing stretches it."""
        self._train = 1.0 if paced else 0.5
        self._minimum = inf
        self._round_end = -1
        self._round_begin = self._last = 0.0
        self._samples = 0
        self._min_of_round = inf

    def is_full(self, acked: SegmentsAcked, window: float) -> bool:
        """Whether slow start should end; told every acknowledgement in it."""
        now = acked.now
        self._minimum = min(self._minimum, acked.round_trip)
        if acked.delivered > self._round_end:
            self._round_end = acked.delivered + acked.in_flight
            self._round_begin = self._last = now
            self._samples, self._min_of_round = 0, inf
        if window < _MIN_WINDOW * SEGMENT_BYTES:
            return False
        if now - self._last <= _TRAIN_GAP:
            self._last = now
            if now - self._round_begin > self._minimum * self._train:
                return True
        self._min_of_round = min(self._min_of_round, acked.round_trip)
        self._samples += 1
        more = min(max(_MIN_DELAY, self._minimum * _DELAY_SHARE), _MAX_DELAY)
        return self._samples > _SAMPLES and self._min_of_round > self._minimum + more
