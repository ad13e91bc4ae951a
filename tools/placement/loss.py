"""Measure how lost packets delay rows on a TCP connection, compared with placement's estimate.

Usage: ``python -m tools.placement.loss``; needs Linux and root (:mod:`tools.wan`). Each line sends
a row every 100 ms on each of 20 connections between two nodes of the rig under CUBIC.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from molink.facts.tcp_loss import expected_loss_s
from tools.wan.node import Node
from tools.wan.rig import Rig

_ROOT = Path(__file__).resolve().parents[2]
_PORT, _CONNECTIONS, _SECONDS, _INTERVAL_S = 7008, 20, 20.0, 0.1
_SIZE, _STAMP = struct.Struct("<I"), struct.Struct("<d")
#: Bytes of a row, one-way delays in ms, and shares of lost packets.
CASES = (
    (8192, 15.0, 0.005),
    (8192, 15.0, 0.01),
    (8192, 15.0, 0.02),
    (8192, 50.0, 0.01),
    (64, 50.0, 0.01),
)


def _receive_rows(address: str) -> None:
    """Print the seconds that each row took; both ends read one clock."""
    taken: list[float] = []

    def read_rows(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            (nbytes,) = _SIZE.unpack(stream.read(_SIZE.size))
            while len(row := stream.read(nbytes)) == nbytes:
                taken.append(time.perf_counter() - _STAMP.unpack_from(row)[0])

    with socket.create_server((address, _PORT), backlog=_CONNECTIONS) as server:
        print("ready", flush=True)
        _run_threads([lambda: read_rows(server.accept()[0])] * _CONNECTIONS)
    print(json.dumps(taken))


def _send_rows(address: str, nbytes: int) -> None:
    def send_rows() -> None:
        with socket.create_connection((address, _PORT)) as own:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own.sendall(_SIZE.pack(nbytes))
            stop = time.perf_counter() + _SECONDS
            while (now := time.perf_counter()) < stop:
                own.sendall(_STAMP.pack(now) + bytes(nbytes - _STAMP.size))
                time.sleep(_INTERVAL_S)

    _run_threads([send_rows] * _CONNECTIONS)


def _run_threads(tasks: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_rows(nbytes: int, delay_ms: float, loss: float) -> list[float]:
    """Seconds of each row, in ascending order."""
    nodes = [Node(name, 100, 100, delay_ms=delay_ms) for name in ("sender", "receiver")]
    nodes[0] = Node("sender", 100, 100, delay_ms=delay_ms, loss=loss)
    command = [sys.executable, "-m", "tools.placement.loss"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with Rig(nodes) as rig:
        address = rig.address(1)
        receiver = rig.run(
            1,
            [*command, "receive", address],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert receiver.stdout is not None
        receiver.stdout.readline()
        rig.run(0, [*command, "send", address, str(nbytes)], env=environment).wait()
        return sorted(json.loads(receiver.communicate()[0]))


def main() -> None:
    """Print a Markdown table, or be one end of a measurement."""
    match sys.argv[1:]:
        case ["receive", address]:
            _receive_rows(address)
        case ["send", address, nbytes]:
            _send_rows(address, int(nbytes))
        case _:
            _print_table()


def _print_table() -> None:
    print("| bytes | round trip, ms | loss | mean delay, ms | expected, ms | p99, ms |")
    print("|--:|--:|--:|--:|--:|--:|")
    for nbytes, delay_ms, loss in CASES:
        base, taken = (measure_rows(nbytes, delay_ms, share) for share in (0.0, loss))
        delay = 1000 * (fmean(taken) - fmean(base))
        expected = 1000 * expected_loss_s(nbytes, 2 * delay_ms / 1000, loss)
        worst = 1000 * taken[int(0.99 * len(taken))]
        print(
            f"| {nbytes} | {2 * delay_ms:.0f} | {100 * loss:.1f} % | {delay:.1f} "
            f"| {expected:.1f} | {worst:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
