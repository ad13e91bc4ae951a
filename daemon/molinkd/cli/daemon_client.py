"""Client of a running daemon, authenticated with this peer's own key."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molink.errors import ConnectionBroken, Unavailable
from molink.facts.identity import derive_peer_id
from molink.swarm.controller.status_schema import decode_status
from molink.wire.messages.admin import (
    AddOwnerRequest,
    DrainRequest,
    InvitationsReply,
    InvitationsRequest,
    InviteReply,
    InviteRequest,
    PairingDecisionReply,
    PairingDecisionRequest,
    RevokeReply,
    RevokeRequest,
    ShutdownRequest,
    StatusRequest,
    UnrevokeRequest,
)
from molink.wire.messages.control_plane import ControlMessage, DoneReply
from molink.wire.messages.membership import INVITATION_PREFIX
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.event_loop import EventLoop
from molinkd.peer.home import Home, RunFile, read_run_files

if TYPE_CHECKING:
    from molinkd.peer.membership.membership_record import MembershipRecord
    from molinkd.peer.membership.membership_requests import AskCoordinator

#: Connect timeout for the daemon on this PC, in seconds.
CONNECT_TIMEOUT_S = 3.0
#: Reply timeout in seconds; the daemon may have to ask the coordinator.
REPLY_TIMEOUT_S = 15.0
#: Poll interval while a swarm is not ready, in seconds.
_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A running daemon."""

    home: Home
    run_file: RunFile
    is_demo: bool = False

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of all endpoints on this PC, the daemon's own first."""
        return self.run_file.demo or (self.run_file.endpoint,)


def find_daemons(home: Home) -> Iterator[RunningDaemon]:
    """Yield the daemon of ``home`` and the first one of each demo below it, if they run."""
    for place, run_file in read_run_files(home):
        is_demo = place != home
        yield RunningDaemon(place.demo_peer(1) if is_demo else home, run_file, is_demo)


def find_daemon(home: Home) -> RunningDaemon | None:
    """Return the daemon of ``home``, or of a demo below it."""
    return next(find_daemons(home), None)


def own_api_key(home: Home, url: str) -> str | None:
    """Return an API key of ``url`` if it is the endpoint of the daemon of ``home``.

    ``None`` if it needs no key, and for other URLs: no other server may learn the key.
    """
    found = find_daemon(home)
    if found is None or url.rstrip("/").removesuffix("/v1") not in found.endpoints:
        return None
    return found.run_file.api_key or None


def require_daemon(home: Path | None) -> RunningDaemon:
    """Return the daemon as :func:`find_daemon` does.

    Raises:
        Unavailable: no daemon runs.
    """
    place = Home.find_home(home)
    found = find_daemon(place)
    if found is None:
        raise _not_running(place)
    return found


def _not_running(home: Home) -> Unavailable:
    return Unavailable(
        f"molink is not running here: start it with {home.format_command('up')}, "
        f"{home.format_command('join')} or {home.format_command('demo')}"
    )


def fetch_status(found: RunningDaemon, *, scale_out: bool = False) -> dict[str, Any]:
    """Return ``molink status --json``, optionally with the effect of one more PC."""
    status: dict[str, Any] = json.loads(_fetch_status_json(found, scale_out=scale_out))
    return status


def _fetch_status_json(found: RunningDaemon, *, scale_out: bool = False) -> bytes:
    question = StatusRequest(ref=0, scale_out=scale_out)
    try:
        return send_request(found, question)[1]
    except ConnectionBroken:
        # A daemon reopens its port when a peer is revoked; the request is safe to repeat.
        return send_request(found, question)[1]


def wait_until_ready(home: Path | None, wait: float) -> tuple[RunningDaemon, bytes]:
    """Return the daemon and ``molink status --json`` (UTF-8) once all models are ready.

    After ``wait`` seconds returns the status as it is.

    Raises:
        MolinkError: no daemon runs, or it does not respond.
    """
    until = time.monotonic() + wait
    while True:
        try:
            found = require_daemon(home)
            text = _fetch_status_json(found)
            if decode_status(text).is_ready or time.monotonic() >= until:
                return found, text
        except Unavailable:
            if time.monotonic() >= until:
                raise
        time.sleep(min(_POLL_INTERVAL_S, max(0.0, until - time.monotonic())))


def served_models(status: dict[str, Any]) -> list[str]:
    """Return the names of the served models."""
    models = status.get("models", ())
    names = [str(one["name"]) for one in models if not one.get("stopped")]
    return names or [str(name) for name in (status.get("model"),) if name]


def stopped_models(status: dict[str, Any]) -> list[str]:
    """Return the names of stopped models of an applied file."""
    return [str(one["name"]) for one in status.get("models", ()) if one.get("stopped")]


