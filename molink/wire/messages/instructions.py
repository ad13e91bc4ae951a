"""The coordinator's instructions to peers: membership, stages, routes."""

from typing import Annotated

import msgspec

from molink.facts.dtypes import DTypeChoice
from molink.facts.model import BLOCK_SIZE, HubRevision, KVCacheDType, LayerRange, Quantize, Root
from molink.facts.profile import Profile
from molink.facts.scalars import Addresses, Count, Index, Sentence, Text
from molink.wire.messages.base import Message, Payload, Port, PublicKey
from molink.wire.messages.election import LeaderHeartbeat, StateReplica, StateRequest
from molink.wire.messages.relay import CloseRelay, OpenRelay, RelayedRoute

#: Maximum pipelines of a swarm, of all models together.
MAX_PIPELINES = 8
#: Maximum listed peers with some of a model's files; equals the maximum stages of a ring.
MAX_SOURCES = 16

Sources = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_SOURCES)]


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Reply to the first report of a session."""

    swarm: Text
    peer: Text


class KeepAlive(Message, frozen=True, kw_only=True, tag="keep-alive"):
    """No operation; sending it tests the connection."""


class PeerInfo(Message, frozen=True, kw_only=True, tag="peer-info"):
    """A peer of the swarm, announced to all others, again when its addresses change."""

    peer: Text
    name: Text
    public_key: PublicKey
    addresses: Addresses
    control_port: Port
    models: tuple[Text, ...] = ()
    #: The main peer of the same PC, if this peer is a further device.
    primary_peer: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Revoked(Message, frozen=True, kw_only=True, tag="revoked"):
    """The receiver was shut out of the swarm; this is the last message that it gets.

    The payload is the membership log, as in :class:`~molink.wire.messages.admin.LogReply`, which
    proves it.
    """

    swarm: Text
    payload: Payload


class DuplicatePeer(Message, frozen=True, kw_only=True, tag="duplicate-peer"):
    """The receiver has the key of a running PC: its state folder is a copy."""


class Notice(Message, frozen=True, kw_only=True, tag="notice"):
    """A message for the receiver's user; empty once the problem is resolved."""

    text: Sentence


class PendingPairing(Message, frozen=True, kw_only=True):
    """A PC that asks to join, and the code that it shows."""

    name: Text
    code: Text
    address: Text


class PendingPairings(Message, frozen=True, kw_only=True, tag="pending-pairings"):
    """All PCs that ask to join, for the receiver's user."""

    pairings: Annotated[tuple[PendingPairing, ...], msgspec.Meta(max_length=8)] = ()


class PeerRemoved(Message, frozen=True, kw_only=True, tag="peer-removed"):
    """A peer left or was revoked; drop its messages from now on."""

    peer: Text


class Assign(Message, frozen=True, kw_only=True, tag="assign"):
    """Load ``layers`` of ``model`` as stage ``stage`` of ``stages`` and report.

    ``sources`` are peers with all of the model's files, ``partial_sources`` are peers with a part,
    ``hub`` is another source; only bytes that match ``root`` are valid. A worker of the same
    pipeline with the same layers keeps its weights and only changes its epoch. ``max_model_len``
    bounds a request in tokens (0: the model's own).
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
    kv_cache_dtype: KVCacheDType = "auto"
    root: Root = ""
    partial_sources: Sources = ()
    hub: HubRevision = ""
    max_model_len: Count = 0


class Prefetch(Message, frozen=True, kw_only=True, tag="prefetch"):
    """Fetch the files of ``layers`` of ``model`` and report the progress.

    A pipeline serves meanwhile; the epoch that needs them begins once all peers have theirs.
    ``number`` distinguishes successive prefetches.
    """

    number: Count
    layers: LayerRange
    model: Text
    sources: tuple[Text, ...]
    root: Root = ""
    partial_sources: Sources = ()
    hub: HubRevision = ""


class StageAddress(Message, frozen=True, kw_only=True):
    """The address of a stage's worker."""

    peer: Text
    public_key: PublicKey
    addresses: Addresses
    port: Port


class FormPipeline(Message, frozen=True, kw_only=True, tag="form-pipeline"):
    """All stages have loaded: allocate ``blocks`` KV blocks and join the ring."""

    pipeline: Text
    epoch: Count
    ring: Annotated[tuple[StageAddress, ...], msgspec.Meta(min_length=1, max_length=16)]
    blocks: Index
    micro_batches: Index


class StageProfile(Message, frozen=True, kw_only=True, tag="stage-profile"):
    """The profile of a stage, sent to the scheduler before its ``FormPipeline``.

    One message per stage, since a header can't hold a whole ring's. Profiles are hints; the
    scheduler works without.
    """

    pipeline: Text
    epoch: Count
    stage: Annotated[int, msgspec.Meta(ge=0, lt=16)]
    profile: Profile


class Unassign(Message, frozen=True, kw_only=True, tag="unassign"):
    """Stop the worker of that pipeline."""

    pipeline: Text


class Route(Message, frozen=True, kw_only=True, tag="route"):
    """The route of requests for ``model``; sent to all peers on each change."""

    pipeline: Text
    epoch: Count
    model: Text
    is_ready: bool
    scheduler: StageAddress | None
    max_model_len: Count
    #: Peers that serve the model's files (tokenizer, template).
    sources: tuple[Text, ...] = ()
    root: Root = ""
    #: Peers that serve some of these files.
    partial_sources: Sources = ()
    hub: HubRevision = ""
    #: Why the pipeline isn't ready, for users; empty if it will be soon.
    reason: Sentence = ""
    #: Rises while a forming epoch makes progress, during which requests keep waiting; otherwise 0.
    forming_progress: Count = 0
    #: Other running pipelines of the same model.
    sibling_pipelines: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_PIPELINES)] = ()


class RouteRemoved(Message, frozen=True, kw_only=True, tag="route-removed"):
    """That pipeline has ended."""

    pipeline: Text


#: All instructions.
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
