"""Measure a link on real sockets over the WAN rig and print JSON. Needs Linux and root.

    python -m tools.bench_link [--json] [--only hop,slow,loss,slow-loss,fill,flap] [--policy P[,P…]]
                               [--congestion cubic,bbr] [--prefills N] [--queue BYTES]

Each end of the link is a process in a namespace of its own (:mod:`tools.wan`); times are of the
one monotonic clock that both share. A decode volume has two rows of 4096 bf16 values (16 KB).

``hop``, ``slow``, ``loss``: decode volumes, one every 100 ms or so at random moments, on an idle
link and behind prefill volumes: from being handed to the link until they have arrived. Policies are
told of each next decode step with an error of up to 10 %. ``prefill_ratio`` is the time of the
prefill volumes beside that of as many alone, whole, under ``fifo``: with losses the first are
quicker than the others, since CUBIC takes seconds to make up for one.
``fill``: a veth pair of 1 Gbit/s without delay, its payload rate, and CPU seconds of both ends.
``flap``: the link is cut in the middle of a prefill volume and mended.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from molink.wire.sockets.key_pair import KeyPair
from tools.link_ends import DECODE_ROWS, ROW
from tools.wan import Node, Rig, RigError, VethPair, unavailable

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("concurrent", "fifo", "molink", "adaptive", "adaptive-unpredicted")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A hop, its prefill volumes, and what is asked of ``adaptive`` (ms beside idle; a ratio)."""

    name: str
    mbps: float
    prefill_rows: int
    loss: float
    median_ms: float
    p99_ms: float
    ratio: float

    def node(self, queue: int) -> Node:
        """Either end, with ``queue`` bytes in its router; the round trip is 30 ms."""
        return Node(self.name, self.mbps, self.mbps, 15.0, queue, self.loss)


SCENARIOS = (
    Scenario("hop", 100, 1750, 0.0, 12, 40, 1.2),
    Scenario("slow", 20, 430, 0.0, 20, 60, 1.3),
    Scenario("loss", 100, 1750, 0.0001, 12, 40, 1.2),
    Scenario("slow-loss", 20, 430, 0.0001, 20, 60, 1.3),
)


# --- the measuring process -----------------------------------------------------------------------


