"""Serves this peer's control socket: model files to peers, everything to its own user."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from molink.checkpoint.manifest import CHUNK_BYTES
from molink.wire.messages.admin import (
    AddOwnerRequest,
    ApplyFile,
    ApplyReply,
    DrainRequest,
    InvitationsRequest,
    InviteRequest,
    LoadModel,
    LoadModelReply,
    PairingDecisionRequest,
    Rebalance,
    RevokeRequest,
    ShutdownRequest,
    StatusReply,
    StatusRequest,
    StopServing,
    SwitchModel,
    UnrevokeRequest,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.control_plane import ControlMessage, DoneReply, JoinRedirect, JoinRequest
from molink.wire.messages.election import LeaderReply, LeaderRequest
from molink.wire.messages.membership import INVITATION_PREFIX as INVITATION
from molink.wire.messages.transfer import (
    ManifestChunk,
    ManifestRequest,
    PartsReply,
    PartsRequest,
    ReadReply,
    ReadRequest,
)
from molink.wire.sockets.server import MessageSender
from molinkd.peer.artifacts.model_repository import ModelFiles, ModelRepository

log = logging.getLogger(__name__)

#: Maximum number of cached chunks, enough for a few concurrent transfers.
MAX_CHUNKS = 16


class ChunkCache:
    """LRU cache of verified chunks."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[str, str, int], asyncio.Task[bytes]] = OrderedDict()

    async def read_chunk(self, model_files: ModelFiles, request: ReadRequest) -> bytes:
        """The chunk that ``request`` reads from.

        Raises:
            RequestError: There is no such chunk.
            BrokenModel: The file changed after it was added.
        """
        if not request.length:
            return await asyncio.to_thread(model_files.read_chunk, request.part, request.index)
        key = request.root, request.part, request.index
        task = self._chunks.get(key)
        if task is None:
            reading = asyncio.to_thread(model_files.read_chunk, request.part, request.index)
            task = self._chunks[key] = asyncio.create_task(reading)
            while len(self._chunks) > MAX_CHUNKS:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        try:
            return await asyncio.shield(task)
        except Exception:
            self._chunks.pop(key, None)
            raise


#: Requests of any peer. All others require this peer's own key, which only its user has.
PEER_MESSAGES = (ManifestRequest, PartsRequest, ReadRequest, LeaderRequest)
USER_MESSAGES = (
    StatusRequest,
    ShutdownRequest,
    DrainRequest,
    InviteRequest,
    InvitationsRequest,
    RevokeRequest,
    UnrevokeRequest,
    AddOwnerRequest,
    PairingDecisionRequest,
    StopServing,
    SwitchModel,
    Rebalance,
    LoadModel,
    ApplyFile,
)

#: Sends a message: identity, message, payload.
SendTo = Callable[[bytes, ControlMessage, Buffer | None], object]


@dataclass(frozen=True, slots=True)
class UserCommands:
    """The daemon's commands for the command line. All may raise ``MolinkError``."""

    #: ``molink status --json`` as UTF-8; true adds the effect of one more PC.
    query_status: Callable[[bool], Awaitable[bytes]]
    #: Forward a request to the coordinator; returns reply and payload.
    forward_request: Callable[[ControlMessage], Awaitable[tuple[ControlMessage, bytes]]]
    #: Stop the daemon; true also leaves the swarm. Returns once that is certain.
    shutdown: Callable[[bool], Awaitable[None]]
    #: Drain (true) or resume one device, or all.
    set_drained: Callable[[bool, str], None]
    #: Load a model into the swarm; returns the progress.
    load_model: Callable[[str], Awaitable[LoadModelReply]]
    #: Serve the models of a file; returns the progress, or the changes as the payload.
    apply_file: Callable[[ApplyFile], Awaitable[tuple[LoadModelReply | ApplyReply, bytes]]]


@dataclass(frozen=True, slots=True)
class LeaderQueries:
    """This peer's view of the leader. Both may raise ``MolinkError``."""

    #: Answer a peer's leader query.
    answer_request: Callable[[str, LeaderRequest], LeaderReply]
    #: The coordinator's public key and addresses, and the peer where it runs.
    coordinator_location: Callable[[], tuple[str, tuple[str, ...], str]]


