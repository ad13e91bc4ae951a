"""Messages of the control plane: peers with their coordinator, peers with peers, CLI with daemon.

A *peer id* is :func:`molink.facts.identity.peer_id` of the peer's public CURVE key; the ZAP handler
sets it as the ``User-Id`` of every message, so no message has to say who sent it. Requests carry a
``ref`` that the reply repeats.
"""

from typing import Annotated, Literal

import msgspec

from molink.facts.device import Device
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import BLOCK_SIZE, LayerRange, ModelFacts, Quantize, Root
from molink.facts.profile import UNKNOWN, Profile
from molink.facts.scalars import Addresses, Count, Index, Sentence, Text
from molink.wire.messages.base import Message, Payload
from molink.wire.messages.leading import (
    LeaderReply,
    LeaderRequest,
    Noted,
    SendState,
    SharedState,
)
from molink.wire.messages.transfer import ManifestPart, ManifestRequest, ReadReply, ReadRequest

#: A CURVE key in Z85.
PublicKey = Annotated[str, msgspec.Meta(max_length=40, pattern=r"^[!-~]{40}$")]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Failure(Message, frozen=True, kw_only=True, tag="failure"):
    """The answer to a request that can't be met; ``code`` is the error's class name."""

    ref: Count
    code: Text
    message: Sentence


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """The answer to a request that needs no other."""

    ref: Count


# --- joining: sent with the invitation's key, the only message such a key may send -----------


class JoinRequest(Message, frozen=True, kw_only=True, tag="join"):
    """A PC that holds an invitation asks to be a member under its own key."""

    ref: Count
    public_key: PublicKey
    name: Text
    version: Text


class Elsewhere(Message, frozen=True, kw_only=True, tag="elsewhere"):
    """A member's answer to :class:`JoinRequest`: the coordinator that takes it."""

    ref: Count
    coordinator_key: PublicKey
    addresses: Addresses


class Joined(Message, frozen=True, kw_only=True, tag="joined"):
    """The coordinator has made the sender of :class:`JoinRequest` a member."""

    ref: Count
    swarm: Text
    peer: Text


# --- peer → coordinator ----------------------------------------------------------------------


class WorkerState(Message, frozen=True, kw_only=True):
    """One worker process of a peer.

    ``epoch`` is that of the newest Assign (``fetching`` … ``loaded``) or Form (``ready``) that the
    worker has carried out: a restarted coordinator adopts a running pipeline by it.
    While it is ``fetching``, ``done`` of ``total`` bytes are here and checked.
    """

    pid: Index
    pipeline: Text
    stage: Index
    layers: LayerRange
    state: Literal["fetching", "loading", "loaded", "ready", "failed"]
    epoch: Count = 0
    done: Count = 0
    total: Count = 0


class Prefetched(Message, frozen=True, kw_only=True):
    """How far a peer is with the newest :class:`Prefetch`; ``reason`` says why it failed.

    While it is ``fetching``, ``done`` of ``total`` bytes are here and checked.
    """

    number: Count
    state: Literal["fetching", "done", "failed"]
    reason: Sentence = ""
    done: Count = 0
    total: Count = 0


class PeerReport(Message, frozen=True, kw_only=True, tag="report"):
    """What a peer is and has; the first message of a session, then twice a second (heartbeat)."""

    name: Text
    version: Text
    addresses: Addresses
    control_port: Port
    endpoint: Text
    daemon_pid: Index
    #: ``auto``, ``none`` or ``A:B`` (half-open layer range).
    stage: Text
    device: Device
    #: Names of models of which this peer can serve every file to others.
    models: tuple[Text, ...]
    workers: Annotated[tuple[WorkerState, ...], msgspec.Meta(max_length=8)] = ()
    prefetched: Prefetched | None = None
    #: How far the copy of the coordinator's state is that this peer holds: term and revision.
    replica: tuple[Count, Count] = (0, 0)
    #: As ``sys.platform`` has it; and the first and the last port of stages (0 = any).
    system: Text = ""
    worker_ports: tuple[Port, Port] = (0, 0)
    #: How much of the model that is served lies on this PC's disk, in percent; 100: all of it.
    copied: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0


class Reached(Message, frozen=True, kw_only=True, tag="reached"):
    """The sender has tried to connect to another member's control port, and whether it could.

    Told whenever that is news, and of all members when a session begins.
    """

    peer: Text
    ok: bool


