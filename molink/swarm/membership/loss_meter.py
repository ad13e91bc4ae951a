"""Estimates how many packets a path loses, from TCP handshakes."""

from collections.abc import Sequence

#: A lost packet of a handshake is retransmitted after a second (RFC 6298, section 2). A handshake
#: counts as late if it takes at least this many seconds longer than the shortest one.
_LATE_S = 0.9
#: Minimum number of late handshakes for an estimate, and the number of handshakes after which the
#: older ones count half.
_MIN_LOST, _MEMORY = 3, 1000


class LossMeter:
    """Estimates the share of packets that one path loses."""

    def __init__(self) -> None:
        self._num_handshakes = self._num_late = 0.0

    def record_handshakes(self, seconds: Sequence[float]) -> None:
        """Record the durations of a few consecutive handshakes, in seconds."""
        self._num_handshakes += len(seconds)
        self._num_late += sum(each - min(seconds) >= _LATE_S for each in seconds)
        if self._num_handshakes > _MEMORY:
            self._num_handshakes, self._num_late = self._num_handshakes / 2, self._num_late / 2

    @property
    def loss(self) -> float | None:
        """Share of packets lost in each direction; ``None`` until enough handshakes were late."""
        if self._num_late < _MIN_LOST:
            return None
        return self._num_late / self._num_handshakes / 2