def create_invitation(home: Home, ttl: float, uses: int) -> InviteReply:
    """Create a join token, by the daemon here or a standalone coordinator."""
    reply, _ = _request_swarm(home, InviteRequest(ref=0, ttl=ttl, uses=uses))
    assert isinstance(reply, InviteReply)
    return reply


def fetch_invitations(home: Home) -> list[dict[str, Any]]:
    """Return ``molink invite --list --json``."""
    reply, payload = _request_swarm(home, InvitationsRequest(ref=0))
    assert isinstance(reply, InvitationsReply)
    invitations: list[dict[str, Any]] = json.loads(payload)
    return invitations


def revoke_invitation(home: Home, id: str) -> RevokeReply:
    """Revoke an invitation.

    Raises:
        RequestError: no such invitation.
        NotAuthorized: another PC created it, and this one does not own the swarm.
    """
    reply, _ = _request_swarm(
        home, RevokeRequest(ref=0, target=INVITATION_PREFIX + id.removeprefix(INVITATION_PREFIX))
    )
    assert isinstance(reply, RevokeReply)
    return reply


def revoke_peer(home: Home, name_or_id: str) -> RevokeReply:
    """Revoke a peer by id or name; returns the other members that this concerns.

    Raises:
        RequestError: no such peer.
        NotAuthorized: this PC does not own the swarm.
    """
    reply, _ = _request_swarm(home, RevokeRequest(ref=0, target=name_or_id))
    assert isinstance(reply, RevokeReply)
    return reply


def revoke_all_peers(home: Home) -> list[str]:
    """Revoke all other peers, the leader last, which dissolves the swarm.

    Returns the names of offline peers, which were not notified.

    Raises:
        MolinkError: not all peers were revoked.
    """
    status = _fetch_swarm_status(home)
    me = derive_peer_id(home.load_keys().public)
    others = [peer for peer in status["peers"] if peer["id"] != me]
    for peer in sorted(others, key=lambda peer: bool(peer["id"] == status.get("leader"))):
        _request_swarm(home, RevokeRequest(ref=0, target=peer["id"]))
    return [peer["name"] for peer in others if peer["state"] == "offline"]


def unrevoke_peer(home: Home, name_or_id: str) -> None:
    """Readmit a revoked peer by id or name.

    Raises:
        RequestError: no such revoked peer.
        NotAuthorized: this PC does not own the swarm.
    """
    reply, _ = _request_swarm(home, UnrevokeRequest(ref=0, target=name_or_id))
    assert isinstance(reply, DoneReply)


def add_owner(home: Home, name_or_id: str) -> None:
    """Make another peer an owner, by id or name.

    Raises:
        RequestError: no such peer.
        NotAuthorized: this PC is no owner of the swarm.
    """
    reply, _ = _request_swarm(home, AddOwnerRequest(ref=0, target=name_or_id))
    assert isinstance(reply, DoneReply)


def decide_pairing(home: Home, code: str, *, refuse: bool) -> str:
    """Approve or reject the PC that shows ``code``; returns its name.

    Raises:
        RequestError: no such PC.
    """
    reply, _ = _request_swarm(home, PairingDecisionRequest(ref=0, code=code[:64], refuse=refuse))
    assert isinstance(reply, PairingDecisionReply)
    return reply.name


def fetch_pairings(home: Home) -> list[dict[str, Any]]:
    """Return the waiting PCs, as in ``molink status --json``.

    Raises:
        Unavailable: the coordinator is unavailable.
    """
    pairings: list[dict[str, Any]] = _fetch_swarm_status(home).get("pairing_requests", [])
    return pairings


def fetch_members(home: Home) -> list[dict[str, Any]]:
    """Return all members, as in ``molink status --json``.

    Raises:
        Unavailable: the coordinator is unavailable.
    """
    members: list[dict[str, Any]] = _fetch_swarm_status(home)["peers"]
    return members


def _fetch_swarm_status(home: Home) -> dict[str, Any]:
    _, payload = _request_swarm(home, StatusRequest(ref=0))
    status: dict[str, Any] = json.loads(payload)
    if status["coordinator"]["state"] != "running":
        raise Unavailable(f"the coordinator is unavailable: {status['trouble']}")
    return status


def _request_swarm(home: Home, message: ControlMessage) -> tuple[ControlMessage, bytes]:
    """Send a request to the daemon here, or to a standalone coordinator."""
    from molinkd.peer.membership.membership_record import read_membership

    found = find_daemon(home)
    if found is not None:
        return send_request(found, message)
    member = read_membership(home.membership)
    if member is None:
        raise _not_running(home)
    try:
        return request_coordinator(home, member, message)
    except DaemonNotResponding as error:
        raise _not_running(home) from error