class StageLoaded(Message, frozen=True, kw_only=True, tag="stage-loaded"):
    """The worker of an assignment holds its weights and listens on ``port``.

    ``max_blocks`` KV blocks fit its pool; ``profile`` is how long it has measured its steps to
    take.
    """

    pipeline: Text
    epoch: Count
    stage: Index
    port: Port
    max_blocks: Index
    profile: Profile = UNKNOWN


class StageReady(Message, frozen=True, kw_only=True, tag="stage-ready"):
    """The stage has allocated its pool and stands in the ring of ``epoch``."""

    pipeline: Text
    epoch: Count
    stage: Index


class StageFailed(Message, frozen=True, kw_only=True, tag="stage-failed"):
    """The worker of an assignment failed or died, or its next stage made no progress.

    ``next_lost`` says that it was the latter: the next stage is to blame, not this one.
    ``previous_blocked`` says that this stage had to cut off the previous one, which is to blame.
    ``no_room`` says that the device has too little memory for it beside another pipeline's stage.
    """

    pipeline: Text
    epoch: Count
    stage: Index
    reason: Sentence
    next_lost: bool = False
    previous_blocked: bool = False
    no_room: bool = False


class ServeModel(Message, frozen=True, kw_only=True, tag="serve-model"):
    """Desired state, from a member that holds the model: serve it.

    ``model.root`` says which bytes that model is.
    ``min_peers`` is how many peers with a stage have to be there before the first placement.
    ``micro_batches`` 0 leaves the number to molink.
    """

    ref: Count
    model: ModelFacts
    min_peers: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    dtype: DTypeChoice = "auto"
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    quantize: Quantize = "none"


class InviteRequest(Message, frozen=True, kw_only=True, tag="invite"):
    """Ask for a join token that is valid for ``ttl`` seconds (0 = for ever), for ``uses`` PCs."""

    ref: Count
    ttl: float = 86400.0
    uses: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1


class Invite(Message, frozen=True, kw_only=True, tag="invitation"):
    """A join token to paste, and the id of its invitation (``invite:…``)."""

    ref: Count
    token: Annotated[str, msgspec.Meta(max_length=2048)]
    id: Text = ""


class InvitationsRequest(Message, frozen=True, kw_only=True, tag="invitations"):
    """Ask which invitations there are: an owner for all, another member for its own."""

    ref: Count


class InvitationsReply(Message, frozen=True, kw_only=True, tag="invitations-reply"):
    """``molink invite --list --json`` as UTF-8 (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload


class LeaveRequest(Message, frozen=True, kw_only=True, tag="leave"):
    """The sender leaves the swarm for good."""

    ref: Count


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The sender stops in good order; it stays a member and may come back. Answered by Done."""

    ref: Count


class RevokeRequest(Message, frozen=True, kw_only=True, tag="revoke"):
    """Shut a peer out for good, or end an invitation (``invite:…``).

    Only an owner may; whoever made an invitation may end that one too.
    """

    ref: Count
    target: Text


class RevokeReply(Message, frozen=True, kw_only=True, tag="revoke-reply"):
    """The answer to :class:`RevokeRequest`.

    ``stayed`` are the names of members that came by an invitation which ended with it, ``others``
    how many more there are.
    """

    ref: Count
    stayed: Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)] = ()
    others: Count = 0


class UnrevokeRequest(Message, frozen=True, kw_only=True, tag="un-revoke"):
    """Make a peer that was revoked a member again; only an owner may. Answered by Done."""

    ref: Count
    target: Text


# --- coordinator → peers ---------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answers the first report of a session."""

    swarm: Text
    peer: Text


class Knock(Message, frozen=True, kw_only=True, tag="knock"):
    """Nothing to do: that it can be sent shows that the connection is there."""


class Member(Message, frozen=True, kw_only=True, tag="member"):
    """A peer of the swarm, announced to all others one by one; also when its addresses change."""

    peer: Text
    name: Text
    public_key: PublicKey
    addresses: Addresses
    control_port: Port
    models: tuple[Text, ...] = ()


class Revoked(Message, frozen=True, kw_only=True, tag="revoked"):
    """The receiver is no member any more, whatever it sends; the last that it is told."""

    swarm: Text


class Notice(Message, frozen=True, kw_only=True, tag="notice"):
    """Something that a person at the receiver has to see to; empty once that is over."""

    text: Sentence


class MemberGone(Message, frozen=True, kw_only=True, tag="member-gone"):
    """A peer left or was revoked: drop what it sends from now on."""

    peer: Text


