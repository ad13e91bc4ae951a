"""What this peer's control socket answers: model files to members, everything to its own user."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from molink.checkpoint.manifest import CHUNK_BYTES
from molink.swarm.membership.invitations import PREFIX as INVITATION
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.control import ControlMessage, Done
from molink.wire.messages.joining import Elsewhere, JoinRequest
from molink.wire.messages.leading import LeaderReply, LeaderRequest
from molink.wire.messages.requests import (
    Applied,
    ApplyFile,
    Bringing,
    BringModel,
    DrainRequest,
    InvitationsRequest,
    InviteRequest,
    JudgeRequest,
    Rebalance,
    RevokeRequest,
    ShutdownRequest,
    StatusReply,
    StatusRequest,
    StopServing,
    SwitchModel,
    UnrevokeRequest,
)
from molink.wire.messages.transfer import (
    ManifestPart,
    ManifestRequest,
    PartsHeld,
    PartsRequest,
    ReadReply,
    ReadRequest,
)
from molink.wire.sockets.server import Sender
from molinkd.peer.artifacts.chunks import Chunks
from molinkd.peer.artifacts.library import Library

log = logging.getLogger(__name__)

#: What any member may send; the rest is for the user of this PC, who holds this peer's own key.
FOR_MEMBERS = (ManifestRequest, PartsRequest, ReadRequest, LeaderRequest)
FOR_USER = (
    StatusRequest,
    ShutdownRequest,
    DrainRequest,
    InviteRequest,
    InvitationsRequest,
    RevokeRequest,
    UnrevokeRequest,
    JudgeRequest,
    StopServing,
    SwitchModel,
    Rebalance,
    BringModel,
    ApplyFile,
)

#: Sends on a connection: identity, message, payload.
SendTo = Callable[[bytes, ControlMessage, Buffer | None], object]


@dataclass(frozen=True, slots=True)
class UserCommands:
    """What the command line may ask of its daemon. All may raise ``MolinkError``."""

    #: ``molink status --json`` as UTF-8, with what a PC more would bring if true.
    status: Callable[[bool], Awaitable[bytes]]
    #: Ask the coordinator: its reply, with the payload.
    relay: Callable[[ControlMessage], Awaitable[tuple[ControlMessage, bytes]]]
    #: Stop, and leave the swarm for good if true. Returns once that is certain.
    shutdown: Callable[[bool], Awaitable[None]]
    #: Hold no layers for now if true, or do so again; on that device, or on all.
    drain: Callable[[bool, str], None]
    #: Have the swarm serve a model: how far that is.
    bring: Callable[[str], Awaitable[Bringing]]
    #: Have the swarm serve what a file names: how far that is, or what it changes as the payload.
    apply: Callable[[ApplyFile], Awaitable[tuple[Bringing | Applied, bytes]]]


@dataclass(frozen=True, slots=True)
class AboutLeader:
    """What this peer says of the coordinator. Both may raise ``MolinkError``."""

    #: Whom it follows; the peer that asks, and its question.
    answer: Callable[[str, LeaderRequest], LeaderReply]
    #: The coordinator's key and addresses.
    where: Callable[[], tuple[str, tuple[str, ...]]]


class Service:
    """Handles messages of the control socket."""

    def __init__(
        self, me: str, library: Library, commands: UserCommands, leader: AboutLeader
    ) -> None:
        self._me = me
        self._library = library
        self._commands = commands
        self._leader = leader
        self._chunks = Chunks()
        self.send: SendTo = lambda *_: None

    def permits(self, user: str, message: ControlMessage) -> bool:
        """Whether ``user`` may send ``message``."""
        if user.startswith(INVITATION):
            return isinstance(message, JoinRequest)
        return isinstance(message, FOR_MEMBERS) or (
            user == self._me and isinstance(message, FOR_USER)
        )

    async def handle(
        self, sender: Sender, message: ControlMessage, _payload: memoryview | None
    ) -> None:
        """Answer one message; what is raised becomes a :class:`Failure`."""
        match message:
            case ManifestRequest():
                self._manifest(sender, message)
            case PartsRequest():
                self._parts(sender, message)
            case ReadRequest():
                await self._read(sender, message)
            case LeaderRequest():
                self.send(sender.identity, self._leader.answer(sender.user_id, message), None)
            case JoinRequest():
                key, addresses = self._leader.where()
                elsewhere = Elsewhere(ref=message.ref, coordinator_key=key, addresses=addresses)
                self.send(sender.identity, elsewhere, None)
            case StatusRequest():
                text = await self._commands.status(message.outlook)
                self._reply_status(sender, message.ref, text)
            case BringModel():
                far = await self._commands.bring(message.model)
                self.send(sender.identity, _with_ref(far, message.ref), None)
            case ApplyFile():
                answer, text = await self._commands.apply(message)
                self.send(sender.identity, _with_ref(answer, message.ref), _of(answer, text))
            case (
                InviteRequest()
                | InvitationsRequest()
                | RevokeRequest()
                | UnrevokeRequest()
                | JudgeRequest()
                | StopServing()
                | SwitchModel()
                | Rebalance()
            ):
                reply, payload = await self._commands.relay(message)
                self.send(sender.identity, _with_ref(reply, message.ref), payload or None)
            case DrainRequest():
                self._commands.drain(message.drain, message.device)
                self.send(sender.identity, Done(ref=message.ref), None)
            case ShutdownRequest():
                await self._commands.shutdown(message.leave)
                self.send(sender.identity, Done(ref=message.ref), None)

    def _manifest(self, sender: Sender, message: ManifestRequest) -> None:
        raw = self._library.held(message.root).manifest.raw
        data = raw[message.offset : message.offset + CHUNK_BYTES]
        payload = Payload("u8", (len(data),))
        reply = ManifestPart(ref=message.ref, size=len(raw), payload=payload)
        self.send(sender.identity, reply, data)

    def _parts(self, sender: Sender, message: PartsRequest) -> None:
        holding = self._library.held(message.root)
        marks = holding.manifest.marks(holding.places)
        reply = PartsHeld(ref=message.ref, payload=Payload("u8", (len(marks),)))
        self.send(sender.identity, reply, marks)

    async def _read(self, sender: Sender, message: ReadRequest) -> None:
        chunk = await self._chunks.get(self._library.held(message.root), message)
        data = chunk[message.begin :][: message.length] if message.length else chunk
        reply = ReadReply(ref=message.ref, payload=Payload("u8", (len(data),)))
        self.send(sender.identity, reply, data)

    def _reply_status(self, sender: Sender, ref: int, text: bytes) -> None:
        self.send(sender.identity, StatusReply(ref=ref, payload=Payload("u8", (len(text),))), text)


def _of(answer: Bringing | Applied, text: bytes) -> bytes | None:
    """The payload of an answer, if it has one."""
    return text if isinstance(answer, Applied) else None


def _with_ref(reply: Any, ref: int) -> ControlMessage:
    answer: ControlMessage = msgspec.structs.replace(reply, ref=ref)
    return answer
