"""Rate limit for background transfers, which use only bandwidth that a serving pipeline leaves.

This is receiver-side LEDBAT++ (draft-irtf-iccrg-ledbat-plus-plus, RFC 6817). The receiver requests
evenly spaced slices of a file, as many at a time as its window allows. A response's delay beyond
the minimum is queueing. The window grows while queueing is below a target, and shrinks immediately
above it, so other traffic meets nearly empty queues.
"""

from collections import deque

from molink.errors import InvariantError

#: Initial and maximum bytes of a slice. The initial one takes 3.3 ms at 20 Mbps.
SLICE, MAX_SLICE = 8 * 1024, 64 * 1024
#: Target seconds of a slice on the line; larger slices cost less work.
SLICE_S = 0.0015
#: Maximum queueing delay that a transfer may cause, in seconds.
TARGET_DELAY = 0.002
#: Maximum slices in flight, which fill 100 Mbps at a round trip of 80 ms.
MAX_WINDOW = 128.0
#: The current delay is the minimum over this many responses, since processes are occasionally late.
DELAY_FILTER = 4
#: Seconds between probes, in which slices are requested one by one to measure the delay on empty
#: queues; the first interval is shorter.
FIRST_PROBE, PROBE_EVERY = 1.0, 30.0
#: Slices per probe, and number of recent probes whose minimum counts.
PROBE_SLICES, PROBES = 3, 4


class TransferRateLimiter:
    """Limits one transfer from one source. Times are seconds of one clock, sizes are bytes."""

    def __init__(self, floor: float = 0.0) -> None:
        """``floor`` is the minimum requested bytes per second, even if they arrive more slowly."""
        self._min_rate = floor
        #: Size of the next request.
        self.slice_bytes = SLICE
        #: Slices that may be in flight, from 1.0 to :data:`MAX_WINDOW`.
        self.window = 1.0
        #: Slices in flight. Never negative.
        self.in_flight = 0
        self._requested_at = float("-inf")
        self._recent_delays: deque[float] = deque(maxlen=DELAY_FILTER)
        self._base_delays: deque[float] = deque(maxlen=PROBES)
        #: Delays of the current probe; ``None`` between probes.
        self._probe: list[float] | None = []
        self._probed_at = 0.0
        self._probe_interval = FIRST_PROBE
        #: Bytes since the last probe.
        self._bytes = 0

    @property
    def queueing_delay(self) -> float:
        """Current queueing delay of responses."""
        if not self._recent_delays or not self._base_delays:
            return 0.0
        return max(0.0, min(self._recent_delays) - min(self._base_delays))

    def wait_time(self, now: float) -> float | None:
        """Return the seconds until the next request; ``None`` means until a slice arrives."""
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
        """Record that a slice was requested."""
        self.in_flight += 1
        self._requested_at = now

    def on_failure(self) -> None:
        """Record that a requested slice will not arrive."""
        self.in_flight -= 1
        self.window = 1.0

    def on_slice(self, nbytes: int, took: float, now: float) -> None:
        """Record that a slice of ``nbytes`` arrived ``took`` seconds after its request."""
        self.in_flight -= 1
        self._bytes += nbytes
        if nbytes != self.slice_bytes:
            return  # a partial slice does not measure the delay
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
        """Start to measure a slice's time on empty queues; use larger slices on a fast line."""
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
        """Record a probe's response, after all earlier slices have arrived."""
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
        """Return the interval between requests: a window is spread over one response time."""
        if self._probe is not None or not self._recent_delays:
            return 0.0
        return min(self._recent_delays) / self.window

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one is violated.
        """
        if not 1.0 <= self.window <= MAX_WINDOW:
            raise InvariantError(f"a window of {self.window} slices")
        if self.in_flight < 0:
            raise InvariantError(f"{self.in_flight} slices are under way")