@contextmanager
def _ends(rig: Rig | VethPair, config: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Both ends, connected: the sender's and the receiver's processes."""
    keys, server_keys = KeyPair.generate(), KeyPair.generate()
    receiver = _start(
        rig,
        1,
        "receive",
        {
            **config,
            "client_public": keys.public,
            "server_secret": server_keys.secret,
            "address": rig.address(1),
        },
    )
    port = _hear(receiver)["port"]
    sender = _start(
        rig,
        0,
        "send",
        {
            **config,
            "client_secret": keys.secret,
            "server_public": server_keys.public,
            "server": f"tcp://{rig.address(1)}:{port}",
        },
    )
    yield sender, receiver
    for process in (sender, receiver):
        process.stdin.close()
        process.stdout.close()
        process.wait()


def _start(rig: Rig | VethPair, node: int, role: str, config: dict[str, Any]) -> Any:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = rig.run(
        node,
        [sys.executable, "-m", "tools.link_ends", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(config) + "\n")
    process.stdin.flush()
    return process


def _results(sender: Any, receiver: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both ends report; other lines of the sender's were read before."""
    while "handed" not in (sent := _hear(sender)):
        pass
    receiver.stdin.write("\n")
    receiver.stdin.flush()
    return sent, _hear(receiver)


def _hear(process: Any) -> dict[str, Any]:
    """The next line that an end says."""
    line = process.stdout.readline()
    if not line:
        raise RigError("one end of the link failed: see above")
    said: dict[str, Any] = json.loads(line)
    return said


def _config(scenario: Scenario, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "policy": policy,
        "prefill_rows": scenario.prefill_rows,
        "prefills": options.prefills,
        "idle_s": options.idle,
        "decode": True,
        "seed": options.seed,
        "queue": options.queue,
    }


def measure_hop(
    scenario: Scenario, congestion: str, policies: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per policy."""
    whole = {**_config(scenario, "fifo", options), "decode": False}
    whole_s = median(_prefills(*_run(scenario, congestion, whole)[:2]))
    rows = []
    for policy in policies:
        config = _config(scenario, policy, options)
        sent, received, relay = _run(scenario, congestion, config)
        row = {
            "scenario": scenario.name,
            "mbps": scenario.mbps,
            "loss": scenario.loss,
            "congestion": congestion,
            "policy": policy,
            **_decodes(sent, received),
            "whole_s": round(whole_s, 3),
            "prefill_s": round(median(_prefills(sent, received)), 3),
            "relay": {
                "dropped": relay["nodes"][0]["dropped_up"],
                "lost": relay["nodes"][0]["lost"],
                "within_400us": relay["late"].get("400us", 1.0),
            },
        }
        row["prefill_ratio"] = round(row["prefill_s"] / whole_s, 3)
        row["within_targets"] = _within(scenario, row)
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def _run(
    scenario: Scenario, congestion: str, config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    with (
        Rig(
            [scenario.node(config["queue"])] * 2, congestion=congestion, seed=config["seed"]
        ) as rig,
        _ends(rig, config) as ends,
    ):
        return *_results(*ends), rig.stats()


def _prefills(sent: dict[str, Any], received: dict[str, Any]) -> list[float]:
    """Seconds from handing a prefill volume over to its arrival."""
    came = {tick: at for tick, at, _ in received["arrivals"]}
    return [came[tick] - at for tick, at, prefill in sent["handed"] if prefill]


def _decodes(sent: dict[str, Any], received: dict[str, Any]) -> dict[str, Any]:
    """Delays of decode volumes in ms, on an idle link and behind prefill volumes."""
    came = {tick: at for tick, at, _ in received["arrivals"]}
    busy = [(at, came[tick]) for tick, at, prefill in sent["handed"] if prefill]
    idle_ms: list[float] = []
    busy_ms: list[float] = []
    for tick, at, prefill in sent["handed"]:
        if not prefill:
            behind = any(start <= at < end for start, end in busy)
            (busy_ms if behind else idle_ms).append((came[tick] - at) * 1000)
    return {"idle_ms": _quantiles(idle_ms[5:]), "busy_ms": _quantiles(busy_ms)}


def _quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    ranks = {name: values[min(len(values) - 1, int(q * len(values)))] for name, q in at.items()}
    return {**{name: round(value, 2) for name, value in ranks.items()}, "n": len(values)}


def _within(scenario: Scenario, row: dict[str, Any]) -> dict[str, bool]:
    idle, busy = row["idle_ms"]["p50"], row["busy_ms"]
    return {
        "median": busy["p50"] - idle <= scenario.median_ms,
        "p99": busy["p99"] - idle <= scenario.p99_ms,
        "prefill": row["prefill_ratio"] <= scenario.ratio,
    }


def measure_fill(
    congestion: str, policies: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A link of 1 Gbit/s filled: payload rate and CPU cost, one row per policy."""
    rows = []
    for policy in policies:
        config = {"policy": policy, "seed": 0, "seconds": options.fill, "prefill_rows": 1024}
        with VethPair(1000.0, congestion=congestion) as pair, _ends(pair, config) as ends:
            sent, received = _results(*ends)
        arrivals = received["arrivals"]
        nbytes = sum(size for _, _, size in arrivals)
        seconds = arrivals[-1][1] - sent["handed"][0][1]
        rows.append(
            {
                "scenario": "fill",
                "congestion": congestion,
                "policy": policy,
                "mbps": round(nbytes * 8 / seconds / 1e6, 1),
                "sender_cpu_s_per_gb": round(sent["cpu_s"] / nbytes * 1e9, 3),
                "receiver_cpu_s_per_gb": round(received["cpu_s"] / nbytes * 1e9, 3),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def measure_flap(
    congestion: str, policies: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A cut in the middle of the first prefill volume, one row per policy and length."""
    rows = []
    scenario = SCENARIOS[0]
    for policy in policies:
        for seconds in options.cuts:
            config = {
                **_config(scenario, policy, options),
                "prefills": 2,
                "idle_s": 1.0,
                "verify": True,
            }
            with (
                Rig([scenario.node(options.queue)] * 2, congestion=congestion) as rig,
                _ends(rig, config) as ends,
            ):
                _hear(ends[0])  # the first prefill volume has been handed over
                time.sleep(0.4)
                rig.cut(1)
                time.sleep(seconds)
                rig.mend(1)
                sent, received = _results(*ends)
            rows.append(_flapped(congestion, policy, seconds, sent, received))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _flapped(
    congestion: str, policy: str, seconds: float, sent: dict[str, Any], received: dict[str, Any]
) -> dict[str, Any]:
    ticks = [tick for tick, _, _ in received["arrivals"]]
    prefills = [] if sent["dead"] else _prefills(sent, received)
    return {
        "scenario": "flap",
        "congestion": congestion,
        "policy": policy,
        "cut_s": seconds,
        "everything_once": sorted(ticks) == [tick for tick, _, _ in sent["handed"]],
        "wrong": len(received["wrong"]),
        "dead": sent["dead"],
        "connects": sent["connects"],
        "resent": sent["resent"],
        "duplicates": received["duplicates"],
        "prefill_s": [round(each, 3) for each in prefills],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for."""
    results: list[dict[str, Any]] = []
    for congestion in options.congestion:
        for scenario in SCENARIOS:
            if scenario.name in options.only:
                results += measure_hop(scenario, congestion, options.policy, options)
        if "fill" in options.only:
            results += measure_fill(congestion, options.policy, options)
        if "flap" in options.only:
            results += measure_flap(congestion, options.policy, options)
    return {
        "rtt_ms": 30,
        "decode_bytes": DECODE_ROWS * ROW,
        "prefill_bytes": {each.name: each.prefill_rows * ROW for each in SCENARIOS},
        "queue_bytes": options.queue,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "results": results,
    }


def _list(text: str) -> list[str]:
    return text.split(",")


def _arguments() -> argparse.Namespace:
    every = [each.name for each in SCENARIOS] + ["fill", "flap"]
    parser = argparse.ArgumentParser(description="Measure a link on real sockets over the rig.")
    parser.add_argument("--json", action="store_true", help="JSON is all it prints anyway")
    parser.add_argument("--only", type=_list, default=every, help=",".join(every))
    parser.add_argument("--policy", type=_list, default=list(POLICIES))
    parser.add_argument("--congestion", type=_list, default=["cubic", "bbr"])
    parser.add_argument("--prefills", type=int, default=12, help="per policy")
    parser.add_argument("--idle", type=float, default=4.0, help="seconds of decode volumes alone")
    parser.add_argument("--fill", type=float, default=5.0, help="seconds")
    parser.add_argument("--cuts", type=lambda text: [float(each) for each in _list(text)])
    parser.add_argument("--queue", type=int, default=256 * 1024, help="bytes, of each router")
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(cuts=[1.0, 2.0])
    return parser.parse_args()


def main() -> int:
    """Measure and print; the exit code."""
    options = _arguments()
    reason = unavailable()
    if reason is not None:
        print(f"the link can't be measured here: {reason}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(measure(options), indent=1))
    except RigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
