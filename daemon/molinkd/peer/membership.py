"""Which swarm this peer belongs to: remembered between runs, gained with a join token."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path

import msgspec
import zmq.asyncio

import molink
from molink.errors import NotAuthorized, TokenError, Unavailable, UsageError, WireError
from molink.swarm.token import JoinToken
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import ControlMessage, Joined, JoinRequest
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.secrets import write_secret

log = logging.getLogger(__name__)

_JOIN_S = 20.0
#: Failed handshakes after which a server at a token's address is taken for another one.
_HANDSHAKES = 4


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm that this peer is a member of. ``addresses`` of its coordinator, ``host:port``."""

    swarm: str
    coordinator_key: str
    addresses: tuple[str, ...]
    #: Whether the coordinator runs here, under this daemon.
    own: bool = False
    #: What ``molink up`` served last.
    model: str | None = None

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


def choose(known: Membership | None, text: str | None) -> Membership | JoinToken:
    """Return to the swarm that is ``known``, or join one by the token in ``text``.

    Raises:
        TokenError: the token is malformed or expired.
        UsageError: there is neither, or the PC is a member of another swarm.
    """
    if text is not None:
        token = parse_token(text)
        if known is None:
            return token
        if known.coordinator_key == token.coordinator_key:
            return msgspec.structs.replace(known, addresses=token.addresses)
        raise UsageError(
            f"this PC is a member of swarm {known.swarm}. Run `molink leave` first, or give "
            "another state folder with --home."
        )
    if known is None:
        raise UsageError(
            "this PC is in no swarm: paste the token that `molink up` printed, as in "
            "`molink join molink-…`"
        )
    if known.own:
        raise UsageError("this PC runs its own swarm: start it with `molink up`")
    return known


async def join(
    context: zmq.asyncio.Context, keys: KeyPair, token: JoinToken, name: str
) -> Membership:
    """Become a member under this peer's own key.

    Raises:
        TokenError: the coordinator doesn't accept the invitation (any more), or is another's.
        Unavailable: it can't be reached.
    """
    membership = Membership(
        swarm=token.swarm, coordinator_key=token.coordinator_key, addresses=token.addresses
    )
    refusals: asyncio.Queue[str] = asyncio.Queue()
    client: Client[ControlMessage] = Client(
        context,
        KeyPair.from_secret(token.secret_key),
        control_codec(),
        token.coordinator_key,
        membership.endpoints,
        name="the swarm's coordinator",
        events=ClientEvents(on_refused=refusals.put_nowait),
    )
    client.start()
    request = JoinRequest(ref=0, public_key=keys.public, name=name, version=molink.__version__)
    try:
        reply = await _ask(client, request, _refused(refusals, len(token.addresses)))
    except NotAuthorized as error:
        raise TokenError(
            "this join token was withdrawn, has expired, or is of another swarm than runs at "
            f"{', '.join(token.addresses)}. Ask for a new one (`molink invite`)."
        ) from error
    except Unavailable as error:
        raise Unavailable(f"can't join: {error}") from error
    finally:
        await client.close()
    if not isinstance(reply, Joined):
        raise WireError(f"the coordinator answered a join with a {type(reply).__name__}")
    log.info("joined swarm %s", reply.swarm)
    return msgspec.structs.replace(membership, swarm=reply.swarm)


async def _ask(
    client: Client[ControlMessage],
    request: JoinRequest,
    refused: Coroutine[None, None, NotAuthorized],
) -> ControlMessage:
    """The reply; raises what ``refused`` returns, should that come first."""
    asking = asyncio.create_task(client.request(request, timeout=_JOIN_S))
    refusing = asyncio.create_task(refused)
    try:
        await asyncio.wait((asking, refusing), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise refusing.result()
        return asking.result()[0]
    finally:
        for task in (asking, refusing):
            task.cancel()
        await asyncio.gather(asking, refusing, return_exceptions=True)


async def _refused(refusals: "asyncio.Queue[str]", addresses: int) -> NotAuthorized:
    """Wait until handshakes have failed often enough for all addresses to have been tried.

    A coordinator that is just being started may refuse one.
    """
    reason = ""
    for _ in range(_HANDSHAKES + addresses):
        reason = await refusals.get()
    return NotAuthorized(reason)
