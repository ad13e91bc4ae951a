"""The control plane, between peers, the coordinator, daemons and the command line.

Reports, requests and instructions have modules of their own; this one has joining, general replies,
and the union of all messages.

A *peer id* is :func:`molink.facts.identity.derive_peer_id` of the peer's public CURVE key. The ZAP
handler sets it as the ``User-Id`` of each message, so messages don't name their sender. A reply
repeats the ``ref`` of its request.
"""

import molink.errors
from molink.errors import MolinkError, RequestError
from molink.facts.scalars import Addresses, Count, Sentence, Text
from molink.wire.messages.admin import (
    AddOwnerRequest,
    AppendEntries,
    ApplyFile,
    ApplyModels,
    ApplyReply,
    DrainRequest,
    InvitationsReply,
    InvitationsRequest,
    InviteReply,
    InviteRequest,
    LeaveRequest,
    LoadModel,
    LoadModelReply,
    LogReply,
    LogRequest,
    PairingDecisionReply,
    PairingDecisionRequest,
    Rebalance,
    RenameRequest,
    RevokeReply,
    RevokeRequest,
    ServeModel,
    ShutdownRequest,
    StatusReply,
    StatusRequest,
    StopServing,
    SwitchModel,
    UnrevokeRequest,
)
from molink.wire.messages.base import Message, PublicKey
from molink.wire.messages.election import LeaderReply, LeaderRequest
from molink.wire.messages.instructions import Instruction
from molink.wire.messages.membership import SignedEntry
from molink.wire.messages.peer_reports import (
    Goodbye,
    PeerReport,
    ReachReport,
    StageFailed,
    StageLoaded,
    StageReady,
)
from molink.wire.messages.relay import RelayOpened
from molink.wire.messages.transfer import (
    ManifestChunk,
    ManifestRequest,
    PartsReply,
    PartsRequest,
    ReadReply,
    ReadRequest,
)


class JoinRequest(Message, frozen=True, kw_only=True, tag="join-request"):
    """A PC with an invitation asks to join under its own key.

    ``entry``: a ``JoinEntry`` for that key; PCs of older protocols send none.
    """

    ref: Count
    public_key: PublicKey
    name: Text
    version: Text
    protocol: Count = 1
    entry: SignedEntry | None = None


class JoinRedirect(Message, frozen=True, kw_only=True, tag="join-redirect"):
    """A peer's reply to :class:`JoinRequest`: the coordinator to ask, and its peer."""

    ref: Count
    coordinator_key: PublicKey
    addresses: Addresses
    leader: Text = ""


class JoinReply(Message, frozen=True, kw_only=True, tag="join-reply"):
    """The coordinator has added the sender of :class:`JoinRequest` to the swarm."""

    ref: Count
    swarm: Text
    peer: Text


class ErrorReply(Message, frozen=True, kw_only=True, tag="error-reply"):
    """The reply to a failed request; ``code`` is the error's class name.

    ``param`` comes from a :class:`~molink.errors.RequestError`.
    """

    ref: Count
    code: Text
    message: Sentence
    param: Text | None = None

    @property
    def error(self) -> MolinkError:
        """An error of that class, or a MolinkError if the class is unknown."""
        kind = getattr(molink.errors, self.code, MolinkError)
        if not (isinstance(kind, type) and issubclass(kind, MolinkError)):
            kind = MolinkError
        if issubclass(kind, RequestError):
            return kind(self.message, self.param)
        error: MolinkError = kind(self.message)
        return error


class DoneReply(Message, frozen=True, kw_only=True, tag="done-reply"):
    """The reply to a request without a specific one."""

    ref: Count


ControlMessage = (
    ErrorReply
    | DoneReply
    | JoinRequest
    | JoinRedirect
    | JoinReply
    | PeerReport
    | ReachReport
    | RelayOpened
    | StageLoaded
    | StageReady
    | StageFailed
    | ServeModel
    | StopServing
    | SwitchModel
    | Rebalance
    | ApplyModels
    | ApplyReply
    | ApplyFile
    | LoadModel
    | LoadModelReply
    | LogRequest
    | LogReply
    | AppendEntries
    | InviteRequest
    | InviteReply
    | InvitationsRequest
    | InvitationsReply
    | LeaveRequest
    | Goodbye
    | RenameRequest
    | RevokeRequest
    | RevokeReply
    | UnrevokeRequest
    | AddOwnerRequest
    | PairingDecisionRequest
    | PairingDecisionReply
    | Instruction
    | LeaderRequest
    | LeaderReply
    | ManifestRequest
    | ManifestChunk
    | PartsRequest
    | PartsReply
    | ReadRequest
    | ReadReply
    | StatusRequest
    | StatusReply
    | ShutdownRequest
    | DrainRequest
)
