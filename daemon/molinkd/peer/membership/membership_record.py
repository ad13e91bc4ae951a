"""Which swarm this peer belongs to: remembered between runs, gained with a join token."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path

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
    UsageError,
    WireError,
)
from molink.swarm.membership.join_token import JoinToken
from molink.swarm.membership.versions import own_version
from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage, JoinRedirect, JoinReply, JoinRequest
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.home import Home

log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 20.0
#: The same for each place that may answer, where a token names several.
_GUIDE_TIMEOUT_S = 6.0
#: From being told that too many join at this moment, or a broken connection, to the next try, in
#: seconds.
_RETRY_S = 1.0
#: Failed handshakes after which a server at a token's address is taken for another one.
_MAX_HANDSHAKES = 4


class MembershipRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm that this peer is a member of. ``addresses`` of its coordinator, ``host:port``."""

    swarm: str
    coordinator_key: str
    addresses: tuple[str, ...]
    #: Whether ``molink up`` has founded it here.
    is_founder: bool = False
    #: The peer that led last, as far as is known (see ``molink.swarm.election.leader_election``),
    #: and its term.
    leader: str = ""
    term: int = 0
    #: What ``molink up`` served last.
    model: str | None = None
    #: Whether this PC was told that it is no member any more.
    is_banned: bool = False
    #: What else was asked for here (``molink apply``): others fetch its files from this PC.
    extra_models: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Remember it."""
        write_secret(path, msgspec.json.encode(self).decode("utf-8"))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """ZeroMQ endpoints of the coordinator."""
        return tuple(f"tcp://{address}" for address in self.addresses)


def read_membership(path: Path) -> MembershipRecord | None:
    """The remembered swarm, if there is one.

    Raises:
        UsageError: the file is there but unreadable.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=MembershipRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} can't be read: {error}. Delete it and join the swarm again."
        ) from None


def parse_token(text: str) -> JoinToken:
    """A pasted token, if it is valid now.

    Raises:
        TokenError: it is malformed or expired; the message says which.
    """
    return JoinToken.parse(text, time.time())


def choose_membership(
    home: Home, record: MembershipRecord | None, text: str | None
) -> MembershipRecord | JoinToken:
    """Return to the swarm that is ``known``, or join one by the token in ``text``.

    A token of the known swarm counts: the coordinator may have forgotten this PC, or have moved.

    Raises:
        TokenError: the token is malformed or expired.
        UsageError: there is neither, or the PC is a member of another swarm.
    """
    token = None if text is None else parse_token(text)
    if record is None and token is None:
        raise UsageError(
            "this PC is in no swarm: paste the token that `molink up` printed, as in "
            f"{home.format_command('join molink-…')}, or run {home.format_command('join')} in a "
            "terminal, which asks "
            "for it"
        )
    if record is not None and token is not None and record.swarm != token.swarm:
        raise UsageError(
            f"this PC is a member of swarm {record.swarm}. Run {home.format_command('leave')} "
            "first, or give "
            "another state folder with --home."
        )
    if record is not None and record.is_founder:
        raise UsageError(f"this PC runs its own swarm: start it with {home.format_command('up')}")
    chosen = token or record
    assert chosen is not None
    return chosen


async def renew_membership(
    context: zmq.asyncio.Context, keys: KeyPair, record: MembershipRecord
) -> MembershipRecord:
    """Ask the swarm that has shut this PC out whether it has taken it back.

    Raises:
        PeerBanned: it has not, or nobody answers there.
    """
    refusals: asyncio.Queue[str] = asyncio.Queue()
    client: Client[ControlMessage] = Client(
        context,
        keys,
        control_codec(),
        record.coordinator_key,
        record.endpoints,
        name="the swarm's coordinator",
        events=ClientEvents(on_refused=refusals.put_nowait),
    )
    client.start()
    try:
        refused = _wait_until_refused(refusals, len(record.addresses))
        await _request(client, StatusRequest(ref=0), refused, _GUIDE_TIMEOUT_S)
    except MolinkError as error:
        raise PeerBanned(str(error)) from error
    finally:
        await client.close()
    return msgspec.structs.replace(record, is_banned=False)


