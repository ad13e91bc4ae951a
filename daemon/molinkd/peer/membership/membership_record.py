"""The swarm that this PC belongs to: stored on disk, obtained with a join token."""

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
from molink.facts.model import AdapterFolders
from molink.swarm.membership.join_token import JoinToken
from molink.swarm.membership.versions import own_version
from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage, JoinRedirect, JoinReply, JoinRequest
from molink.wire.messages.membership import JoinEntry, sign_entry
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.home import Home
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 20.0
#: Timeout per contact point if a token has several, in seconds.
_GUIDE_TIMEOUT_S = 6.0
#: Retry interval after an overload or a broken connection, in seconds.
_RETRY_S = 1.0
#: Failed handshakes after which the server is considered a different one.
_MAX_HANDSHAKES = 4


class MembershipRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm of this PC, with its coordinator's ``addresses`` (``host:port``)."""

    swarm: str
    coordinator_key: str
    addresses: tuple[str, ...]
    #: Whether ``molink up`` founded the swarm on this PC.
    is_founder: bool = False
    #: Last known leader and its term (see :mod:`molink.swarm.election.leader_election`).
    leader: str = ""
    term: int = 0
    #: Model that ``molink up`` served last.
    model: str | None = None
    #: Whether this PC was removed from the swarm.
    is_banned: bool = False
    #: Further models of ``molink apply`` on this PC, which other PCs fetch from here.
    extra_models: tuple[str, ...] = ()
    #: Adapters of models of ``molink apply``.
    adapters: dict[str, AdapterFolders] = {}

    def save(self, path: Path) -> None:
        """Write the record to ``path``."""
        write_secret(path, msgspec.json.encode(self).decode("utf-8"))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """ZeroMQ endpoints of the coordinator."""
        return tuple(f"tcp://{address}" for address in self.addresses)


def read_membership(path: Path) -> MembershipRecord | None:
    """The stored record; ``None`` without one.

    Raises:
        UsageError: The file can't be read.
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
    """A valid join token.

    Raises:
        TokenError: It is malformed or expired.
    """
    return JoinToken.parse(text, time.time())


def choose_membership(
    home: Home, record: MembershipRecord | None, text: str | None
) -> MembershipRecord | JoinToken:
    """The stored membership, or the token in ``text`` to join with.

    A token of the same swarm takes precedence, since the coordinator may have lost this PC or
    moved.

    Raises:
        TokenError: The token is malformed or expired.
        UsageError: There is neither, or this PC belongs to another swarm.
    """
    token = None if text is None else parse_token(text)
    if record is None and token is None:
        raise UsageError(
            "this PC is in no swarm: paste a token of `molink invite`, as in "
            f"{home.format_command('join molink-…')}, or run {home.format_command('join')} in a "
            "terminal, which asks "
            "for it"
        )
    is_elsewhere = record is not None and token is not None and record.swarm != token.swarm
    if record is not None and (record.is_founder or is_elsewhere):
        raise UsageError(explain_membership(home, record))
    chosen = token or record
    assert chosen is not None
    return chosen


def explain_membership(home: Home, record: MembershipRecord) -> str:
    """Say which swarm this PC belongs to, how to start it, and how to join another one."""
    own = record.is_founder
    what = "has its own swarm" if own else f"is a member of swarm {record.swarm}"
    return (
        f"this PC {what}: {home.format_command('up' if own else 'join')} starts it. To join "
        f"another swarm, run {home.format_command('leave')} first, or use another state folder "
        "with --home"
    )


async def renew_membership(
    context: zmq.asyncio.Context, keys: KeyPair, record: MembershipRecord
) -> MembershipRecord:
    """Ask the swarm that banned this PC whether the ban was lifted.

    Raises:
        PeerBanned: It was not, or the swarm does not reply.
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
    """Join the swarm under this peer's own key.

    Raises:
        TokenError: The coordinator rejects the invitation, or belongs to another swarm.
        PeerBanned: This PC was removed from the swarm.
        Unavailable: The coordinator is unreachable, or the swarm is full.
        VersionMismatch: The molink versions are incompatible.
    """
    targets = [(token.coordinator_key, token.addresses)]
    targets += [(guide.public_key, guide.addresses) for guide in token.contact_points]
    timeout = _JOIN_TIMEOUT_S if len(targets) == 1 else _GUIDE_TIMEOUT_S
    failure: MolinkError | None = None
    speaks, invited = own_version(), KeyPair.from_seed(token.secret_key).signer
    entry = JoinEntry(invited.verify_key, keys.signer.verify_key, name[:64], time.time())
    request = JoinRequest(
        ref=0,
        public_key=keys.public,
        name=name,
        version=speaks.version,
        protocol=speaks.protocol,
        entry=sign_entry(token.swarm, invited, entry),
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
            raise WireError(f"unexpected reply {type(reply).__name__} to a join request")
        if reply.swarm != token.swarm:
            raise WireError(f"swarm {reply.swarm} replied to a token of swarm {token.swarm}")
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
    """Reply of the coordinator, or of a contact point, at these addresses."""
    refusals: asyncio.Queue[str] = asyncio.Queue()
    client: Client[ControlMessage] = Client(
        context,
        KeyPair.from_seed(token.secret_key),
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
            "this join token was revoked or has expired, or another swarm runs at "
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
    """Wait for enough failed handshakes that all addresses were tried.

    A starting coordinator may refuse a few.
    """
    reason = ""
    for _ in range(_MAX_HANDSHAKES + addresses):
        reason = await refusals.get()
    return NotAuthorized(reason)
