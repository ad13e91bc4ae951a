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
    ShutOut,
    TokenError,
    Unavailable,
    UsageError,
    WireError,
)
from molink.swarm.membership.token import JoinToken
from molink.swarm.membership.versions import ours
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.joining import Elsewhere, Joined, JoinRequest
from molink.wire.messages.requests import StatusRequest
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.home import Home

log = logging.getLogger(__name__)

_JOIN_S = 20.0
#: The same for each place that may answer, where a token names several.
_GUIDE_S = 6.0
#: From being told that too many join at this moment, or a broken connection, to the next try, in
#: seconds.
_AGAIN_S = 1.0
#: Failed handshakes after which a server at a token's address is taken for another one.
_HANDSHAKES = 4


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm that this peer is a member of. ``addresses`` of its coordinator, ``host:port``."""

    swarm: str
    coordinator_key: str
    addresses: tuple[str, ...]
    #: Whether ``molink up`` has founded it here.
    own: bool = False
    #: The peer that led last, as far as is known (see ``molink.swarm.election.succession``), and
    #: its term.
    leader: str = ""
    term: int = 0
    #: What ``molink up`` served last.
    model: str | None = None
    #: Whether this PC was told that it is no member any more.
    shut_out: bool = False
    #: What else was asked for here (``molink apply``): others fetch its files from this PC.
    brought: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Remember it."""
        write_secret(path, msgspec.json.encode(self).decode("utf-8"))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """ZeroMQ endpoints of the coordinator."""
        return tuple(f"tcp://{address}" for address in self.addresses)


def read_membership(path: Path) -> Membership | None:
    """The remembered swarm, if there is one.

    Raises:
        UsageError: the file is there but unreadable.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Membership)
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


def choose(home: Home, known: Membership | None, text: str | None) -> Membership | JoinToken:
    """Return to the swarm that is ``known``, or join one by the token in ``text``.

    A token of the known swarm counts: the coordinator may have forgotten this PC, or have moved.

    Raises:
        TokenError: the token is malformed or expired.
        UsageError: there is neither, or the PC is a member of another swarm.
    """
    token = None if text is None else parse_token(text)
    if known is None and token is None:
        raise UsageError(
            "this PC is in no swarm: paste the token that `molink up` printed, as in "
            f"{home.typed('join molink-…')}, or run {home.typed('join')} in a terminal, which asks "
            "for it"
        )
    if known is not None and token is not None and known.swarm != token.swarm:
        raise UsageError(
            f"this PC is a member of swarm {known.swarm}. Run {home.typed('leave')} first, or give "
            "another state folder with --home."
        )
    if known is not None and known.own:
        raise UsageError(f"this PC runs its own swarm: start it with {home.typed('up')}")
    chosen = token or known
    assert chosen is not None
    return chosen


async def ask_again(context: zmq.asyncio.Context, keys: KeyPair, known: Membership) -> Membership:
    """Ask the swarm that has shut this PC out whether it has taken it back.

    Raises:
        ShutOut: it has not, or nobody answers there.
    """
    refusals: asyncio.Queue[str] = asyncio.Queue()
    client: Client[ControlMessage] = Client(
        context,
        keys,
        control_codec(),
        known.coordinator_key,
        known.endpoints,
        name="the swarm's coordinator",
        events=ClientEvents(on_refused=refusals.put_nowait),
    )
    client.start()
    try:
        refused = _refused(refusals, len(known.addresses))
        await _ask(client, StatusRequest(ref=0), refused, _GUIDE_S)
    except MolinkError as error:
        raise ShutOut(str(error)) from error
    finally:
        await client.close()
    return msgspec.structs.replace(known, shut_out=False)


async def join(
    context: zmq.asyncio.Context, keys: KeyPair, token: JoinToken, name: str
) -> Membership:
    """Become a member under this peer's own key.

    Raises:
        TokenError: the coordinator doesn't accept the invitation (any more), or is another's.
        ShutOut: this PC was revoked.
        Unavailable: it can't be reached, or the swarm is full.
        VersionMismatch: this PC's molink and the swarm's don't understand each other.
    """
    targets = [(token.coordinator_key, token.addresses)]
    targets += [(guide.public_key, guide.addresses) for guide in token.guides]
    patience = _JOIN_S if len(targets) == 1 else _GUIDE_S
    failure: MolinkError | None = None
    speaks = ours()
    request = JoinRequest(
        ref=0,
        public_key=keys.public,
        name=name,
        version=speaks.version,
        protocol=speaks.protocol,
    )
    for key, addresses in targets:
        try:
            reply = await _join_at(context, token, request, key, addresses, patience)
            if isinstance(reply, Elsewhere):
                key, addresses = reply.coordinator_key, reply.addresses
                reply = await _join_at(context, token, request, key, addresses, _JOIN_S)
        except ShutOut:
            raise
        except (TokenError, Unavailable) as error:
            failure = failure or error
            continue
        if not isinstance(reply, Joined):
            raise WireError(f"the coordinator answered a join with a {type(reply).__name__}")
        log.info("joined swarm %s", reply.swarm)
        return Membership(swarm=reply.swarm, coordinator_key=key, addresses=addresses)
    assert failure is not None
    raise failure


async def _join_at(
    context: zmq.asyncio.Context,
    token: JoinToken,
    request: JoinRequest,
    key: str,
    addresses: tuple[str, ...],
    patience: float,
) -> ControlMessage:
    """What the coordinator, or a member, at these addresses answers within ``patience`` seconds."""
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
        return await _ask(client, request, _refused(refusals, len(addresses)), patience)
    except ShutOut:
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


async def _ask(
    client: Client[ControlMessage],
    request: ControlMessage,
    refused: Coroutine[None, None, NotAuthorized],
    patience: float,
) -> ControlMessage:
    """The reply; raises what ``refused`` returns, should that come first."""
    asking = asyncio.create_task(_request_again(client, request, patience))
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


async def _request_again(
    client: Client[ControlMessage], request: ControlMessage, patience: float
) -> ControlMessage:
    """Ask again for a while if too many join at this moment, or the connection breaks.

    A coordinator that shuts a PC out makes all connections anew. What is asked here may be asked
    twice: who is a member already stays one.
    """
    deadline = asyncio.get_running_loop().time() + patience
    while True:
        left = deadline - asyncio.get_running_loop().time()
        try:
            return (await client.request(request, timeout=max(0.1, left)))[0]
        except (ConnectionBroken, Overloaded):
            if left < _AGAIN_S:
                raise
            await asyncio.sleep(_AGAIN_S)


async def _refused(refusals: "asyncio.Queue[str]", addresses: int) -> NotAuthorized:
    """Wait until handshakes have failed often enough for all addresses to have been tried.

    A coordinator that is just being started may refuse one.
    """
    reason = ""
    for _ in range(_HANDSHAKES + addresses):
        reason = await refusals.get()
    return NotAuthorized(reason)
