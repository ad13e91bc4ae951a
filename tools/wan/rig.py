"""The rig: nodes in namespaces, joined by one relay process."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.wan.cores import CoreShares
from tools.wan.namespaces import (
    Namespaces,
    RigError,
    enter_command,
    open_tun,
    require_support,
    run_ip,
)
from tools.wan.node import Node, check_field

_ROOT = Path(__file__).resolve().parents[2]
_REPLY_TIMEOUT = 5.0


class Rig:
    """A wide-area network between namespaces during a ``with`` block.

    Rigs reuse addresses; no namespace sees another rig or the PC's network.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        congestion: str = "cubic",
        mtu: int = 1500,
        seed: int = 0,
        cores: float | None = None,
    ) -> None:
        """``congestion`` as in :class:`Namespaces`; ``seed`` of losses; ``cores`` per node."""
        if not 0 < len(nodes) <= 200:
            raise ValueError("a rig has 1 to 200 nodes")
        self.nodes = tuple(nodes)
        self._mtu = mtu
        self._seed = seed
        self._spaces = Namespaces(len(nodes), congestion)
        self._shares = CoreShares(self._spaces.names, cores) if cores else None
        self._started: list[subprocess.Popen[Any]] = []
        self._relay: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Self:
        require_support()
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def _set_up(self) -> None:
        self._spaces.create()
        if self._shares is not None:
            self._shares.create()
        self._start_relay()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes and clean up."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for process in self._started:
            process.wait()
        self._started.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._relay is not None:
            try:
                self._relay.wait(_REPLY_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._relay.kill()
                self._relay.wait()
            self._relay = None
        self._spaces.remove()
        if self._shares is not None:
            self._shares.remove()

    def _start_relay(self) -> None:
        devices: list[int] = []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        ours.settimeout(_REPLY_TIMEOUT)
        try:
            for index, name in enumerate(self._spaces.names):
                device, label = open_tun()
                devices.append(device)
                run_ip("link", "set", "dev", label, "netns", name, "name", "wan0")
                run_ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "wan0")
                run_ip("-n", name, "link", "set", "wan0", "mtu", str(self._mtu), "up")
                self._spaces.connected(index, "10.77.0.0/24")
            config = {
                "nodes": [asdict(node) for node in self.nodes],
                "of": {index + 1: index for index in range(len(self.nodes))},
                "devices": devices,
                "control": theirs.fileno(),
                "mtu": self._mtu,
                "seed": self._seed,
            }
            path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
            self._relay = subprocess.Popen(
                [sys.executable, "-m", "tools.wan.relay", json.dumps(config)],
                pass_fds=(*devices, theirs.fileno()),
                env={**os.environ, "PYTHONPATH": path},
            )
        finally:
            theirs.close()
            for device in devices:
                os.close(device)
        self._ask_relay({})

    def address(self, index: int) -> str:
        """The IPv4 address of node ``index``."""
        return f"10.77.0.{index + 1}"

    def namespace(self, index: int) -> str:
        """The name of a node's namespace."""
        return self._spaces.names[index]

    def run(self, index: int, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a program on node ``index``; it is killed when the rig closes."""
        share = self._shares.enter(index) if self._shares is not None else ()
        process = subprocess.Popen([*share, *enter_command(self.namespace(index)), *argv], **popen)
        self._started.append(process)
        return process

    def change(self, index: int, **values: float) -> None:
        """Change fields of a node, such as ``up_mbps=20``."""
        for name, value in values.items():
            check_field(name, value)
        self._ask_relay({"node": index, "change": values})

    def cut(self, index: int) -> None:
        """Drop all packets of a node, as if its cable were pulled."""
        self._ask_relay({"node": index, "change": {"cut": 1}})

    def mend(self, index: int) -> None:
        """End a cut."""
        self._ask_relay({"node": index, "change": {"cut": 0}})

    def stats(self) -> dict[str, Any]:
        """Packets per node, and their lateness."""
        return self._ask_relay({"stats": True})

    def _ask_relay(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._control is None:
            raise RigError("the rig is closed")
        try:
            self._control.send(json.dumps(question).encode())
            answer: dict[str, Any] = json.loads(self._control.recv(65536) or b"null")
        except (OSError, TimeoutError, ValueError) as error:
            raise RigError(f"the relay doesn't answer: {error}") from error
        if answer is None:
            raise RigError("the relay has ended")
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


@contextlib.contextmanager
def schedule_changes(rig: Rig, changes: Sequence[tuple[float, int, str, float]]) -> Iterator[None]:
    """Apply ``(seconds, node, field, value)`` changes in a thread during the block."""
    over = threading.Event()

    def follow() -> None:
        start = time.monotonic()
        for at, node, name, value in sorted(changes):
            if over.wait(max(0.0, start + at - time.monotonic())):
                return
            if name == "cut":
                (rig.cut if value else rig.mend)(node)
            else:
                rig.change(node, **{name: value})

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
