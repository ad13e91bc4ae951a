"""Decides how fast a transfer goes beside a pipeline that serves: it takes what is left of a line.

After LEDBAT++ (draft-irtf-iccrg-ledbat-plus-plus, RFC 6817), by the side that receives: it asks for
slices of a file, as many at a time as its window says, evenly spaced. What an answer takes beyond
the least that one has taken is time in queues, its own bytes' or others'. The window grows while
that is below a target and shrinks at once when it is above, so whoever else sends finds the queues
nearly empty.
"""

from collections import deque

from molink.errors import InvariantError

#: Bytes of a slice, at first and at most. At first: 3.3 ms of a line of 20 Mbps.
SLICE, MAX_SLICE = 8 * 1024, 64 * 1024
#: What a slice may take of a line, in seconds: larger ones cost less work.
SLICE_S = 0.0015
#: Time in queues that a transfer may cause, in seconds.
TARGET_DELAY = 0.002
#: Slices under way: most of them fill 100 Mbps at a round trip of 80 ms.
MAX_WINDOW = 128.0
#: The delay of now is the least of so many last answers: programs are late now and then.
DELAY_FILTER = 4
#: So often, in seconds, slices are asked for one by one, to see how long one takes in empty queues;
#: more often at first.
FIRST_PROBE, PROBE_EVERY = 1.0, 30.0
#: How many are for a probe, and how many probes the least time is taken of.
PROBE_SLICES, PROBES = 3, 4


class TransferRateLimiter:
    """One transfer from one source. All times in seconds of one clock, all sizes in bytes."""

    def __init__(self, floor: float = 0.0) -> None:
        """``floor``: bytes per second that are asked for however slowly they come."""
        self._min_rate = floor
        #: Bytes that are to be asked for at once.
        self.slice_bytes = SLICE
        #: Slices that may be under way. 1.0 … :data:`MAX_WINDOW`.
        self.window = 1.0
        #: Slices that are. Never negative.
        self.in_flight = 0
        self._requested_at = float("-inf")
        self._recent_delays: deque[float] = deque(maxlen=DELAY_FILTER)
        self._base_delays: deque[float] = deque(maxlen=PROBES)
        #: What the present probe has found, or ``None`` between two of them.
        self._probe: list[float] | None = []
        self._probed_at = 0.0
        self._probe_interval = FIRST_PROBE
        #: Bytes since the last probe.
        self._bytes = 0

    @property
    def queueing_delay(self) -> float:
        """How long answers wait in queues at present."""
        if not self._recent_delays or not self._base_delays:
            return 0.0
        return max(0.0, min(self._recent_delays) - min(self._base_delays))

    def wait_time(self, now: float) -> float | None:
        """How long to wait before the next slice is asked for; ``None``: until one has come."""
        if self._min_rate and self.in_flight < MAX_WINDOW:
            due = self._requested_at + self.slice_bytes / self._min_rate - now
            if due <= 0:
                return 0.0
        else:
            due = None
        if self.in_flight >= int(self._max_in_flight):
            return due
        gap = max(0.0, self._requested_at + self._spacing - now)
        return gap if due is None else min(gap, due)

    def on_request(self, now: float) -> None:
        """A slice is asked for."""
        self.in_flight += 1
        self._requested_at = now

    def on_failure(self) -> None:
        """One will not come."""
        self.in_flight -= 1
        self.window = 1.0

    def on_slice(self, nbytes: int, took: float, now: float) -> None:
        """One of ``nbytes`` has come, ``took`` seconds after it was asked for."""
        self.in_flight -= 1
        self._bytes += nbytes
        if nbytes != self.slice_bytes:
            return  # what others take can't be told from it
        self._recent_delays.append(took)
        if self._probe is not None:
            self._record_probe(took, now)
            return
        if now - self._probed_at >= self._probe_interval:
            self._start_probe(now)
            return
        excess = self.queueing_delay / TARGET_DELAY - 1
        step = 1.0 if excess <= 0 else max(1.0 - self.window * excess, -self.window / 2)
        self.window = min(max(1.0, self.window + step / self.window), MAX_WINDOW)

    def _start_probe(self, now: float) -> None:
        """See how long a slice takes; larger ones from now on, if the line is fast."""
        rate = self._bytes / (now - self._probed_at)
        self._probe, self._probe_interval = [], min(2 * self._probe_interval, PROBE_EVERY)
        size = self.slice_bytes
        while 2 * size <= min(MAX_SLICE, SLICE_S * rate):
            size *= 2
        if size != self.slice_bytes:
            self.window = max(1.0, self.window * self.slice_bytes / size)
            self.slice_bytes = size
            self._base_delays.clear()

    def _record_probe(self, took: float, now: float) -> None:
        """The first answers of a probe are of slices that were under way together."""
        assert self._probe is not None
        if self.in_flight:
            return
        self._probe.append(took)
        if len(self._probe) >= PROBE_SLICES:
            self._base_delays.append(min(self._probe))
            self._probe, self._probed_at, self._bytes = None, now, 0
            self._recent_delays.clear()

    @property
    def _max_in_flight(self) -> float:
        return 1.0 if self._probe is not None else self.window

    @property
    def _spacing(self) -> float:
        """Between two slices: those of a window are spread over the time that one takes."""
        if self._probe is not None or not self._recent_delays:
            return 0.0
        return min(self._recent_delays) / self.window

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one doesn't hold.
        """
        if not 1.0 <= self.window <= MAX_WINDOW:
            raise InvariantError(f"a window of {self.window} slices")
        if self.in_flight < 0:
            raise InvariantError(f"{self.in_flight} slices are under way")
