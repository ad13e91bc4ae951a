"""The emulated WAN: shaping without I/O; namespaces and the relay as root."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.wan import Node, Rig, RigError, Shaper, VethPair, unavailable
from tools.wan.check import run_probe
from tools.wan.line import Line, Network
from tools.wan.namespaces import FULL_WINDOW, NONE, list_namespaces, remove_stale

ROOT = Path(__file__).resolve().parents[2]
MBIT = 125_000  # bytes/s

needs_root = pytest.mark.skipif(
    unavailable() is not None, reason=f"no namespaces here: {unavailable()}"
)


def packet(to: int, size: int = 1000, number: int = 0) -> bytes:
    header = bytes([0x45, *bytes(15), 10, 77, 0, to, number])
    return header.ljust(size, b"\0")


def drain(network: Network, now: float) -> list[tuple[int, float, int]]:
    """Node, time and number of each due packet."""
    return [(to, round(at, 6), data[20]) for to, at, data in network.due(now)]


# --- shaping, without I/O ------------------------------------------------------------------------


def test_line_sends_at_rate_and_drops_overflow() -> None:
    line = Line(8.0, limit=2500)  # 1 MB/s: 1 ms per packet
    assert [line.put(bytes(1000), 5.0) for _ in range(4)] == [True, True, False, False]
    assert [round(at, 6) for at, _ in line.waiting] == [5.001, 5.002]
    assert line.put(bytes(1000), 5.001)
    assert line.dropped == 2
    assert line.waiting[-1][0] == pytest.approx(5.003)


def test_unlimited_line_only_delays() -> None:
    line = Line(0.0, limit=1, delay=0.5)
    assert line.put(bytes(1000), 5.0)
    assert line.next_at == 5.5
    line.set_rate(8.0, 5.0)
    assert line.next_at == 5.5


def test_new_rate_applies_to_queued_packets() -> None:
    line = Line(8.0, limit=10_000)
    for _ in range(3):
        line.put(bytes(1000), 5.0)
    line.set_rate(4.0, 5.0015)  # half of the second packet has left
    assert [round(at, 6) for at, _ in line.waiting] == [5.001, 5.0025, 5.0045]
    line.put(bytes(1000), 5.002)
    assert line.waiting[-1][0] == pytest.approx(5.0065)


def network(**values: float) -> Network:
    settings: dict[str, Any] = {"up_mbps": 8.0, "down_mbps": 4.0, "delay_ms": 10.0, **values}
    node = Node("n", **settings)
    return Network([node, node], {1: 0, 2: 1}, seed=7)


def test_packet_passes_uplink_delay_and_downlink() -> None:
    net = network()
    net.put(0, packet(2, number=1), 5.0)
    net.put(0, packet(2, number=2), 5.0)
    assert net.next_at == pytest.approx(5.011)
    assert drain(net, 5.0129) == []
    assert net.next_at == pytest.approx(5.013)
    # A packet that is sent late still counts from its due time.
    assert drain(net, 6.0) == [(1, 5.013, 1), (1, 5.015, 2)]
    assert net.next_at == float("inf")


def test_cut_loses_both_directions_until_mended() -> None:
    net = network()
    net.change(1, "cut", 1, 5.0)
    net.put(0, packet(2), 5.0)
    net.put(1, packet(1), 5.0)
    assert drain(net, 6.0) == []
    net.change(1, "cut", 0, 6.0)
    net.put(0, packet(2, number=9), 6.0)
    assert drain(net, 7.0) == [(1, 6.013, 9)]
    assert net.stats[1]["lost"] == 2


def test_losses_are_seeded() -> None:
    def arrived() -> list[int]:
        net = network(loss=0.5, queue_bytes=10**6)
        for number in range(50):
            net.put(0, packet(2, number=number), 5.0)
        return [number for _, _, number in drain(net, 9.0)]

    first = arrived()
    assert first == arrived()
    assert 10 < len(first) < 40


def test_strays_are_counted_and_dropped() -> None:
    net = network()
    for data in (b"", b"\x60" + bytes(40), packet(9)):
        net.put(0, data, 5.0)
    assert drain(net, 6.0) == []
    assert net.strays == 3


@pytest.mark.parametrize(
    ("name", "value"), [("loss", 1.5), ("up_mbps", -1), ("delay_ms", float("nan")), ("cpu", 1)]
)
def test_invalid_values_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        network().change(0, name, value, 0.0)


def test_missing_namespaces_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RigError, match=r"needs Linux.*--proxy"), Rig([Node("a")]):
        pass


# --- the byte-level proxy ------------------------------------------------------------------------


def test_proxy_forwards_every_byte_in_order() -> None:
    data = bytes(range(256)) * 400
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                while part := connection.recv(4096):
                    connection.sendall(part)

        echo = threading.Thread(target=answer)
        echo.start()
        with Shaper(*server.getsockname(), mbps=40, delay_ms=5) as shaper:
            shaper.cut()
            with socket.create_connection(("127.0.0.1", shaper.port)) as own:
                shaper.mend()
                own.sendall(data)
                own.shutdown(socket.SHUT_WR)
                received = b"".join(iter(lambda: own.recv(65536), b""))
            echo.join()
    assert received == data


# --- namespaces and the relay --------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("idle", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_round_trips_and_rates_match_and_change_live(idle: bool) -> None:
    """Nothing is faster than set; a PC that isn't ``idle`` may be slower."""
    node = Node("node", 20, 20, delay_ms=10)
    with Rig([node] * 3, congestion="cubic") as rig:
        near = run_probe(rig, "ping", 0.6, source=2, to=0)["min"]
        reached = run_probe(rig, "flood", 1.6)["mbps"]
        rig.change(1, delay_ms=40)
        far = run_probe(rig, "ping", 0.6)["min"]
        stats = rig.stats()
    assert near >= 20
    assert 0 < reached < 20
    assert far >= 50
    if idle:
        assert near < 40
        assert reached > 0.8 * 20
        assert far < 80
    assert stats["nodes"][1]["received"] > 0
    assert list_namespaces(os.getpid()) == []


