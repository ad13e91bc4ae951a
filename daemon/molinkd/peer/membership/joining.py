"""Joins a swarm over the network: with a token, or again after a ban.

A token names several ways to the coordinator: its addresses, the rendezvous, and other members that
know where it runs. They are tried side by side, but members only when the coordinator is late: they
could send this PC elsewhere.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import msgspec
import zmq.asyncio

from molink.errors import (
    ConnectionBroken,
    MolinkError,
    NotAuthorized,
    Overloaded,
    PeerBanned,
    TokenError,
    Unavailable,
    WireError,
)
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.join_token import JoinToken
from molink.swarm.membership.versions import own_version
from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage, JoinRedirect, JoinReply, JoinRequest
from molink.wire.messages.membership import JoinEntry, sign_entry
from molink.wire.messages.rendezvous import CONTROL, COORDINATOR
from molink.wire.sockets.client import Client, ClientEvents, is_refused
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.membership.rendezvous_client import RendezvousClient
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Timeouts of connecting, and of the reply, in seconds.
_CONNECT_TIMEOUT_S, _JOIN_TIMEOUT_S = 8.0, 20.0
#: Timeout of asking whether a ban was lifted, in seconds.
_RENEW_TIMEOUT_S = 6.0
#: When contact points are tried unless the coordinator is known to be unreachable, and when calls
#: are, in seconds.
_CONTACT_DELAY_S, _CALL_DELAY_S = 5.0, 0.3
#: Retry interval after an overload or a broken connection, in seconds.
_RETRY_S = 1.0
#: Failed handshakes after which the server is considered a different one; a starting coordinator
#: may refuse a few.
_MAX_HANDSHAKES = 5


@dataclass(frozen=True, slots=True)
class _Target:
    """The coordinator, or a member that knows it."""

    key: str
    addresses: tuple[str, ...]
    #: The peer to call at the rendezvous for one of its sockets.
    peer: str = ""
    wanted: bytes = COORDINATOR


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to a target."""

    target: _Target
    endpoint: str
    label: str
    is_contact: bool
    is_call: bool = False


async def join_swarm(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    token: JoinToken,
    name: str,
    rendezvous: RendezvousClient | None = None,
) -> MembershipRecord:
    """Join the swarm under this peer's own key.

    Raises:
        TokenError: The coordinator rejects the invitation, or belongs to another swarm.
        PeerBanned: This PC was removed from the swarm.
        Unavailable: The coordinator is unreachable, or the swarm is full.
        VersionMismatch: The molink versions are incompatible.
    """
    joiner = _Joiner(context, token, rendezvous, _make_request(keys, token, name))
    leader = _Target(token.coordinator_key, token.addresses, token.leader)
    contacts = [
        _Target(one.public_key, one.addresses, derive_peer_id(one.public_key), CONTROL)
        for one in token.contact_points
    ]
    way, reply = await joiner.ask_targets([leader, *contacts])
    if isinstance(reply, JoinRedirect):
        leader = _Target(reply.coordinator_key, reply.addresses, reply.leader)
        way, reply = await joiner.ask_targets([leader])
    if not isinstance(reply, JoinReply):
        raise WireError(f"unexpected reply {type(reply).__name__} to a join request")
    if reply.swarm != token.swarm:
        raise WireError(f"swarm {reply.swarm} replied to a token of swarm {token.swarm}")
    log.info("joined swarm %s by %s", reply.swarm, way.label)
    if rendezvous is not None:
        rendezvous.record_reached(way.target.peer, by_call=way.is_call)
    return MembershipRecord(
        swarm=reply.swarm,
        coordinator_key=way.target.key,
        addresses=way.target.addresses,
        first_leader=way.target.peer,
    )


def _make_request(keys: KeyPair, token: JoinToken, name: str) -> JoinRequest:
    speaks, invited = own_version(), KeyPair.from_seed(token.secret_key).signer
    entry = JoinEntry(invited.verify_key, keys.signer.verify_key, name[:64], time.time())
    return JoinRequest(
        ref=0,
        public_key=keys.public,
        name=name,
        version=speaks.version,
        protocol=speaks.protocol,
        entry=sign_entry(token.swarm, invited, entry),
    )


