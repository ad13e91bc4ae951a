"""What this peer's control socket answers: model files to members, everything to its own user."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.control import (
    ControlMessage,
    Done,
    Invite,
    InviteRequest,
    RevokeRequest,
    ShutdownRequest,
    StatusReply,
    StatusRequest,
)
from molink.wire.messages.transfer import FileEntry, FileList, FilesRequest, ReadReply, ReadRequest
from molink.wire.sockets.server import Sender
from molinkd.peer.library import Library

log = logging.getLogger(__name__)

#: Entries per message: with the longest names they stay under the header's 4 KiB.
FILES_PER_MESSAGE = 12
#: What any member may send; the rest is for the user of this PC, who holds this peer's own key.
FOR_MEMBERS = (FilesRequest, ReadRequest)
FOR_USER = (StatusRequest, InviteRequest, RevokeRequest, ShutdownRequest)

#: Sends on a connection: identity, message, payload.
SendTo = Callable[[bytes, ControlMessage, Buffer | None], object]


@dataclass(frozen=True, slots=True)
class UserCommands:
    """What the command line may ask of its daemon. All may raise ``MolinkError``."""

    #: ``molink status --json`` as UTF-8.
    status: Callable[[], Awaitable[bytes]]
    #: A new join token, valid for so many seconds.
    invite: Callable[[float], Awaitable[str]]
    #: Shut out the peer of that id, or end an invitation.
    revoke: Callable[[str], Awaitable[None]]
    #: Stop, and leave the swarm for good if true. Returns once that is certain.
    shutdown: Callable[[bool], Awaitable[None]]


class Service:
    """Handles messages of the control socket."""

    def __init__(self, me: str, library: Library, commands: UserCommands) -> None:
        self._me = me
        self._library = library
        self._commands = commands
        self.send: SendTo = lambda *_: None

    def permits(self, user: str, message: ControlMessage) -> bool:
        """Whether ``user`` may send ``message``."""
        return isinstance(message, FOR_MEMBERS) or (
            user == self._me and isinstance(message, FOR_USER)
        )

    async def handle(
        self, sender: Sender, message: ControlMessage, _payload: memoryview | None
    ) -> None:
        """Answer one message; what is raised becomes a :class:`Failure`."""
        match message:
            case FilesRequest():
                for part in file_lists(message.ref, self._library.files(message.model)):
                    self.send(sender.identity, part, None)
            case ReadRequest():
                await self._read(sender, message)
            case StatusRequest():
                self._reply_status(sender, message.ref, await self._commands.status())
            case InviteRequest():
                token = await self._commands.invite(message.ttl)
                self.send(sender.identity, Invite(ref=message.ref, token=token), None)
            case RevokeRequest():
                await self._commands.revoke(message.target)
                self.send(sender.identity, Done(ref=message.ref), None)
            case ShutdownRequest():
                await self._commands.shutdown(message.leave)
                self.send(sender.identity, Done(ref=message.ref), None)

    async def _read(self, sender: Sender, message: ReadRequest) -> None:
        data = await asyncio.to_thread(
            self._library.read, message.model, message.file, message.offset, message.length
        )
        reply = ReadReply(ref=message.ref, payload=Payload("u8", (len(data),)))
        self.send(sender.identity, reply, data)

    def _reply_status(self, sender: Sender, ref: int, text: bytes) -> None:
        self.send(sender.identity, StatusReply(ref=ref, payload=Payload("u8", (len(text),))), text)


def file_lists(ref: int, files: Sequence[FileEntry]) -> Iterator[FileList]:
    """A listing in messages that each fit a header; at least one."""
    for first in range(0, max(1, len(files)), FILES_PER_MESSAGE):
        part = tuple(files[first : first + FILES_PER_MESSAGE])
        yield FileList(ref=ref, files=part, more=first + FILES_PER_MESSAGE < len(files))
