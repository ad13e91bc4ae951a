"""How much of a link's rate a background transfer uses, and leaves to others."""

from collections import deque
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import InvariantError
from molink.swarm.artifacts.rate_limit import (
    MAX_WINDOW,
    PROBE_EVERY,
    SLICE,
    TARGET_DELAY,
    TransferRateLimiter,
)


class Line:
    """A queue with a rate and a round trip, for our slices and another sender's frames.

    Time is virtual. ``other``: share of the rate that the other sender uses, in frames of 8 KB.
    """

    def __init__(
        self, mbps: float, rtt: float, pacer: TransferRateLimiter, other: float = 0.0
    ) -> None:
        self.rate, self.rtt, self.pacer = mbps * 1e6 / 8, rtt, pacer
        self.now = self.free = 0.0
        self.frame = 8192
        self.gap = self.frame / (other * self.rate) if other else inf
        self.next_frame = 0.0 if other else inf
        #: Requested slices on their way to the source, and arrival times of slices on their way
        #: back.
        self.entering: deque[tuple[float, int]] = deque()
        self.coming: deque[tuple[float, float, int]] = deque()
        self.waits: list[float] = []
        self.bytes = 0

    def run(self, until: float) -> None:
        """Advance the time."""
        while self.now < until:
            wait = self.pacer.wait_time(self.now)
            if wait == 0:
                self.pacer.on_request(self.now)
                self.entering.append((self.now, self.pacer.slice_bytes))
                continue
            events = [self.next_frame, self.now + wait if wait is not None else inf]
            events += [self.entering[0][0] + self.rtt / 2] if self.entering else []
            events += [self.coming[0][0]] if self.coming else []
            self.now = min(events)
            self._happen()

    def _happen(self) -> None:
        if self.coming and self.coming[0][0] <= self.now:
            _, asked, size = self.coming.popleft()
            self.pacer.on_slice(size, self.now - asked, self.now)
            self.pacer.validate()
            self.bytes += size
        if self.entering and self.entering[0][0] + self.rtt / 2 <= self.now:
            asked, size = self.entering.popleft()
            self.free = max(self.free, self.now) + size / self.rate
            self.coming.append((self.free + self.rtt / 2, asked, size))
        if self.next_frame <= self.now:
            self.waits.append(max(0.0, self.free - self.now))
            self.free = max(self.free, self.now) + self.frame / self.rate
            self.next_frame += self.gap

    def measure(self, begin: float, until: float) -> tuple[float, float]:
        """Our share of the rate, and the mean delay of the other sender's frames."""
        self.run(begin)
        self.bytes, self.waits = 0, []
        self.run(until)
        wait = sum(self.waits) / len(self.waits) if self.waits else 0.0
        return self.bytes / ((until - begin) * self.rate), wait


@pytest.mark.parametrize(("mbps", "rtt"), [(20, 0.03), (100, 0.03), (100, 0.002), (1000, 0.0005)])
def test_idle_line_is_used(mbps: float, rtt: float) -> None:
    share, _ = Line(mbps, rtt, TransferRateLimiter()).measure(10.0, 40.0)
    assert share > 0.5


@pytest.mark.parametrize(("mbps", "rtt"), [(20, 0.03), (100, 0.03)])
def test_other_sender_hardly_waits(mbps: float, rtt: float) -> None:
    _, alone = Line(mbps, rtt, _NeverProbing(), other=0.1).measure(10.0, 40.0)
    share, wait = Line(mbps, rtt, TransferRateLimiter(), other=0.1).measure(10.0, 40.0)
    assert wait - alone < TARGET_DELAY + SLICE * 8e-6 / mbps
    assert share > 0.3


class _NeverProbing(TransferRateLimiter):
    def wait_time(self, now: float) -> float | None:
        return None


def test_transfer_yields_to_a_filling_line() -> None:
    pacer = TransferRateLimiter()
    line = Line(20, 0.03, pacer)
    line.run(10.0)
    assert pacer.window > 2
    line.next_frame, line.gap = line.now, line.frame / (1.1 * line.rate)
    line.run(12.0)
    assert pacer.window < 2
    assert pacer.in_flight <= 1


def test_minimum_rate_ignores_delay() -> None:
    pacer = TransferRateLimiter(floor=200_000.0)
    line = Line(20, 1.0, pacer)  # a link that was faster before
    pacer._base_delays.append(0.03)
    pacer._probe = None
    line.run(5.0)
    line.bytes = 0
    line.run(15.0)
    assert line.bytes / 10 == pytest.approx(200_000, rel=0.2)


def test_longer_path_updates_the_base_delay() -> None:
    pacer = TransferRateLimiter()
    Line(100, 0.01, pacer).run(5.0)
    line = Line(100, 0.05, pacer)
    line.now = line.free = 5.0
    pacer.in_flight = 0
    line.run(5.0 + 6 * PROBE_EVERY)
    assert pacer.window > 4


def test_invariants_are_checked() -> None:
    pacer = TransferRateLimiter()
    pacer.in_flight = -1
    with pytest.raises(InvariantError):
        pacer.validate()
    pacer.in_flight, pacer.window = 0, 0.0
    with pytest.raises(InvariantError):
        pacer.validate()


@given(
    st.lists(
        st.tuples(st.floats(0.0, 2.0), st.sampled_from(["ask", "come", "fail"])), max_size=300
    ),
    st.sampled_from([0.0, 1e5]),
)
def test_requests_never_exceed_the_window(steps: list[tuple[float, str]], floor: float) -> None:
    pacer, now = TransferRateLimiter(floor), 0.0
    under_way: list[float] = []
    for seconds, step in steps:
        now += seconds
        if step == "ask" and pacer.wait_time(now) == 0:
            pacer.on_request(now)
            under_way.append(now)
            assert pacer.in_flight <= MAX_WINDOW
            if not floor:
                assert pacer.in_flight <= pacer.window
        elif under_way and step == "come":
            pacer.on_slice(pacer.slice_bytes, now - under_way.pop(0), now)
        elif under_way and step == "fail":
            under_way.pop(0)
            pacer.on_failure()
        pacer.validate()
        assert pacer.in_flight == len(under_way)
        assert pacer.in_flight or pacer.wait_time(now + 10.0) == 0  # it never stalls