class _Joiner:
    """Sends one request to join, by several ways."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        token: JoinToken,
        rendezvous: RendezvousClient | None,
        request: JoinRequest,
    ) -> None:
        self._context, self._rendezvous, self._request = context, rendezvous, request
        self._keys = KeyPair.from_seed(token.secret_key)

    async def ask_targets(self, targets: Sequence[_Target]) -> tuple[_Way, ControlMessage]:
        """The first reply, and the way by which it came; the first target is the best.

        Raises:
            MolinkError: No way leads to a reply, or the coordinator refuses.
        """
        ways = [way for one in targets for way in self._list_ways(one, one is not targets[0])]
        is_late = asyncio.Event()
        asking = {asyncio.create_task(self._ask_by(way, is_late)): way for way in ways}
        failures: dict[_Way, MolinkError] = {}
        try:
            pending = set(asking)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    way = asking[task]
                    try:
                        return way, task.result()
                    except (TokenError, Unavailable) as error:
                        failures[way] = error
                    except MolinkError as error:
                        if not way.is_contact:
                            raise
                        failures[way] = error  # only the coordinator decides
                if all(asking[task].is_contact for task in pending):
                    is_late.set()
        finally:
            await cancel_tasks(*asking)
        raise self._summarize([(way, failures[way]) for way in ways])

    def _list_ways(self, target: _Target, is_contact: bool) -> list[_Way]:
        ways = [_Way(target, f"tcp://{one}", one, is_contact) for one in target.addresses]
        if self._rendezvous is not None and target.peer:
            endpoint = self._rendezvous.local_endpoint(target.peer, target.wanted)
            label = f"the rendezvous {self._rendezvous.address.place}"
            if endpoint:
                ways.append(_Way(target, endpoint, label, is_contact, is_call=True))
        return ways

    async def _ask_by(self, way: _Way, is_late: asyncio.Event) -> ControlMessage:
        if way.is_contact:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CONTACT_DELAY_S):
                    await is_late.wait()
        if way.is_call:
            await asyncio.sleep(_CALL_DELAY_S)
        refusals: asyncio.Queue[str] = asyncio.Queue()
        client: Client[ControlMessage] = Client(
            self._context,
            self._keys,
            control_codec(),
            way.target.key,
            (way.endpoint,),
            name="the swarm's coordinator",
            events=ClientEvents(on_refused=refusals.put_nowait),
        )
        client.start()
        try:
            refused = _wait_until_refused(refusals, 1)
            return await _request(client, self._request, refused, _JOIN_TIMEOUT_S)
        except PeerBanned:
            raise
        except NotAuthorized as error:
            if way.is_call and self._find_failure(way):
                raise _NotReached(self._find_failure(way)) from error
            raise TokenError(
                "this join token was revoked or has expired, or another swarm runs at "
                f"{way.label}. Ask for a new one, which `molink invite` prints on a PC of the swarm"
            ) from error
        except _NotConnected as error:
            raise _NotReached(await self._explain(way, client)) from error
        except (Overloaded, Unavailable) as error:
            raise Unavailable(f"can't join: {error}") from error
        finally:
            await client.close()

    def _find_failure(self, way: _Way) -> str:
        assert self._rendezvous is not None
        return self._rendezvous.find_failure(way.target.peer)

    async def _explain(self, way: _Way, client: Client[ControlMessage]) -> str:
        """Why a way leads to no connection."""
        if way.is_call:
            return self._find_failure(way) or "no answer through it"
        if client.failure is not None:
            return "answers, but not as this swarm"
        return "refuses connections" if await is_refused(way.endpoint) else "doesn't answer"

    def _summarize(self, failures: Sequence[tuple[_Way, MolinkError]]) -> MolinkError:
        """One error for all ways that failed: what the swarm said, else why it wasn't reached."""
        said = [error for _, error in failures if not isinstance(error, _NotReached)]
        if said:
            return min(said, key=lambda error: not isinstance(error, TokenError))
        reasons = ", ".join(f"{way.label} {error}" for way, error in failures)
        text = f"can't join: {reasons}"
        if self._rendezvous is None:
            text += ". If that PC is behind a router, it needs a rendezvous (`molink rendezvous`)"
        return Unavailable(text)


class _NotReached(Unavailable):
    """There was no connection."""


class _NotConnected(Unavailable):
    """There was no connection in time."""


async def renew_membership(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    record: MembershipRecord,
    rendezvous: RendezvousClient | None = None,
) -> MembershipRecord:
    """Ask the swarm that banned this PC whether the ban was lifted.

    Raises:
        PeerBanned: It was not, or the swarm does not reply.
    """
    refusals: asyncio.Queue[str] = asyncio.Queue()
    endpoints = record.endpoints
    if rendezvous is not None:
        endpoints = rendezvous.add_endpoint(endpoints, record.leader_to_call, COORDINATOR)
    client: Client[ControlMessage] = Client(
        context,
        keys,
        control_codec(),
        record.coordinator_key,
        endpoints,
        name="the swarm's coordinator",
        events=ClientEvents(on_refused=refusals.put_nowait),
    )
    client.start()
    try:
        refused = _wait_until_refused(refusals, len(endpoints))
        await _request(client, StatusRequest(ref=0), refused, _RENEW_TIMEOUT_S)
    except MolinkError as error:
        raise PeerBanned(str(error)) from error
    finally:
        await client.close()
    return msgspec.structs.replace(record, is_banned=False)


async def _request(
    client: Client[ControlMessage],
    request: ControlMessage,
    refused: Coroutine[None, None, NotAuthorized],
    timeout: float,
) -> ControlMessage:
    """The reply, unless ``refused`` completes first; its result is raised."""
    asking = asyncio.create_task(_request_with_retry(client, request, timeout))
    refusing = asyncio.create_task(refused)
    try:
        await asyncio.wait((asking, refusing), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise refusing.result()
        return asking.result()
    finally:
        await cancel_tasks(asking, refusing)


async def _request_with_retry(
    client: Client[ControlMessage], request: ControlMessage, timeout: float
) -> ControlMessage:
    """Retry after an overload or a broken connection.

    A coordinator resets all connections when it bans a PC. The requests are idempotent.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    try:
        await client.wait_connected(min(timeout, _CONNECT_TIMEOUT_S))
    except Unavailable as error:
        raise _NotConnected(str(error)) from error
    while True:
        left = deadline - loop.time()
        try:
            return (await client.send_request(request, timeout=max(0.1, left)))[0]
        except (ConnectionBroken, Overloaded):
            if left < _RETRY_S:
                raise
            await asyncio.sleep(_RETRY_S)


async def _wait_until_refused(refusals: "asyncio.Queue[str]", addresses: int) -> NotAuthorized:
    """Wait for enough failed handshakes that all addresses were tried."""
    reason = ""
    for _ in range(_MAX_HANDSHAKES - 1 + addresses):
        reason = await refusals.get()
    return NotAuthorized(reason)
