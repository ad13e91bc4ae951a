"""Probes that the check runs on nodes.

    python -m tools.wan.probe echo|ping|sink|flood ADDRESS SECONDS

``echo`` and ``sink`` answer until they are killed; ``ping`` and ``flood`` print JSON.
"""

import json
import socket
import statistics
import sys
import time
from typing import Any

_PORT = 7007
_SKIPPED = 1.0  # uncounted seconds at the start of a flood


def _run_echo(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind((address, _PORT))
        print("ready", flush=True)
        while True:
            data, sender = own.recvfrom(2048)
            own.sendto(data, sender)


def _run_ping(address: str, seconds: float) -> dict[str, Any]:
    taken: list[float] = []
    lost = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.connect((address, _PORT))
        own.settimeout(0.5)
        stop = time.perf_counter() + seconds
        while (start := time.perf_counter()) < stop:
            own.send(b"%d" % len(taken))
            try:
                own.recv(2048)
                taken.append((time.perf_counter() - start) * 1000)
            except TimeoutError:
                lost += 1
            time.sleep(0.002)
    if not taken:
        return {"n": 0, "lost": lost}
    cut = statistics.quantiles(taken, n=100) if len(taken) > 1 else taken * 99
    return {
        "n": len(taken),
        "lost": lost,
        "min": round(min(taken), 3),
        "p50": round(cut[49], 3),
        "p99": round(cut[98], 3),
    }


def _run_sink(address: str) -> None:
    """Receive connections in turn and answer each with its rate in Mbit/s."""
    with socket.create_server((address, _PORT)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(json.dumps(_measure_rate(connection)).encode())


def _measure_rate(connection: socket.socket) -> dict[str, float]:
    start = last = time.perf_counter()
    total = counted = 0
    while data := connection.recv(1 << 18):
        last = time.perf_counter()
        total += len(data)
        if last - start >= _SKIPPED:
            counted += len(data)
    steady = max(1e-9, last - start - _SKIPPED)
    return {"mbps": round(counted * 8 / steady / 1e6, 2), "bytes": total}


def _run_flood(address: str, seconds: float) -> dict[str, Any]:
    data = bytes(1 << 16)
    with socket.create_connection((address, _PORT)) as own:
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            own.sendall(data)
        own.shutdown(socket.SHUT_WR)
        answer: dict[str, Any] = json.loads(own.recv(4096))
    return answer


def main() -> None:
    """Entry point."""
    what, address, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    match what:
        case "echo":
            _run_echo(address)
        case "sink":
            _run_sink(address)
        case "ping":
            print(json.dumps(_run_ping(address, seconds)))
        case "flood":
            print(json.dumps(_run_flood(address, seconds)))


if __name__ == "__main__":
    main()
