"""Has the router forward ports by UPnP, in a process of its own.

Any device of the home may answer UPnP, in XML over HTTP. So a process that has no keys speaks it
(:mod:`molinkd.peer.membership.upnp_worker`), and is killed if it takes too much time or memory.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from molink.facts.scalars import Index, Sentence, Text
from molink.wire.messages.base import Message, Port
from molinkd.child_process import ChildProcess

#: The port of UPnP's search.
SEARCH_PORT = 1900
#: Seconds that the process has for a request, and until it is killed.
REQUEST_TIMEOUT_S, _KILL_TIMEOUT_S = 15.0, 20.0
#: Maximum resident memory of the process in bytes, and the interval of checks in seconds.
_MAX_MEMORY_BYTES, _CHECK_INTERVAL_S = 256 << 20, 0.1
_MAX_REPLY_BYTES = 4096
#: ``-P``: never import a folder named molinkd from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "molinkd.peer.membership.upnp_worker")

SILENT = "it answers neither PCP, NAT-PMP nor UPnP: enable one in its settings"
TOO_SLOW = "its answers by UPnP take too long"
UNUSABLE = "its answers by UPnP are unusable"


class UpnpRequest(Message, frozen=True, kw_only=True):
    """Map TCP ``ports`` of the router ``gateway`` to the same ports of ``own``.

    ``lifetime`` is in seconds; 0 removes the mappings.
    """

    gateway: Text
    own: Text
    ports: tuple[Port, ...]
    lifetime: Index
    search_port: Port = SEARCH_PORT


class UpnpReply(Message, frozen=True, kw_only=True):
    """The router's public address and for how many seconds it maps the ports, or a failure."""

    address: Text = ""
    lifetime: Index = 0
    failure: Sentence = ""


class UpnpClient:
    """Runs a process for each request, whose errors go to ``log_file``."""

    def __init__(
        self, log_file: Path, search_port: int = SEARCH_PORT, command: Sequence[str] = _COMMAND
    ) -> None:
        self._log_file, self._search_port, self._command = log_file, search_port, command

    async def map_ports(
        self, gateway: str, own: str, ports: tuple[int, ...], lifetime: int
    ) -> UpnpReply:
        """Map the ports, or remove the mappings if ``lifetime`` is 0.

        Raises:
            OSError: The process can't be started.
        """
        request = UpnpRequest(
            gateway=gateway,
            own=own,
            ports=ports,
            lifetime=lifetime,
            search_port=self._search_port,
        )
        replied: asyncio.Future[UpnpReply] = asyncio.get_running_loop().create_future()

        def resolve(reply: object) -> None:
            if not replied.done():
                replied.set_result(reply if isinstance(reply, UpnpReply) else _FAILED)

        child = ChildProcess(
            "upnp",
            self._command,
            reader=_read_reply,
            on_message=resolve,
            on_exit=resolve,
            log_file=self._log_file,
        )
        child.start()
        try:
            child.send(msgspec.json.encode(request) + b"\n")
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                return await _watch_memory(child.pid, replied)
        except TimeoutError:
            return UpnpReply(failure=TOO_SLOW)
        finally:
            await child.stop(kill=True)


_FAILED = UpnpReply(failure=UNUSABLE)


def _read_reply(stream: BinaryIO) -> UpnpReply | None:
    line = stream.readline(_MAX_REPLY_BYTES)
    return msgspec.json.decode(line, type=UpnpReply) if line else None


async def _watch_memory(pid: int, replied: "asyncio.Future[UpnpReply]") -> UpnpReply:
    """Wait for the reply of process ``pid`` while its memory is bounded."""
    while not replied.done():
        await asyncio.wait([replied], timeout=_CHECK_INTERVAL_S)
        try:
            used = psutil.Process(pid).memory_info().rss
        except psutil.Error:  # it has exited
            return await replied
        if used > _MAX_MEMORY_BYTES:
            return _FAILED
    return replied.result()
