"""Joins a swarm without a token: a person at the swarm compares and approves a code."""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import molink
from molink.errors import (
    PairingRefused,
    PairingUnanswered,
    PeerBanned,
    Unavailable,
    UsageError,
    VersionMismatch,
    WireError,
)
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.discovery import PAIRING_PORT, DiscoveredSwarm, is_swarm_id
from molink.swarm.membership.pairing import DECISION_TIMEOUT_S, PairingInitiator
from molink.swarm.membership.sanitize import sanitize_name
from molink.swarm.membership.versions import PeerVersion, explain_mismatch, own_version
from molink.wire.messages.base import Message
from molink.wire.messages.pairing import (
    LENGTH_BYTES,
    MAX_FRAME,
    Challenge,
    PairingResult,
    decode_frame,
    encode_frame,
    parse_frame_length,
)
from molink.wire.sockets.key_pair import KeyPair, is_public_key
from molinkd.peer.membership.membership_record import MembershipRecord

#: Connect timeout per address and reply timeout, in seconds.
_CONNECT_S, _ANSWER_S = 4.0, 10.0
#: Timeout of the approval in seconds, a little above the swarm's own.
_WAIT_S = DECISION_TIMEOUT_S + 15.0
_MAX_NUM_ADDRESSES = 8
_HOST_PORT = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,58}:[0-9]{1,5}\Z")


@dataclass(frozen=True, slots=True)
class PairingCode:
    """The code to compare, with the swarm's id and its claimed name."""

    swarm: str
    name: str
    code: str


async def request_pairing(
    nearby: DiscoveredSwarm,
    keys: KeyPair,
    name: str,
    show: Callable[[PairingCode], None],
    timeout: float = _WAIT_S,
    *,
    join: str = "`molink join`",
) -> MembershipRecord:
    """Request pairing, show the code, and wait for approval.

    The result is only the swarm's claim until the same code was seen there. ``join`` is the command
    to retry with, for error messages.

    Raises:
        Unavailable: No reply, or the swarm is full.
        PairingRefused: The request was refused.
        PairingUnanswered: The request expired.
        PeerBanned: This PC was removed from the swarm.
        UsageError: Another PC uses the same key.
        VersionMismatch: The molink versions are incompatible.
        WireError: The reply is not from a swarm, or not from the announced one.
    """
    reader, writer, address = await _connect(nearby)
    try:
        initiator = PairingInitiator(
            keys.signer.verify_key, name, molink.__version__, secrets.token_bytes(32)
        )
        challenge = await _request_challenge(reader, writer, initiator.commitment, join)
        if not _matches_announcement(challenge, nearby):
            raise WireError(
                f"the program at {address} is not the announced swarm: another program "
                "or PC impersonates it. Join with a token (from `molink invite`)"
            )
        reveal, code = initiator.answer_challenge(challenge)
        writer.write(encode_frame(reveal))
        show(PairingCode(challenge.swarm, sanitize_name(challenge.name, challenge.swarm), code))
        verdict = await _await_result(reader, timeout, join)
        _raise_unless_admitted(verdict, derive_peer_id(keys.public), join)
        return _membership_record(challenge, verdict, address)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _connect(
    nearby: DiscoveredSwarm,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    failure = ""
    for address in nearby.addresses:
        opening = asyncio.open_connection(address, nearby.port, limit=2 * MAX_FRAME)
        try:
            return *(await asyncio.wait_for(opening, _CONNECT_S)), address
        except TimeoutError:
            failure = "it doesn't answer"
        except ConnectionRefusedError:
            failure = "it refuses the connection"
        except (OSError, UnicodeError) as error:
            failure = str(error)
    where = " or ".join(nearby.addresses)
    raise Unavailable(
        f"can't reach the swarm at {where} port {nearby.port}: {failure}. Does `molink up` run "
        "there, with `discovery` on, and does its firewall let TCP ports 5466 to 5479 in?"
    )


async def _request_challenge(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Message, join: str
) -> Challenge:
    writer.write(encode_frame(message))
    try:
        answer: Challenge | PairingResult = await asyncio.wait_for(
            _read_message(reader, Challenge | PairingResult), _ANSWER_S
        )
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        raise Unavailable(
            "the connection was closed: too many PCs are joining, or no swarm is "
            "there. Try again in a minute, or join with a token"
        ) from None
    except WireError as error:
        raise WireError(
            f"something other than molink answers there ({error}). The port is {PAIRING_PORT} "
            "unless `pairing_port` is set on the PC that runs the swarm"
        ) from None
    if isinstance(answer, PairingResult):
        _raise_unless_admitted(answer, "", join)
        raise WireError("the swarm admitted this PC before any request")
    return answer


async def _await_result(reader: asyncio.StreamReader, timeout: float, join: str) -> PairingResult:
    try:
        verdict: PairingResult = await asyncio.wait_for(
            _read_message(reader, PairingResult), timeout
        )
    except TimeoutError:
        return PairingResult(outcome="expired")
    except (OSError, asyncio.IncompleteReadError):
        raise Unavailable(
            f"the connection to the swarm was lost before approval: run {join} again"
        ) from None
    return verdict


async def _read_message(reader: asyncio.StreamReader, types: Any) -> Any:
    length = parse_frame_length(await reader.readexactly(LENGTH_BYTES))
    return decode_frame(await reader.readexactly(length), types)


def _matches_announcement(challenge: Challenge, nearby: DiscoveredSwarm) -> bool:
    return (
        is_swarm_id(challenge.swarm)
        and is_public_key(challenge.public_key)
        and nearby.swarm in ("", challenge.swarm)
        and nearby.public_key in ("", challenge.public_key)
    )


def _raise_unless_admitted(verdict: PairingResult, me: str, join: str) -> None:
    """Raise the error that the result stands for, unless it is admission."""
    match verdict.outcome:
        case "admitted":
            return
        case "refused":
            raise PairingRefused("the swarm refused this PC")
        case "expired":
            raise PairingUnanswered(
                f"the request expired: run {join} again, and `molink approve` on "
                "a PC of the swarm while this one waits"
            )
        case "busy":
            raise Unavailable("too many PCs are joining: try again in a minute")
        case "full":
            raise Unavailable(
                "the swarm is full: remove a PC with `molink revoke`, or start it "
                "with a higher `max_peers`"
            )
        case "revoked":
            raise PeerBanned(
                f"this PC was removed from the swarm. `molink un-revoke {me}` on the PC that runs "
                "it readmits this PC"
            )
        case "version":
            raise VersionMismatch(
                explain_mismatch(own_version(), PeerVersion(verdict.version, verdict.protocol))
            )
        case "duplicate":
            raise UsageError(
                "a running PC in the swarm has the same key: this state folder is a copy "
                "of that PC's, or molink runs on this PC already. Delete peer.key in the state "
                f"folder for a new identity, then run {join} again"
            )


def _membership_record(
    challenge: Challenge, verdict: PairingResult, address: str
) -> MembershipRecord:
    """The membership; the coordinator's first address is that of the pairing port."""
    host = f"[{address}]" if ":" in address else address
    first = (f"{host}:{verdict.port}",) if verdict.port else ()
    others = filter(_HOST_PORT.match, verdict.addresses)
    addresses = tuple(dict.fromkeys((*first, *others)))[:_MAX_NUM_ADDRESSES]
    if not addresses:
        raise WireError("the swarm sent no address")
    return MembershipRecord(
        swarm=challenge.swarm, coordinator_key=challenge.public_key, addresses=addresses
    )
