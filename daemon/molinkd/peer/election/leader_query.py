"""Asks another PC's daemon which leader it follows."""

import asyncio
import logging

import zmq.asyncio

from molink.errors import MolinkError, WireError
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.election import LeaderReply, LeaderRequest, LeaderView
from molink.wire.messages.instructions import PeerInfo
from molink.wire.sockets.client import Client, is_refused
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.key_pair import KeyPair

log = logging.getLogger(__name__)

#: Reply timeout, in seconds.
REPLY_TIMEOUT_S = 1.0


async def query_leader(
    context: zmq.asyncio.Context, keys: KeyPair, info: PeerInfo, request: LeaderRequest
) -> LeaderView | None:
    """The first reply from any of the peer's addresses; ``None`` without one."""
    found = endpoints(info.addresses, info.control_port)
    asking = [
        asyncio.ensure_future(_query_address(context, keys, info, one, request)) for one in found
    ]
    answer: LeaderView | None = None
    try:
        for done in asyncio.as_completed(asking):
            answer = await done
            if answer is not None:
                break
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return answer


async def _query_address(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    info: PeerInfo,
    address: str,
    request: LeaderRequest,
) -> LeaderView | None:
    """The reply from one address; ``None`` without one."""
    client: Client[ControlMessage] = Client(
        context, keys, control_codec(), info.public_key, (address,), name=info.name
    )
    try:
        client.start()
        asking = asyncio.ensure_future(client.send_request(request, timeout=REPLY_TIMEOUT_S))
        refusing = asyncio.ensure_future(is_refused(address))
        try:
            await asyncio.wait((asking, refusing), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and refusing.result():
                return None  # refused: no need to wait
            reply, _ = await asking
        finally:
            for task in (asking, refusing):
                task.cancel()
            await asyncio.gather(asking, refusing, return_exceptions=True)
        if not isinstance(reply, LeaderReply):
            raise WireError(f"unexpected reply {type(reply).__name__} instead of a leader")
    except MolinkError as error:
        log.debug("%s at %s: %s", info.name, address, error)
        return None
    else:
        return reply.view
    finally:
        await client.close()
