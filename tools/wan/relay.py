"""The relay process of the rig: reads every node's TUN device, shapes, and writes to the others.

:class:`tools.wan.rig.Rig` starts it with the devices and a control socket as inherited files. It
exits when the control socket closes.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import socket
import sys
import time
from math import inf
from typing import Any

from tools.wan.line import Network
from tools.wan.node import Node

#: Packets read from one device before turning to the others.
_BURST = 8
_PR_SET_TIMERSLACK = 29


class Relay:
    """I/O around a :class:`Network`."""

    def __init__(
        self, network: Network, devices: list[int], control: socket.socket, mtu: int
    ) -> None:
        self._network = network
        self._devices = devices
        self._control = control
        self._size = mtu + 64
        #: Packets by lateness: up to 2^i * 50 us.
        self._late = [0] * 16
        self._refused = 0

    def run(self) -> None:
        """Relay until the control socket closes."""
        network, clock, wait = self._network, time.monotonic, select.select
        sources = {device: index for index, device in enumerate(self._devices)}
        control = self._control.fileno()
        files = [*self._devices, control]
        while True:
            self._write_due(clock())
            soonest = network.next_at
            pause = None if soonest == inf else max(0.0, soonest - clock())
            for ready in wait(files, (), (), pause)[0]:
                if ready == control:
                    if not self._handle_command():
                        return
                else:
                    self._read_packets(ready, sources[ready])

    def _read_packets(self, device: int, index: int) -> None:
        put, now = self._network.put, time.monotonic()
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BURST):
                put(index, os.read(device, self._size), now)

    def _write_due(self, now: float) -> None:
        write, devices, late = os.write, self._devices, self._late
        for index, at, packet in self._network.due(now):
            try:
                write(devices[index], packet)
            except OSError:
                self._refused += 1
            late[min(15, int((now - at) * 20_000).bit_length())] += 1

    def _handle_command(self) -> bool:
        data = self._control.recv(65536)
        if not data:
            return False
        answer: dict[str, Any] = {}
        try:
            command = json.loads(data)
            for name, value in command.get("change", {}).items():
                self._network.change(command["node"], name, value, time.monotonic())
            if "stats" in command:
                answer = self._report_stats()
        except (ValueError, KeyError, IndexError) as error:
            answer = {"error": str(error)}
        self._control.send(json.dumps(answer).encode())
        return True

    def _report_stats(self) -> dict[str, Any]:
        total = sum(self._late)
        below, late = 0, {}
        for exponent, count in enumerate(self._late):
            below += count
            if count:
                late[f"{50 << exponent}us"] = round(below / total, 6)
        return {
            "nodes": self._network.stats,
            "strays": self._network.strays,
            "refused": self._refused,
            # Cumulative shares of packets by lateness.
            "late": late,
            "cpu_s": round(time.process_time(), 3),
        }


def _raise_priority() -> None:
    """Get real-time scheduling and exact timers if allowed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-10)


def main() -> None:
    """``relay.py CONFIG``: JSON with the nodes and the inherited files."""
    config = json.loads(sys.argv[1])
    nodes = [Node(**node) for node in config["nodes"]]
    of = {int(byte): index for byte, index in config["of"].items()}
    for device in config["devices"]:
        os.set_blocking(device, False)
    control = socket.socket(fileno=config["control"])
    _raise_priority()
    gc.disable()
    Relay(Network(nodes, of, config["seed"]), config["devices"], control, config["mtu"]).run()


if __name__ == "__main__":
    main()
