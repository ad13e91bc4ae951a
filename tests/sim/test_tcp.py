"""TCP connections: windows of CUBIC and BBR, losses, and delivery in order."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import UsageError
from molink.sim.congestion.base import INITIAL_WINDOW, SEGMENT_BYTES
from molink.sim.congestion.bbr import HIGH_GAIN, MIN_WINDOW, BbrMode, BbrTcp
from molink.sim.congestion.create import create_controller
from molink.sim.congestion.cubic import CubicTcp
from molink.sim.event_queue import EventQueue
from molink.sim.forecast import plan_ring
from molink.sim.pc import Uplink
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import simulate_scenario
from molink.sim.tcp import TcpConnection
from molink.sim.workload import Workload
from molink.wire.messages.data_plane import Channel

LATENCY = 0.03
ROUND_TRIP = 2 * LATENCY
#: 100 Mbps, and the emulated network's queue.
RATE = 12.5e6
ROOM = 256 * 1024
PROMPT = 14_000_000
CONTROLLED = pytest.mark.parametrize("name", ["cubic", "bbr"])


class Line:
    """A connection over its own uplink, with the arrival of each message."""

    def __init__(
        self,
        name: str,
        rate: float = RATE,
        room: int = ROOM,
        latency: float = LATENCY,
        channel: Channel | None = None,
        replies_wait_until: float = 0.0,
    ) -> None:
        # Only bulk channels are paced under CUBIC.
        channel = (
            channel if channel is not None else Channel.DECODE if name == "cubic" else Channel.BULK
        )
        self.event_queue = EventQueue()
        self.uplink = Uplink(rate, room)
        self.controller = create_controller(name, 2 * latency, channel)
        self.arrivals: list[tuple[int, float]] = []
        self.tcp = TcpConnection(
            self.event_queue,
            self.uplink,
            latency,
            self.controller,
            lambda: latency + max(0.0, replies_wait_until - self.event_queue.now),
            lambda: None,
        )
        self._count = 0

    def write(self, nbytes: int) -> None:
        number, self._count = self._count, self._count + 1
        self.tcp.write_message(
            nbytes, lambda begin, end, arrival: self.arrivals.append((number, arrival))
        )

    def take(self, nbytes: int, at: float) -> float:
        """Seconds that a message takes alone."""
        self.event_queue.schedule_at(at, self.write, nbytes)
        self.event_queue.run(at + 60.0)
        return self.arrivals[-1][1] - at


def cubic_of(line: Line) -> CubicTcp:
    assert isinstance(line.controller, CubicTcp)
    return line.controller


def bbr_of(line: Line) -> BbrTcp:
    assert isinstance(line.controller, BbrTcp)
    return line.controller


@CONTROLLED
@pytest.mark.parametrize("latency", [0.005, 0.015, 0.03])
def test_simultaneous_acknowledgements_keep_their_order(name: str, latency: float) -> None:
    # Rounding puts some of them slightly before earlier ones.
    line = Line(name, room=1 << 30, latency=latency, replies_wait_until=0.3)
    for _ in range(40):
        line.write(20_000)
    line.event_queue.run(60.0)
    assert len(line.arrivals) == 40
    assert line.tcp.in_flight == 0
    assert line.tcp.delivered == 40 * 20_000


# --- CUBIC ---------------------------------------------------------------------------------------


def test_slow_start_doubles_per_round_trip_and_restarts_after_a_pause() -> None:
    line = Line("cubic", rate=1e9, room=1 << 30)
    # 10, 20, 40 … segments: the 10 230 of ten round trips hold the 9669 of the prompt.
    rounds = 9 * ROUND_TRIP + LATENCY
    assert line.take(PROMPT, 1.0) == pytest.approx(rounds, rel=0.1)
    assert line.take(PROMPT, 100.0) == pytest.approx(rounds, rel=0.1)
    assert line.take(INITIAL_WINDOW, 200.0) == pytest.approx(LATENCY, rel=0.1)


def test_a_pause_halves_the_window_for_every_timeout() -> None:
    line = Line("cubic", rate=1e9, room=1 << 30)
    line.take(PROMPT, 1.0)
    cubic = cubic_of(line)
    before, timeout = cubic.window, ROUND_TRIP + 0.2
    cubic.on_restart(50.0, 0.9 * timeout)
    assert cubic.window == before
    cubic.on_restart(50.0, 2.5 * timeout)
    assert cubic.window == before / 4
    assert cubic.threshold >= 0.75 * before
    cubic.on_restart(90.0, 40.0)
    assert cubic.window == INITIAL_WINDOW


def test_an_unused_window_does_not_grow() -> None:
    line = Line("cubic")
    for index in range(100):
        line.event_queue.schedule_at(0.1 * index, line.write, 5000)
    line.event_queue.run(20.0)
    assert cubic_of(line).window == INITIAL_WINDOW


def test_hystart_ends_slow_start_before_a_queue_as_long_as_the_pipe_overflows() -> None:
    pipe = int(RATE * ROUND_TRIP)
    line = Line("cubic", room=pipe)
    line.take(PROMPT, 0.0)
    assert line.uplink.dropped_bytes == 0
    assert pipe / 2 < cubic_of(line).threshold < 2 * pipe
    # In slow start half of a round trip's segments queue up; this queue holds a third of them.
    short = Line("cubic", room=pipe // 3)
    short.take(PROMPT, 0.0)
    assert short.uplink.dropped_bytes > 0


def test_a_loss_reduces_the_window_and_cubic_restores_it() -> None:
    line = Line("cubic")
    cubic = cubic_of(line)
    # A burst longer than the queue, as when a window survives a short pause.
    cubic.window = cubic.threshold = 2 * ROOM
    line.write(40 * PROMPT)
    assert line.uplink.dropped_bytes == pytest.approx(ROOM, rel=0.02)
    line.event_queue.run(4 * ROUND_TRIP)
    assert cubic.threshold == pytest.approx(0.7 * 2 * ROOM, rel=0.03)
    assert cubic.threshold < cubic.window < 1.05 * cubic.threshold
    # K of RFC 9438: seconds until the window is restored.
    back = (0.3 * 2 * ROOM / SEGMENT_BYTES / 0.4) ** (1 / 3)
    line.event_queue.run(back)
    assert cubic.window == pytest.approx(2 * ROOM, rel=0.05)


# --- BBR -----------------------------------------------------------------------------------------


def test_bbr_keeps_its_rate_over_a_pause() -> None:
    line = Line("bbr")
    first = line.take(2 * PROMPT, 0.0)
    bbr = bbr_of(line)
    assert bbr.mode is BbrMode.PROBE_BW
    assert bbr.rate == pytest.approx(RATE, rel=0.02)
    ideal = 2 * PROMPT / RATE + LATENCY
    assert ideal < first < ideal + 12 * ROUND_TRIP
    # Within ten seconds, before ProbeRTT.
    assert line.take(PROMPT, line.event_queue.now + 5.0) < 1.15 * (PROMPT / RATE + LATENCY)


def test_small_messages_are_paced_as_in_startup() -> None:
    line = Line("bbr")
    for index in range(5):
        line.event_queue.schedule_at(0.5 * index, line.write, INITIAL_WINDOW)
    line.event_queue.run(10.0)
    # One round trip carries all that is offered, so the pacing rate stays 2.89 times as much.
    assert bbr_of(line).mode is BbrMode.STARTUP
    rate = HIGH_GAIN * INITIAL_WINDOW / ROUND_TRIP
    assert bbr_of(line).pacing_rate == pytest.approx(rate)
    # The last two segments leave last, those after the first two half as late as the others.
    spread = (INITIAL_WINDOW - 3 * SEGMENT_BYTES) / rate
    assert line.arrivals[-1][1] - 2.0 == pytest.approx(LATENCY + spread, rel=0.02)


@pytest.mark.parametrize(
    ("name", "channel", "measured"),
    [
        ("cubic", Channel.DECODE, 0.0175),
        # Before decode channels avoided BBR.
        ("bbr", Channel.BULK, 0.025),
        # Switched away from BBR, but still paced.
        ("bbr", Channel.DECODE, 0.021),
    ],
)
def test_decode_latency_on_an_idle_hop_matches_the_rig(
    name: str, channel: Channel, measured: float
) -> None:
    link, latency, handling = LinkProfile(), 0.015, 0.0011
    line = Line(name, link.rate, link.queue, latency, channel)
    # docs/results/link.json, "idle_ms": occasional messages of 16 KB, and ten heartbeats per
    # second.
    for index in range(20):
        line.event_queue.schedule_at(0.3 * index, line.write, 16 * 1024)
        for heartbeat in range(3):
            line.event_queue.schedule_at(
                0.3 * index + 0.1 * heartbeat + 0.05, line.tcp.write_message, 64, lambda *_: None
            )
    line.event_queue.run(20.0)
    assert line.arrivals[-1][1] - 0.3 * 19 + handling == pytest.approx(measured, rel=0.06)


def test_probe_rtt_every_ten_seconds() -> None:
    line = Line("bbr")
    line.write(30 * PROMPT)
    dips: list[float] = []

    def look() -> None:
        bbr = bbr_of(line)
        if bbr.mode is BbrMode.PROBE_RTT:
            assert bbr.window <= MIN_WINDOW
            dips.append(line.event_queue.now)
        if line.event_queue.now < 30.0:
            line.event_queue.schedule_at(line.event_queue.now + 0.01, look)

    look()
    line.event_queue.run(30.0)
    begins = [at for before, at in zip([0.0, *dips], dips, strict=False) if at - before > 1.0]
    assert len(begins) == 2
    assert begins[1] - begins[0] == pytest.approx(10.0, abs=1.0)
    for begin in begins:
        length = max(at for at in dips if at < begin + 1.0) - begin
        assert 0.2 <= length <= 0.2 + 3 * ROUND_TRIP
    assert line.tcp.delivered > 0.9 * 30.0 * RATE


# --- losses --------------------------------------------------------------------------------------


@CONTROLLED
def test_a_dropped_message_is_retransmitted(name: str) -> None:
    line = Line(name)
    while line.uplink.enqueue_or_drop(SEGMENT_BYTES, 0.0) is not None:
        pass
    took = line.take(2 * SEGMENT_BYTES, 0.0)
    # A tail loss probe is sent after two round trips.
    assert took == pytest.approx(2 * ROUND_TRIP + LATENCY, rel=0.05)
    assert line.tcp.in_flight == 0


@CONTROLLED
def test_a_dropped_probe_causes_a_timeout(name: str) -> None:
    line = Line(name)
    line.controller.window = 4 * INITIAL_WINDOW
    line.uplink.enqueue_or_drop(int(0.2 * RATE), 0.0)
    took = line.take(20 * SEGMENT_BYTES, 0.0)
    assert 2 * ROUND_TRIP + 0.2 < took < 2.0
    assert line.tcp.delivered == 20 * SEGMENT_BYTES


@CONTROLLED
@settings(max_examples=30, deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.integers(1, 400_000), st.floats(0.0, 0.5)), min_size=1, max_size=15
    ),
    room=st.integers(2 * SEGMENT_BYTES, 300_000),
)
def test_messages_arrive_once_and_in_order(
    name: str, messages: list[tuple[int, float]], room: int
) -> None:
    line = Line(name, rate=1e6, room=room)
    for (nbytes, _), at in zip(messages, accumulate(gap for _, gap in messages), strict=True):
        line.event_queue.schedule_at(at, line.write, nbytes)
    line.event_queue.run(3600.0)
    total = sum(nbytes for nbytes, _ in messages)
    assert [number for number, _ in line.arrivals] == list(range(len(messages)))
    assert line.tcp.delivered == total
    assert (line.tcp.unsent, line.tcp.in_flight) == (0, 0)
    assert line.arrivals[-1][1] >= total / 1e6


# --- rings ---------------------------------------------------------------------------------------


def test_tcp_slows_prompts_on_a_quiet_ring() -> None:
    load = Workload(rate=1.0, duration=1.0)
    ideal, *real = (
        plan_ring(Scenario(load, link=LinkProfile(congestion=name)), 1, 512, 4)
        for name in ("none", "cubic", "bbr")
    )
    for each in real:
        assert each.ttft_s > ideal.ttft_s + ROUND_TRIP
        assert each.floor_s == ideal.floor_s


def test_handling_time_counts_once_per_hop() -> None:
    load = Workload(rate=1.0, duration=1.0)
    ideal, slow = (
        plan_ring(Scenario(load, link=LinkProfile(handling_ms=ms)), 1, 64, 20) for ms in (0.0, 5.0)
    )
    assert slow.tpot_s == pytest.approx(ideal.tpot_s + 3 * 0.005, rel=0.01)


@CONTROLLED
def test_tcp_simulations_are_deterministic(name: str) -> None:
    load = Workload(rate=1.0, duration=3.0, seed=3)
    scenario = Scenario(load, policy="concurrent", link=LinkProfile(congestion=name))
    first, again = simulate_scenario(scenario), simulate_scenario(scenario)
    assert first.as_json() == again.as_json()
    assert first.report.completed == len(load.plan_requests())


def test_an_unknown_congestion_control_is_rejected() -> None:
    with pytest.raises(UsageError, match="none, cubic, bbr, not vegas"):
        LinkProfile(congestion="vegas")
    with pytest.raises(UsageError, match="'vegas': choose one of none, cubic, bbr"):
        create_controller("vegas", 0.1)


def test_bulk_channels_under_cubic_are_paced() -> None:
    """The same transfer drops nothing where an unpaced slow start overflows a short queue."""
    paced, plain = (
        Line("cubic", room=64_000, channel=channel) for channel in (Channel.BULK, Channel.DECODE)
    )
    for line in (paced, plain):
        line.take(400_000, 0.0)
    assert paced.uplink.dropped_bytes < plain.uplink.dropped_bytes
