"""A wide-area network on one PC.

    python -m tools.wan --nodes 3 --mbps 100 --delay-ms 30 -- COMMAND…
    python -m tools.wan --nodes 2 --mbps 100 --delay-ms 15 --at 5:1:cut=1 --at 7:1:cut=0 -- COMMAND…
    python -m tools.wan --check
    python -m tools.wan --proxy 127.0.0.1:5468 --mbps 100 --delay-ms 15

COMMAND runs on every node (or on those of ``--on``) with ``WAN_NODE``, ``WAN_ADDRESS`` and
``WAN_ADDRESSES`` (comma-separated) in its environment; without one, the rig runs until Ctrl-C.
Namespaces need Linux and root; ``--proxy`` runs anywhere, but hides loss and TCP's windows.
"""

import argparse
import json
import os
import sys
import time

from tools.wan.check import measure_rates
from tools.wan.namespaces import RigError
from tools.wan.node import Node
from tools.wan.proxy import Shaper
from tools.wan.rig import Rig, schedule_changes


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.wan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mbps", type=float, default=100.0, help="up and down, 0 = unlimited")
    parser.add_argument("--up-mbps", type=float, help="up, if different")
    parser.add_argument("--delay-ms", type=float, default=15.0, help="one way")
    parser.add_argument("--queue-bytes", type=int, default=256 * 1024, help="per direction")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets, 0 to 1")
    parser.add_argument("--congestion", default="cubic", help="cubic, bbr or reno")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0, help="seed of losses")
    parser.add_argument("--on", type=int, action="append", help="run COMMAND on this node only")
    parser.add_argument(
        "--at",
        type=_parse_change,
        action="append",
        default=[],
        metavar="SECONDS:NODE:FIELD=VALUE",
        help="change up_mbps, down_mbps, delay_ms, queue_bytes or loss; cut=1 cuts, cut=0 mends",
    )
    parser.add_argument("--check", action="store_true", help="measure the rig's accuracy")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--proxy", metavar="HOST:PORT", help="a plain TCP shaper; needs no root")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    return parser.parse_args()


def _parse_change(text: str) -> tuple[float, int, str, float]:
    seconds, node, change = text.split(":")
    name, value = change.split("=")
    return float(seconds), int(node), name, float(value)


def _run_proxy(options: argparse.Namespace) -> int:
    host, _, port = options.proxy.rpartition(":")
    with Shaper(
        host,
        int(port),
        mbps=options.mbps,
        delay_ms=options.delay_ms,
        queue_bytes=options.queue_bytes,
    ) as shaper:
        print(f"127.0.0.1:{shaper.port} forwards to {options.proxy} (no loss)", flush=True)
        _sleep_forever()
    return 0


def _sleep_forever() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass


def _run_rig(options: argparse.Namespace) -> int:
    nodes = [
        Node(
            f"node{index}",
            options.mbps if options.up_mbps is None else options.up_mbps,
            options.mbps,
            options.delay_ms,
            options.queue_bytes,
            options.loss,
        )
        for index in range(options.nodes)
    ]
    rig = Rig(nodes, congestion=options.congestion, mtu=options.mtu, seed=options.seed)
    with rig, schedule_changes(rig, options.at):
        if options.command:
            return _run(rig, options)
        for index in range(options.nodes):
            print(f"{rig.address(index)}: ip netns exec {rig.namespace(index)} COMMAND", flush=True)
        _sleep_forever()
    return 0


def _run(rig: Rig, options: argparse.Namespace) -> int:
    addresses = ",".join(rig.address(index) for index in range(options.nodes))
    started = []
    for index in options.on or range(options.nodes):
        own = {
            "WAN_NODE": str(index),
            "WAN_ADDRESS": rig.address(index),
            "WAN_ADDRESSES": addresses,
        }
        started.append(rig.run(index, options.command, env={**os.environ, **own}))
    try:
        return max(abs(process.wait()) for process in started)
    except KeyboardInterrupt:
        return 130


def main() -> int:
    """Entry point; returns the exit code."""
    options = _parse_arguments()
    try:
        if options.proxy:
            return _run_proxy(options)
        if options.check:
            print(json.dumps(measure_rates(options.seconds), indent=1))
            return 0
        return _run_rig(options)
    except (RigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
