"""Accuracy of the rig: round trips and TCP goodput compared with the configured values."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.wan.namespaces import has_netem
from tools.wan.node import Node
from tools.wan.rig import Rig

_ROOT = Path(__file__).resolve().parents[2]
#: Share of headers in a full TCP packet.
_OVERHEAD = 52 / 1500


def run_probe(rig: Rig, what: str, seconds: float, source: int = 0, to: int = 1) -> dict[str, Any]:
    """Run ``ping`` or ``flood`` between two nodes and return its figures."""
    server = _start(rig, to, {"ping": "echo", "flood": "sink"}[what], rig.address(to), 0)
    assert server.stdout is not None
    server.stdout.readline()
    client = _start(rig, source, what, rig.address(to), seconds)
    answer: dict[str, Any] = json.loads(client.communicate()[0])
    server.kill()
    server.communicate()
    return answer


def _start(rig: Rig, node: int, what: str, address: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tools.wan.probe", what, address, str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    return rig.run(node, command, stdout=subprocess.PIPE, text=True, env=environment)


def measure_accuracy(node: Node, congestion: str, seconds: float, nodes: int = 2) -> dict[str, Any]:
    """Measure a rig of identical nodes."""
    with Rig([node] * nodes, congestion=congestion) as rig:
        ping = run_probe(rig, "ping", min(2.0, seconds))
        flood = run_probe(rig, "flood", seconds)
        stats = rig.stats()
    return {
        "congestion": congestion,
        "mbps": node.up_mbps,
        "rtt_ms": 2 * node.delay_ms,
        "measured_rtt_ms": ping,
        "goodput_mbps": flood["mbps"],
        "goodput_bound_mbps": round(node.up_mbps * (1 - _OVERHEAD), 2),
        "dropped": stats["nodes"][0]["dropped_up"],
        "late": stats["late"],
        "relay_cpu_s": stats["cpu_s"],
    }


def measure_rates(seconds: float, rates: tuple[float, ...] = (20, 100, 400)) -> dict[str, Any]:
    """Measure several rates at a 30 ms round trip, under CUBIC and BBR."""
    return {
        "relay": "tun",
        "kernel_has_netem": has_netem(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "seconds": seconds,
        "results": [
            measure_accuracy(
                Node("node", rate, rate, delay_ms=15, queue_bytes=_queue_size(rate)), name, seconds
            )
            for rate in rates
            for name in ("cubic", "bbr")
        ],
    }


def _queue_size(mbps: float) -> int:
    """Bytes in 30 ms, at least the rig's default."""
    return max(256 * 1024, int(mbps * 1e6 / 8 * 0.03))