class Assign(Message, frozen=True, kw_only=True, tag="assign"):
    """Load layers ``layers`` of ``model`` as stage ``stage`` of ``stages`` and report.

    ``sources`` are peers that hold the model's files, of which only those of ``root`` are to be
    believed. A worker of the same pipeline with the same
    layers keeps its weights and only changes epoch.
    """

    pipeline: Text
    epoch: Count
    stage: Index
    stages: Index
    layers: LayerRange
    model: Text
    sources: tuple[Text, ...]
    dtype: DTypeChoice
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = BLOCK_SIZE
    quantize: Quantize = "none"
    root: Root = ""


class Prefetch(Message, frozen=True, kw_only=True, tag="prefetch"):
    """Get the files of ``layers`` of ``model``, and say in your reports how far you are.

    A pipeline serves meanwhile; the epoch in which they are needed begins once all have theirs.
    ``number`` tells this wish from earlier ones.
    """

    number: Count
    layers: LayerRange
    model: Text
    sources: tuple[Text, ...]
    root: Root = ""


class StageAddress(Message, frozen=True, kw_only=True):
    """Where a stage's worker listens."""

    peer: Text
    public_key: PublicKey
    addresses: Addresses
    port: Port


class Form(Message, frozen=True, kw_only=True, tag="form"):
    """All stages have loaded: allocate ``blocks`` KV blocks and take your place in the ring."""

    pipeline: Text
    epoch: Count
    ring: Annotated[tuple[StageAddress, ...], msgspec.Meta(min_length=1, max_length=16)]
    blocks: Index
    micro_batches: Index


class StageProfile(Message, frozen=True, kw_only=True, tag="stage-profile"):
    """How long a stage's steps take, for the head: it is told all stages' before its ``Form``.

    One message each, since a header has no room for those of a whole ring. They are advice: a head
    that lacks one schedules without.
    """

    pipeline: Text
    epoch: Count
    stage: Annotated[int, msgspec.Meta(ge=0, lt=16)]
    profile: Profile


class Unassign(Message, frozen=True, kw_only=True, tag="unassign"):
    """Stop the worker of that pipeline."""

    pipeline: Text


class Route(Message, frozen=True, kw_only=True, tag="route"):
    """Where requests for ``model`` go; sent to every peer whenever it changes."""

    pipeline: Text
    epoch: Count
    model: Text
    ready: bool
    head: StageAddress | None
    context: Count
    #: Peers that can serve the model's files (tokenizer, template) to those that lack them.
    sources: tuple[Text, ...] = ()
    root: Root = ""
    #: Why it isn't ready, for a person; empty where that is only a matter of moments.
    reason: Sentence = ""
    #: Rises as long as an epoch is being formed and gets on, 0 otherwise: who waits, waits on.
    forming: Count = 0


class RouteGone(Message, frozen=True, kw_only=True, tag="route-gone"):
    """That pipeline is no more."""

    pipeline: Text


# --- command line → its own daemon (or coordinator), under the peer's own key ----------------


class StatusRequest(Message, frozen=True, kw_only=True, tag="status"):
    """Ask a daemon, or the coordinator, for the state of the swarm."""

    ref: Count


class StatusReply(Message, frozen=True, kw_only=True, tag="status-reply"):
    """``molink status --json`` as UTF-8 (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload


class ShutdownRequest(Message, frozen=True, kw_only=True, tag="shutdown"):
    """The command line asks its own daemon to stop; ``leave`` also forgets the swarm."""

    ref: Count
    leave: bool = False


#: What the coordinator tells a peer unasked.
Instruction = (
    Welcome
    | Noted
    | SharedState
    | SendState
    | Revoked
    | Notice
    | Knock
    | Member
    | MemberGone
    | Prefetch
    | Assign
    | StageProfile
    | Form
    | Unassign
    | Route
    | RouteGone
)

ControlMessage = (
    Failure
    | Done
    | JoinRequest
    | Elsewhere
    | Joined
    | PeerReport
    | Reached
    | StageLoaded
    | StageReady
    | StageFailed
    | ServeModel
    | InviteRequest
    | Invite
    | InvitationsRequest
    | InvitationsReply
    | LeaveRequest
    | Goodbye
    | RevokeRequest
    | RevokeReply
    | UnrevokeRequest
    | Instruction
    | LeaderRequest
    | LeaderReply
    | ManifestRequest
    | ManifestPart
    | ReadRequest
    | ReadReply
    | StatusRequest
    | StatusReply
    | ShutdownRequest
)
