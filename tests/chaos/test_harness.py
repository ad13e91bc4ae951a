"""Parts of the chaos tool: faults, network and observers, each alone."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tools.chaos import checks
from tools.chaos.faults import KINDS, plan_faults
from tools.chaos.hang import CannotHang, hang_thread
from tools.chaos.network import Network
from tools.chaos.pc import ListenAddress, Pc
from tools.chaos.streams import Slot
from tools.chaos.usage import Usage

WAIT_S = 60.0


def pc(root: Path, number: int = 1) -> Pc:
    rng = random.Random(number)
    place = ListenAddress.free(f"127.0.0.{number}", f"127.0.1.{number}", rng)
    return Pc(f"pc{number}", root / f"pc{number}", place, [])


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def python(pc: Pc, code: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of a PC."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=pc.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_seed_gives_a_plan_with_every_kind() -> None:
    one = plan_faults(list(KINDS), random.Random(7), 1.0, 30.0)
    same = plan_faults(list(KINDS), random.Random(7), 1.0, 30.0)
    faults = [next(one) for _ in range(2 * len(KINDS))]
    assert faults == [next(same) for _ in faults]
    for half in (faults[: len(KINDS)], faults[len(KINDS) :]):
        assert {fault.kind for fault in half} == KINDS.keys()
    lasting = [f.seconds for f in faults if KINDS[f.kind].over == "time"]
    assert all(1 <= seconds <= 30 for seconds in lasting)


def test_a_pause_is_the_longest_silence_that_touches_a_fault(tmp_path: Path) -> None:
    slot = Slot(0, pc(tmp_path), series=[[0.0, 1.0, 9.0], [9.1, 9.2, 12.0, 12.5]])
    assert slot.pause(9.15, 13.0) == pytest.approx(2.8)
    assert slot.pause(2.0, 3.0) == 8.0
    assert slot.pause(20.0, 21.0) == 0.0


def test_processes_are_known_by_their_home(tmp_path: Path) -> None:
    here, there = pc(tmp_path, 1), pc(tmp_path, 2)
    with python(here, "print(flush=True); input()") as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        assert [found.pid for found in here.processes()] == [process.pid]
        assert there.processes() == []
        assert here.role(psutil.Process(process.pid)) == "other"


def test_a_clock_that_is_set(tmp_path: Path) -> None:
    wrong = pc(tmp_path)
    code = "import time\nwhile input() == '': print(time.time(), time.monotonic(), flush=True)"
    with python(wrong, code) as process:

        def clocks() -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            return [float(text) for text in process.stdout.readline().split()]

        before = clocks()
        wrong.set_clock(-7200.0)
        after = clocks()
        assert after[0] < before[0] - 7000
        assert after[1] >= before[1]
        wrong.set_clock(0)
        assert clocks()[0] >= before[0]


def test_one_thread_hangs_while_another_goes_on() -> None:
    code = (
        "import threading, time\n"
        "def beat(name):\n"
        "    while True:\n"
        "        print(name, flush=True)\n"
        "        time.sleep(0.02)\n"
        "threading.Thread(target=beat, args=('other',), daemon=True).start()\n"
        "beat('main')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    seen: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line.decode().strip())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        until(lambda: {"main", "other"} <= set(seen))
        with hang_thread(process.pid):
            # Output written before the freeze comes first.
            until(lambda: seen[-10:] == ["other"] * 10)
            seen.clear()
            until(lambda: seen.count("other") > 10)
            assert "main" not in seen
        until(lambda: "main" in seen)
    except CannotHang as reason:
        pytest.skip(str(reason))
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


#: Sends its input to an address, and prints the replies.
CLIENT = """
import socket, sys
s = socket.create_connection((HOST, PORT))
while word := sys.stdin.buffer.readline():
    try:
        s.sendall(word)
        back = s.recv(100)
    except OSError:
        back = b""
    sys.stdout.buffer.write(back or b"broken\\n")
    sys.stdout.buffer.flush()