@needs_root
def test_cut_stops_packets_until_mended() -> None:
    with Rig([Node("a"), Node("b")], congestion="bbr") as rig:
        assert run_probe(rig, "ping", 0.1)["n"] > 0
        rig.cut(1)
        assert run_probe(rig, "ping", 0.1) == {"n": 0, "lost": 1}
        rig.mend(1)
        assert run_probe(rig, "ping", 0.1)["n"] > 0


@needs_root
@pytest.mark.parametrize("congestion", [NONE, "cubic"])
def test_ideal_medium_keeps_full_window(congestion: str) -> None:
    with Rig([Node("a"), Node("b")], congestion=congestion) as rig:

        def said(*words: str) -> str:
            process = rig.run(0, words, stdout=subprocess.PIPE, text=True)
            output: str = process.communicate()[0]
            return output

        is_ideal = congestion == NONE
        after_idle = said("cat", "/proc/sys/net/ipv4/tcp_slow_start_after_idle").strip()
        assert after_idle == ("0" if is_ideal else "1")
        assert (f"initcwnd {FULL_WINDOW}" in said("ip", "route", "show")) == is_ideal
        assert run_probe(rig, "ping", 0.1)["n"] > 0


@needs_root
def test_two_rigs_are_isolated_and_cleaned_up() -> None:
    with Rig([Node("a")]) as one, VethPair(100.0) as two:
        names = list_namespaces(os.getpid())
        assert one.namespace(0) in names
        assert len(names) == 3
        assert two.run(0, ["true"]).wait() == 0
        with pytest.raises(RigError, match="nonsense"):
            Rig([Node("a")], congestion="nonsense").__enter__()
        assert list_namespaces(os.getpid()) == names
    assert list_namespaces(os.getpid()) == []


@needs_root
def test_cpu_share_limits_all_processes_of_node() -> None:
    spin = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\n"
    spin += "print(time.process_time())"
    try:
        with Rig([Node("a"), Node("b")], cores=0.25) as rig:
            both = [
                rig.run(0, [sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True)
                for _ in range(2)
            ]
            used = sum(float(one.communicate()[0]) for one in both)
    except RigError as error:
        if "no shares of the CPU" in str(error):
            pytest.skip(str(error))
        raise
    assert used < 0.5
    assert not left_over_groups()


def left_over_groups() -> list[str]:
    mine = f"*{os.getpid()}-*"
    return [path.name for place in ("", "cpu") for path in Path("/sys/fs/cgroup", place).glob(mine)]


@needs_root
def test_leftovers_of_killed_process_are_removed() -> None:
    program = (
        "from tools.wan import Node, Rig; import sys, time\n"
        "with Rig([Node('a'), Node('b')]) as rig:\n"
        "    rig.run(0, ['sleep', '600'])\n"
        "    print('up', flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    assert len(list_namespaces(owner.pid)) == 2
    # Before that, the node's program doesn't run yet.
    while "sleep" not in [p.name() for p in psutil.Process(owner.pid).children(recursive=True)]:
        time.sleep(0.01)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    remove_stale()
    owner.communicate()
    assert list_namespaces(owner.pid) == []


@needs_root
def test_command_runs_program_on_every_node(tmp_path: Path) -> None:
    show = "import os, pathlib; pathlib.Path(os.environ['WAN_NODE']).write_text(os.environ[{!r}])"
    program = [sys.executable, "-c", show.format("WAN_ADDRESS")]
    command = [sys.executable, "-m", "tools.wan", "--nodes", "2", "--", *program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert {each.name: each.read_text(encoding="utf-8") for each in tmp_path.iterdir()} == {
        "0": "10.77.0.1",
        "1": "10.77.0.2",
    }