class ControlService:
    """Handles the messages of the control socket."""

    def __init__(
        self, me: str, repository: ModelRepository, commands: UserCommands, leader: LeaderQueries
    ) -> None:
        self._me = me
        self._repository = repository
        self._commands = commands
        self._leader = leader
        self._chunks = ChunkCache()
        self.send: SendTo = lambda *_: None

    def is_permitted(self, user: str, message: ControlMessage) -> bool:
        """Whether ``user`` may send ``message``."""
        if user.startswith(INVITATION):
            return isinstance(message, JoinRequest)
        return isinstance(message, PEER_MESSAGES) or (
            user == self._me and isinstance(message, USER_MESSAGES)
        )

    async def handle_message(
        self, sender: MessageSender, message: ControlMessage, _payload: memoryview | None
    ) -> None:
        """Handle one message; an exception becomes an :class:`ErrorReply`."""
        match message:
            case ManifestRequest():
                self._send_manifest(sender, message)
            case PartsRequest():
                self._send_parts(sender, message)
            case ReadRequest():
                await self._send_chunk(sender, message)
            case LeaderRequest():
                self.send(
                    sender.identity, self._leader.answer_request(sender.peer_id, message), None
                )
            case JoinRequest():
                key, addresses, leader = self._leader.coordinator_location()
                elsewhere = JoinRedirect(
                    ref=message.ref, coordinator_key=key, addresses=addresses, leader=leader
                )
                self.send(sender.identity, elsewhere, None)
            case StatusRequest():
                text = await self._commands.query_status(message.scale_out)
                self._send_status(sender, message.ref, text)
            case LoadModel():
                far = await self._commands.load_model(message.model)
                self.send(sender.identity, _with_ref(far, message.ref), None)
            case ApplyFile():
                answer, text = await self._commands.apply_file(message)
                self.send(
                    sender.identity, _with_ref(answer, message.ref), _payload_of(answer, text)
                )
            case (
                InviteRequest()
                | InvitationsRequest()
                | RevokeRequest()
                | UnrevokeRequest()
                | AddOwnerRequest()
                | PairingDecisionRequest()
                | StopServing()
                | SwitchModel()
                | Rebalance()
            ):
                reply, payload = await self._commands.forward_request(message)
                self.send(sender.identity, _with_ref(reply, message.ref), payload or None)
            case DrainRequest():
                self._commands.set_drained(message.drain, message.device)
                self.send(sender.identity, DoneReply(ref=message.ref), None)
            case ShutdownRequest():
                await self._commands.shutdown(message.leave)
                self.send(sender.identity, DoneReply(ref=message.ref), None)

    def _send_manifest(self, sender: MessageSender, message: ManifestRequest) -> None:
        raw = self._repository.require_model(message.root).manifest.raw
        data = raw[message.offset : message.offset + CHUNK_BYTES]
        payload = Payload("u8", (len(data),))
        reply = ManifestChunk(ref=message.ref, size=len(raw), payload=payload)
        self.send(sender.identity, reply, data)

    def _send_parts(self, sender: MessageSender, message: PartsRequest) -> None:
        model_files = self._repository.require_model(message.root)
        marks = model_files.manifest.encode_bitfield(model_files.ranges)
        reply = PartsReply(ref=message.ref, payload=Payload("u8", (len(marks),)))
        self.send(sender.identity, reply, marks)

    async def _send_chunk(self, sender: MessageSender, message: ReadRequest) -> None:
        chunk = await self._chunks.read_chunk(self._repository.require_model(message.root), message)
        data = chunk[message.offset :][: message.length] if message.length else chunk
        reply = ReadReply(ref=message.ref, payload=Payload("u8", (len(data),)))
        self.send(sender.identity, reply, data)

    def _send_status(self, sender: MessageSender, ref: int, text: bytes) -> None:
        self.send(sender.identity, StatusReply(ref=ref, payload=Payload("u8", (len(text),))), text)


def _payload_of(answer: LoadModelReply | ApplyReply, text: bytes) -> bytes | None:
    return text if isinstance(answer, ApplyReply) else None


def _with_ref(reply: Any, ref: int) -> ControlMessage:
    answer: ControlMessage = msgspec.structs.replace(reply, ref=ref)
    return answer