"""
#: Echoes its input.
SERVER = """
import socket, threading
s = socket.create_server((HOST, PORT))
print("listens", flush=True)
def echo(c):
    try:
        while data := c.recv(100):
            c.sendall(data)
    except OSError:
        pass
while True:
    threading.Thread(target=echo, args=(s.accept()[0],), daemon=True).start()
"""


def echo(client: "subprocess.Popen[bytes]") -> bytes:
    """Have it say hello; what it heard."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(b"hello\n")
    client.stdin.flush()
    return client.stdout.readline()


def test_a_network_that_is_cut_slowed_and_reset(tmp_path: Path) -> None:
    pcs = [pc(tmp_path, number) for number in (1, 2, 3)]
    target = pcs[1].place
    with ExitStack() as stack:
        network = stack.enter_context(Network(pcs))

        def start(owner: Pc, code: str, host: str) -> "subprocess.Popen[bytes]":
            known = f"HOST, PORT = {host!r}, {target.control}\n"
            return stack.enter_context(python(owner, known + code))

        server = start(pcs[1], SERVER, target.host)
        assert server.stdout is not None
        server.stdout.readline()
        clients = [start(owner, CLIENT, target.advertised) for owner in pcs]
        assert [echo(client) for client in clients] == [b"hello\n"] * 3
        until(lambda: network.settled)
        with ThreadPoolExecutor(1) as pool:
            network.cut("pc1")
            waiting = pool.submit(echo, clients[0])
            # One PC is cut off; the others stay connected, and a PC can always reach itself.
            assert [echo(client) for client in clients[1:]] == [b"hello\n"] * 2
            assert not waiting.done()
            network.mend("pc1")
            assert waiting.result(WAIT_S) == b"hello\n"
        network.slow("pc2", 0.2, 1e6)
        begun = time.monotonic()
        assert echo(clients[2]) == b"hello\n"
        assert time.monotonic() - begun >= 0.4
        network.mend("pc2")
        network.reset("pc2")
        assert [echo(c) for c in clients] == [b"broken\n", b"hello\n", b"broken\n"]


@pytest.mark.parametrize(
    "line",
    [
        "Assertion failed: !_io_error (src/stream_engine_base.cpp:320)",
        "WARNING molinkd.peer.agent.worker_supervisor: stage 1 (pid 12) exited with -11",
        "stage 1 on pc2: the worker was terminated by signal 6: in the ring",
        "the worker exited with code 0xC0000409",
    ],
)
def test_what_an_abort_leaves_is_found(tmp_path: Path, line: str) -> None:
    one = pc(tmp_path)
    logs = one.home / "logs"
    logs.mkdir()
    (one.home / "terminal.log").write_text("all is well\n", encoding="utf-8")
    log = logs / "worker-p1-0.log"
    log.write_text("worker 12 exited with -9\nit was terminated by signal 9\n", encoding="utf-8")
    assert list(checks.find_aborts(one)) == []
    log.write_text(f"{line}\n", encoding="utf-8")
    one.strange_exits.append(-6)
    assert list(checks.find_aborts(one)) == [
        "pc1: its daemon was terminated by signal 6",
        f"pc1: worker-p1-0.log: {line}",
    ]


def test_what_has_grown_is_told() -> None:
    before = {
        "pc1 daemon": Usage(1, 50),
        "pc1 worker": Usage(1, 30),
        "pc2 worker": Usage(1, 30),
    }
    after = {
        "pc1 daemon": Usage(1, 63),
        "pc1 worker": Usage(1, 42),
        "pc2 worker": Usage(1, 60, 2),
        "pc2 other": Usage(1, 9),
        "pc3 worker": Usage(1, 99),
    }
    assert checks.find_growth(before, after, 12) == [
        "pc1 daemon: 50 descriptors before, 63 after",
        "pc2 worker: 1 processes before, 2 after",
        "pc2 other: 0 processes before, 1 after",
    ]