def request_shutdown(found: RunningDaemon, *, leave: bool) -> None:
    """Stop the daemon; with ``leave`` it leaves the swarm first."""
    reply, _ = send_request(found, ShutdownRequest(ref=0, leave=leave))
    assert isinstance(reply, DoneReply)


def set_drain(found: RunningDaemon, device: str = "", *, on: bool) -> None:
    """Drain the daemon's PC, or undo that; ``device`` limits it to one device."""
    reply, _ = send_request(found, DrainRequest(ref=0, drain=on, device=device))
    assert isinstance(reply, DoneReply)


def send_request(found: RunningDaemon, message: ControlMessage) -> tuple[ControlMessage, bytes]:
    """Send one request to a daemon and return its reply.

    Raises:
        MolinkError: the daemon refuses, or does not respond.
    """
    keys, run_file = found.home.load_keys(), found.run_file
    addresses = endpoints([run_file.control_host], run_file.control_port)
    name = f"the molink daemon on this PC (process {run_file.pid})"
    try:
        return send_control_request(
            found.home, keys.public, addresses, message, name, CONNECT_TIMEOUT_S
        )
    except DaemonNotResponding:
        raise Unavailable(
            f"{name} did not respond within {CONNECT_TIMEOUT_S:g} s: it is suspended or "
            "overloaded. Try again later, or kill it and restart molink."
        ) from None


def request_coordinator(
    home: Home, member: "MembershipRecord", message: ControlMessage
) -> tuple[ControlMessage, bytes]:
    """Send one request to the coordinator, if no daemon runs."""
    name = "the coordinator"
    return send_control_request(
        home,
        member.coordinator_key,
        member.endpoints,
        message,
        name,
        REPLY_TIMEOUT_S,
        member,
    )


class DaemonNotResponding(Unavailable):
    """No connection in time."""


def send_control_request(
    home: Home,
    server_key: str,
    addresses: Sequence[str],
    message: ControlMessage,
    name: str,
    connect_s: float,
    member: "MembershipRecord | None" = None,
) -> tuple[ControlMessage, bytes]:
    """Send one request to the server with key ``server_key``, authenticated as ``home``.

    A request about members to the coordinator of ``member``'s swarm is signed here, and may go by
    its rendezvous.

    Raises:
        DaemonNotResponding: no connection within ``connect_s`` seconds.
        MolinkError: the server refuses, or does not respond.
    """
    import zmq.asyncio

    from molink.wire.messages.codec import control_codec
    from molink.wire.messages.rendezvous import COORDINATOR
    from molink.wire.sockets.client import Client
    from molinkd.peer.membership.rendezvous_client import open_rendezvous

    async def exchange() -> tuple[ControlMessage, bytes]:
        context, keys = zmq.asyncio.Context(), home.load_keys()
        rendezvous = None if member is None else open_rendezvous(member.rendezvous, keys)
        targets = tuple(addresses)
        if member is not None and rendezvous is not None:
            targets = rendezvous.add_endpoint(targets, member.leader_to_call, COORDINATOR)
        client: Client[ControlMessage] = Client(
            context, keys, control_codec(), server_key, targets, name=name
        )
        client.start()

        async def ask(one: ControlMessage) -> tuple[ControlMessage, bytes]:
            reply, payload = await client.send_request(one, timeout=REPLY_TIMEOUT_S)
            return reply, b"" if payload is None else bytes(payload)

        try:
            try:
                await client.wait_connected(connect_s)
            except Unavailable as error:
                raise DaemonNotResponding(str(error)) from None
            if member is None:
                return await ask(message)
            return await _sign_request(home, member, server_key, message, ask)
        finally:
            await client.close()
            if rendezvous is not None:
                await rendezvous.close()
            context.destroy(linger=0)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(exchange())


async def _sign_request(
    home: Home,
    member: "MembershipRecord",
    coordinator_key: str,
    message: ControlMessage,
    ask: "AskCoordinator",
) -> tuple[ControlMessage, bytes]:
    """Sign a request about members, then send it by ``ask()``; others are only sent."""
    from molinkd.peer.election.leadership import ReplicaFile
    from molinkd.peer.membership.membership_requests import (
        MeetingPoint,
        MembershipRequest,
        send_membership_request,
    )

    if not isinstance(message, MembershipRequest):
        return await ask(message)
    reply = await send_membership_request(
        message,
        home.load_keys(),
        member.swarm,
        coordinator_key,
        ask,
        ReplicaFile(home.replica, member.swarm).log,
        MeetingPoint(member.rendezvous, member.leader_to_call),
    )
    return reply, b""
