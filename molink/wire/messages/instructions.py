"""What the coordinator tells peers unasked: who is a member, what to load, where requests go."""

from typing import Annotated

import msgspec

from molink.facts.dtypes import DTypeChoice
from molink.facts.model import BLOCK_SIZE, HubRevision, LayerRange, Quantize, Root
from molink.facts.profile import Profile
from molink.facts.scalars import Addresses, Count, Index, Sentence, Text
from molink.wire.messages.base import Message, Port, PublicKey
from molink.wire.messages.election import LeaderHeartbeat, StateReplica, StateRequest
from molink.wire.messages.relay import CloseRelay, OpenRelay, RelayedRoute

#: Pipelines that a swarm is to have at once, of all models.
MAX_PIPELINES = 8
#: Peers that hold some of a model's files: as many as a ring has stages.
MAX_SOURCES = 16

Sources = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_SOURCES)]


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answers the first report of a session."""

    swarm: Text
    peer: Text


class KeepAlive(Message, frozen=True, kw_only=True, tag="knock"):
    """Nothing to do: that it can be sent shows that the connection is there."""


class PeerInfo(Message, frozen=True, kw_only=True, tag="member"):
    """A peer of the swarm, announced to all others one by one; also when its addresses change."""

    peer: Text
    name: Text
    public_key: PublicKey
    addresses: Addresses
    control_port: Port
    models: tuple[Text, ...] = ()
    #: Where it is a further device of a PC: the peer that is the PC's own.
    primary_peer: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Revoked(Message, frozen=True, kw_only=True, tag="revoked"):
    """The receiver is no member any more, whatever it sends; the last that it is told."""

    swarm: Text


class DuplicatePeer(Message, frozen=True, kw_only=True, tag="twin"):
    """The receiver has the key of a PC that runs already: its state folder is a copy."""


class Notice(Message, frozen=True, kw_only=True, tag="notice"):
    """Something that a person at the receiver has to see to; empty once that is over."""

    text: Sentence


class PendingPairing(Message, frozen=True, kw_only=True):
    """A PC that asks to be let in, and the code that it shows."""

    name: Text
    code: Text
    address: Text


class PendingPairings(Message, frozen=True, kw_only=True, tag="knocking"):
    """All PCs that ask to be let in, for the people at the receiver."""

    pairings: Annotated[tuple[PendingPairing, ...], msgspec.Meta(max_length=8)] = ()


class PeerRemoved(Message, frozen=True, kw_only=True, tag="member-gone"):
    """A peer left or was revoked: drop what it sends from now on."""

    peer: Text


class Assign(Message, frozen=True, kw_only=True, tag="assign"):
    """Load layers ``layers`` of ``model`` as stage ``stage`` of ``stages`` and report.

    ``sources`` are peers that hold the model's files, and ``partial_sources`` such as hold some of
    them; ``hub`` is where else they are. Only those of ``root`` are to be believed. A worker of the
    same pipeline with the same layers keeps its weights and only changes epoch. A request has at
    most ``max_model_len`` tokens (0: as the model says).
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
    partial_sources: Sources = ()
    hub: HubRevision = ""
    max_model_len: Count = 0


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
    partial_sources: Sources = ()
    hub: HubRevision = ""


class StageAddress(Message, frozen=True, kw_only=True):
    """Where a stage's worker listens."""

    peer: Text
    public_key: PublicKey
    addresses: Addresses
    port: Port


class FormPipeline(Message, frozen=True, kw_only=True, tag="form"):
    """All stages have loaded: allocate ``blocks`` KV blocks and take your place in the ring."""

    pipeline: Text
    epoch: Count
    ring: Annotated[tuple[StageAddress, ...], msgspec.Meta(min_length=1, max_length=16)]
    blocks: Index
    micro_batches: Index


class StageProfile(Message, frozen=True, kw_only=True, tag="stage-profile"):
    """How long a stage's steps take, for the head: it is told all stages' before its
    ``FormPipeline``.

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
    is_ready: bool
    scheduler: StageAddress | None
    max_model_len: Count
    #: Peers that can serve the model's files (tokenizer, template) to those that lack them.
    sources: tuple[Text, ...] = ()
    root: Root = ""
    #: Peers that can serve some of them.
    partial_sources: Sources = ()
    hub: HubRevision = ""
    #: Why it isn't ready, for a person; empty where that is only a matter of moments.
    reason: Sentence = ""
    #: Rises as long as an epoch is being formed and gets on, 0 otherwise: who waits, waits on.
    forming_progress: Count = 0
    #: Other pipelines of the same model, which go on beside this one.
    sibling_pipelines: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_PIPELINES)] = ()


class RouteRemoved(Message, frozen=True, kw_only=True, tag="route-gone"):
    """That pipeline is no more."""

    pipeline: Text


#: What the coordinator tells a peer unasked.
Instruction = (
    Welcome
    | LeaderHeartbeat
    | StateReplica
    | StateRequest
    | Revoked
    | DuplicatePeer
    | Notice
    | KeepAlive
    | PendingPairings
    | PeerInfo
    | PeerRemoved
    | Prefetch
    | Assign
    | StageProfile
    | FormPipeline
    | Unassign
    | Route
    | RouteRemoved
    | OpenRelay
    | RelayedRoute
    | CloseRelay
)
