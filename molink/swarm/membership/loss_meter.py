"""Estimates how many packets a path loses, from TCP handshakes."""

from collections.abc import Sequence

#: A lost packet of a handshake is sent again after a second (RFC 6298, section 2), so the handshake
#: takes longer than the shortest one by at least this many seconds.
_LATE_S = 0.9
#: Minimum losses for an estimate, and handshakes after which older ones count half.
_MIN_LOST, _MEMORY = 3, 1000


class LossMeter:
    """The share of packets lost on one path, ``None`` until enough were lost."""

    def __init__(self) -> None:
        self._num_handshakes = self._num_late = 0.0

    def record_handshakes(self, seconds: Sequence[float]) -> None:
        """Record how long a few handshakes took, one after another."""
        self._num_handshakes += len(seconds)
        self._num_late += sum(each - min(seconds) >= _LATE_S for each in seconds)
        if self._num_handshakes > _MEMORY:
            self._num_handshakes, self._num_late = self._num_handshakes / 2, self._num_late / 2

    @property
    def loss(self) -> float | None:
        """Share of packets lost in each direction; a handshake waits for one packet each way."""
        if self._num_late < _MIN_LOST:
            return None
        return self._num_late / self._num_handshakes / 2