async def join_swarm(
    context: zmq.asyncio.Context, keys: KeyPair, token: JoinToken, name: str
) -> MembershipRecord:
    """Become a member under this peer's own key.

    Raises:
        TokenError: the coordinator doesn't accept the invitation (any more), or is another's.
        PeerBanned: this PC was revoked.
        Unavailable: it can't be reached, or the swarm is full.
        VersionMismatch: this PC's molink and the swarm's don't understand each other.
    """
    targets = [(token.coordinator_key, token.addresses)]
    targets += [(guide.public_key, guide.addresses) for guide in token.contact_points]
    timeout = _JOIN_TIMEOUT_S if len(targets) == 1 else _GUIDE_TIMEOUT_S
    failure: MolinkError | None = None
    speaks = own_version()
    request = JoinRequest(
        ref=0,
        public_key=keys.public,
        name=name,
        version=speaks.version,
        protocol=speaks.protocol,
    )
    for key, addresses in targets:
        try:
            reply = await _join_at(context, token, request, key, addresses, timeout)
            if isinstance(reply, JoinRedirect):
                key, addresses = reply.coordinator_key, reply.addresses
                reply = await _join_at(context, token, request, key, addresses, _JOIN_TIMEOUT_S)
        except PeerBanned:
            raise
        except (TokenError, Unavailable) as error:
            failure = failure or error
            continue
        if not isinstance(reply, JoinReply):
            raise WireError(f"the coordinator answered a join with a {type(reply).__name__}")
        log.info("joined swarm %s", reply.swarm)
        return MembershipRecord(swarm=reply.swarm, coordinator_key=key, addresses=addresses)
    assert failure is not None
    raise failure


async def _join_at(
    context: zmq.asyncio.Context,
    token: JoinToken,
    request: JoinRequest,
    key: str,
    addresses: tuple[str, ...],
    timeout: float,
) -> ControlMessage:
    """What the coordinator, or a member, at these addresses answers within ``timeout`` seconds."""
    refusals: asyncio.Queue[str] = asyncio.Queue()
    client: Client[ControlMessage] = Client(
        context,
        KeyPair.from_secret(token.secret_key),
        control_codec(),
        key,
        tuple(f"tcp://{address}" for address in addresses),
        name="the swarm's coordinator",
        events=ClientEvents(on_refused=refusals.put_nowait),
    )
    client.start()
    try:
        return await _request(
            client, request, _wait_until_refused(refusals, len(addresses)), timeout
        )
    except PeerBanned:
        raise
    except NotAuthorized as error:
        raise TokenError(
            "this join token was ended or has expired, or another swarm runs at "
            f"{', '.join(addresses)}. Ask for a new one, which `molink invite` prints on a "
            "PC of the swarm."
        ) from error
    except (Overloaded, Unavailable) as error:
        raise Unavailable(f"can't join: {error}") from error
    finally:
        await client.close()


async def _request(
    client: Client[ControlMessage],
    request: ControlMessage,
    refused: Coroutine[None, None, NotAuthorized],
    timeout: float,
) -> ControlMessage:
    """The reply; raises what ``refused`` returns, should that come first."""
    asking = asyncio.create_task(_request_with_retry(client, request, timeout))
    refusing = asyncio.create_task(refused)
    try:
        await asyncio.wait((asking, refusing), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise refusing.result()
        return asking.result()
    finally:
        for task in (asking, refusing):
            task.cancel()
        await asyncio.gather(asking, refusing, return_exceptions=True)


async def _request_with_retry(
    client: Client[ControlMessage], request: ControlMessage, timeout: float
) -> ControlMessage:
    """Ask again for a while if too many join at this moment, or the connection breaks.

    A coordinator that shuts a PC out makes all connections anew. What is asked here may be asked
    twice: who is a member already stays one.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        left = deadline - asyncio.get_running_loop().time()
        try:
            return (await client.send_request(request, timeout=max(0.1, left)))[0]
        except (ConnectionBroken, Overloaded):
            if left < _RETRY_S:
                raise
            await asyncio.sleep(_RETRY_S)


async def _wait_until_refused(refusals: "asyncio.Queue[str]", addresses: int) -> NotAuthorized:
    """Wait until handshakes have failed often enough for all addresses to have been tried.

    A coordinator that is just being started may refuse one.
    """
    reason = ""
    for _ in range(_MAX_HANDSHAKES + addresses):
        reason = await refusals.get()
    return NotAuthorized(reason)
