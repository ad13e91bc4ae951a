"""Which swarm this peer belongs to: remembered between runs, gained with a join token."""

import logging
import time
from pathlib import Path

import msgspec
import zmq.asyncio

import molink
from molink.errors import NotAuthorized, TokenError, Unavailable, UsageError, WireError
from molink.swarm.token import JoinToken
from molink.wire.client import Client
from molink.wire.codec import control_codec
from molink.wire.control import ControlMessage, Joined, JoinRequest
from molink.wire.keys import KeyPair
from molink.wire.secrets import write_secret

log = logging.getLogger(__name__)

_JOIN_S = 20.0


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


async def join(
    context: zmq.asyncio.Context, keys: KeyPair, token: JoinToken, name: str
) -> Membership:
    """Become a member under this peer's own key.

    Raises:
        TokenError: the coordinator doesn't accept the invitation (any more), or is another's.
        Unavailable: it can't be reached.
    """
    membership = Membership(
        swarm=token.swarm,
        coordinator_key=token.coordinator_key,
        addresses=token.addresses,
    )
    client: Client[ControlMessage] = Client(
        context,
        KeyPair.from_secret(token.secret_key),
        control_codec(),
        token.coordinator_key,
        membership.endpoints,
        name="the swarm's coordinator",
    )
    client.start()
    request = JoinRequest(ref=0, public_key=keys.public, name=name, version=molink.__version__)
    try:
        reply, _ = await client.request(request, timeout=_JOIN_S)
    except NotAuthorized as error:
        raise TokenError(
            "this join token was withdrawn, has expired, or is of another swarm than runs at "
            f"{', '.join(token.addresses)}. Ask for a new one (`molink invite`)."
        ) from error
    except Unavailable as error:
        raise _explain(error, token) from error
    finally:
        await client.close()
    if not isinstance(reply, Joined):
        raise WireError(f"the coordinator answered a join with a {type(reply).__name__}")
    log.info("joined swarm %s", reply.swarm)
    return msgspec.structs.replace(membership, swarm=reply.swarm)


def _explain(error: Unavailable, token: JoinToken) -> TokenError | Unavailable:
    if "holds another key" in str(error):
        return TokenError(
            f"what runs at {', '.join(token.addresses)} is not the swarm of this join token: the "
            "token is of another swarm"
        )
    return Unavailable(f"can't join: {error}")
