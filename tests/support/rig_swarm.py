"""molink on the nodes of an emulated network."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from molinkd.peer.home import Home
from tests.support.processes import COMMAND_S, Process, Tools, environment, restore_measurements
from tools.wan import Node, Rig
from tools.wan.homes import Homes, Kind

CPU = ["--threads", "1", "--device", "cpu"]
#: Interval of polls that each run a command, in seconds.
EVERY_S = 0.5


class Behind(Process):
    """A molink process on a node of the rig."""

    def __init__(self, rig: Rig, index: int, home: Path, *arguments: str, lie: str = "") -> None:
        """``lie``: how it relays, if it does so dishonestly."""
        home.mkdir(parents=True)
        self.rig, self.index, self.home = rig, index, Home(home)
        self._statuses: subprocess.Popen[bytes] | None = None
        restore_measurements(self.home)
        self._output = (home / "terminal.log").open("ab+")
        self.process = rig.run(
            index,
            [
                sys.executable,
                "-m",
                "tests.support.lying_relay" if lie else "molinkd",
                *arguments,
                *CPU,
            ],
            env=environment(home) | {"LIE": lie},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def run(self, *arguments: str) -> str:
        """The output of a command on its node."""
        process = self.rig.run(
            self.index,
            [sys.executable, "-m", "molinkd", *arguments],
            env=environment(self.home.root),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return str(process.communicate(timeout=COMMAND_S)[0].decode())

    def status(self) -> dict[str, Any]:
        if self._statuses is None:
            self._statuses = self.rig.run(
                self.index,
                [sys.executable, "-m", "tests.support.status_stream"],
                env=environment(self.home.root),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._statuses.stdin is not None
        assert self._statuses.stdout is not None
        self._statuses.stdin.write(b"\n")
        self._statuses.stdin.flush()
        found: dict[str, Any] = json.loads(self._statuses.stdout.readline())
        return found

    def stop(self) -> None:
        if self._statuses is not None:
            self._statuses.communicate(timeout=60)
        super().stop()

    def wait_ready(self) -> dict[str, Any]:
        status: dict[str, Any] = {}

        def ready() -> bool:
            status.update(self.status())
            return any(one["ready"] for one in status.get("pipelines", ()))

        Tools.wait_for(lambda: "is ready" in self.output, self)
        Tools.wait_for(ready, self)
        return status


class House:
    """PCs on the nodes of a rig, for the life of a ``with`` block."""

    def __init__(self, folder: Path, *nodes: Node, kinds: Sequence[Kind] = ()) -> None:
        """``kinds``: what stands between each node and its PC; nothing by default."""
        self._folder, self._names = folder, [node.name for node in nodes]
        self._stack = ExitStack()
        self.rig = Homes(nodes, kinds) if kinds else Rig(nodes)

    def __enter__(self) -> "House":
        self._stack.enter_context(self.rig)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str, *arguments: str, lie: str = "", node: str = "") -> Behind:
        """Start a PC on the ``node`` of its name, or on another one's."""
        index = self._names.index(node or name)
        options = (*arguments, "--name", name)
        process = Behind(self.rig, index, self._folder / name, *options, lie=lie)
        self._stack.callback(process.stop)
        return process

    def rendezvous(self, node: str) -> str:
        """Start a rendezvous on a node; returns its address."""
        index, home = self._names.index(node), self._folder / node
        place = self.rig.address(index)
        process = self.rig.run(
            index,
            [sys.executable, "-m", "molinkd", "rendezvous", "--advertise", place],
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        return next(line.split()[-1] for line in process.stdout if "--rendezvous" in line)

    def first(self, name: str, *arguments: str) -> tuple[Behind, str]:
        """Start the PC that founds the swarm; also returns a token."""
        process = self.start(name, "up", *arguments)
        tokens: list[str] = []

        def invited() -> bool:
            tokens.append(process.run("invite", "--uses", "3").strip())
            return bool(tokens[-1])

        Tools.wait_for(lambda: "Chat endpoint" in process.output, process)
        Tools.wait_for(invited, process, every=EVERY_S)
        return process, tokens[-1]


#: Prints the tokens of an answer at an endpoint as they come, then a line of their text.
ASK = """
import json, sys, urllib.request
body = {"model": "molink-demo", "prompt": "Once", "max_tokens": 60, "temperature": 0}
body |= {"ignore_eos": True, "stream": True}
ask = urllib.request.Request(
    sys.argv[1] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
text = ""
for line in urllib.request.urlopen(ask, timeout=280):
    if line.startswith(b"data: {"):
        text += json.loads(line[6:])["choices"][0]["text"]
print(json.dumps(text))
"""


def ask(one: Behind) -> str:
    """The whole answer of that PC's endpoint; fails if the stream ends with an error."""
    (endpoint,) = one.found().endpoints
    asking = one.rig.run(
        one.index,
        [sys.executable, "-c", ASK, endpoint],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    said, failure = asking.communicate(timeout=290)
    assert asking.returncode == 0, failure.decode()
    return str(json.loads(said))
