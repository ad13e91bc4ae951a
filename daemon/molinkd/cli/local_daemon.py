"""Finding a running daemon, and talking to it under this peer's own key."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molink.errors import Unavailable, UsageError
from molink.wire.messages.control import (
    ControlMessage,
    Done,
    Invite,
    InviteRequest,
    RevokeRequest,
    ShutdownRequest,
    StatusRequest,
)
from molink.wire.sockets.endpoints import endpoints
from molink.wire.sockets.loop import EventLoop
from molinkd.peer.demo import demo_homes, first_peer
from molinkd.peer.home import Home
from molinkd.peer.membership import Membership, read_membership
from molinkd.peer.runfile import RunFile, read_run_file

_NOT_RUNNING = "no molink runs here: start one with `molink up`, `molink join` or `molink demo`"


@dataclass(frozen=True, slots=True)
class Found:
    """A running daemon. ``endpoints`` are all that are known on this PC, its own first."""

    home: Home
    note: RunFile
    demo: bool = False

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Roots of the endpoints on this PC."""
        return self.note.demo or (self.note.endpoint,)


def find_daemon(home: Home) -> Found | None:
    """The daemon of ``home``, or of a demo under it if there is none."""
    note = read_run_file(home.run_file)
    if note is not None:
        return Found(home, note)
    for demo in demo_homes(home):
        note = read_run_file(demo.run_file)
        if note is not None:
            return Found(first_peer(demo), note, demo=True)
    return None


def need_daemon(home: Path | None) -> Found:
    """As :func:`find_daemon`.

    Raises:
        Unavailable: there is none.
    """
    found = find_daemon(Home.find(home))
    if found is None:
        raise Unavailable(_NOT_RUNNING)
    return found


def fetch_status(found: Found) -> dict[str, Any]:
    """``molink status --json`` of the daemon's swarm."""
    _, payload = ask(found, StatusRequest(ref=0))
    status: dict[str, Any] = json.loads(payload)
    return status


def fetch_invite(home: Home, ttl: float) -> str:
    """A new join token, from the daemon here or from a coordinator that runs alone."""
    reply, _ = _ask_swarm(home, InviteRequest(ref=0, ttl=ttl))
    assert isinstance(reply, Invite)
    return reply.token


def revoke(home: Home, who: str) -> str:
    """Shut the peer of that id or name out of the swarm; returns its id.

    Raises:
        UsageError: there is none, or more than one.
        NotAuthorized: this PC doesn't run the swarm.
    """
    _, payload = _ask_swarm(home, StatusRequest(ref=0))
    peer = find_peer(json.loads(payload), who)
    reply, _ = _ask_swarm(home, RevokeRequest(ref=0, target=peer))
    assert isinstance(reply, Done)
    return peer


def find_peer(status: dict[str, Any], who: str) -> str:
    """The id of the peer with that id or name.

    Raises:
        UsageError: there is none, or more than one.
        Unavailable: the coordinator, who knows them all, could not be asked.
    """
    if status["coordinator"]["state"] != "running":
        raise Unavailable(f"the swarm's coordinator can't be asked: {status['trouble']}")
    named = [peer["id"] for peer in status["peers"] if peer["name"] == who]
    found = [peer["id"] for peer in status["peers"] if peer["id"] == who] or named
    if not found:
        raise UsageError(f"no peer of the swarm is called {who}; `molink status` shows them")
    if len(found) > 1:
        raise UsageError(f"{len(found)} peers are called {who}: give one's id ({', '.join(found)})")
    return str(found[0])


def _ask_swarm(home: Home, message: ControlMessage) -> tuple[ControlMessage, bytes]:
    """Ask the daemon here, or the coordinator where that runs alone."""
    found, member = find_daemon(home), read_membership(home.membership)
    if found is not None:
        return ask(found, message)
    if member is not None:
        return ask_coordinator(home, member, message)
    raise Unavailable(_NOT_RUNNING)


def shut_down(found: Found, *, leave: bool) -> None:
    """End the daemon; it leaves the swarm for good if ``leave``."""
    reply, _ = ask(found, ShutdownRequest(ref=0, leave=leave))
    assert isinstance(reply, Done)


def ask(found: Found, message: ControlMessage) -> tuple[ControlMessage, bytes]:
    """Send one request to a daemon and return its reply.

    Raises:
        MolinkError: the daemon's refusal, or it doesn't answer.
    """
    keys = found.home.keys()
    addresses = endpoints([found.note.control_host], found.note.control_port)
    return request(found.home, keys.public, addresses, message, "the molink daemon on this PC")


def ask_coordinator(
    home: Home, member: Membership, message: ControlMessage
) -> tuple[ControlMessage, bytes]:
    """Send one request to the coordinator itself, where no daemon runs."""
    name = "the swarm's coordinator"
    return request(home, member.coordinator_key, member.endpoints, message, name)


def request(
    home: Home, server_key: str, addresses: Sequence[str], message: ControlMessage, name: str
) -> tuple[ControlMessage, bytes]:
    """One request to the server that holds ``server_key``, under the key of ``home``."""
    import zmq.asyncio

    from molink.wire.messages.codec import control_codec
    from molink.wire.sockets.client import Client

    async def exchange() -> tuple[ControlMessage, bytes]:
        context = zmq.asyncio.Context()
        client: Client[ControlMessage] = Client(
            context, home.keys(), control_codec(), server_key, addresses, name=name
        )
        client.start()
        try:
            reply, payload = await client.request(message, timeout=15.0)
            return reply, b"" if payload is None else bytes(payload)
        finally:
            await client.close()
            context.destroy(linger=0)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(exchange())
