"""What a peer tells the coordinator: what it is and has, and what becomes of its stages."""

from typing import Annotated, Literal

import msgspec

from molink.facts.device import Device
from molink.facts.model import LayerRange, Root
from molink.facts.profile import MAX_SLOWDOWN, UNKNOWN_PROFILE, Profile
from molink.facts.scalars import Addresses, Count, Index, Sentence, Text
from molink.wire.messages.base import Message, Port
from molink.wire.messages.load import PeerLoad

#: What may be told of a link: seconds, and bytes/s. Whatever is beyond is no measurement.
MAX_LATENCY = 10.0
MIN_RATE = 1e3
MAX_RATE = 1e12


class WorkerState(Message, frozen=True, kw_only=True):
    """One worker process of a peer.

    ``epoch`` is that of the newest Assign (``fetching`` … ``loaded``) or Form (``ready``) that the
    worker has carried out: a restarted coordinator adopts a running pipeline by it.
    While it is ``fetching``, ``done`` of ``total`` bytes are here and checked; while it is
    ``loading``, so many are in memory, and ``rate`` more come each second. ``slowdown`` is how many
    times as long as the stage's profile says its decode steps take at present; 0 = not measured.
    """

    pid: Index
    pipeline: Text
    stage: Index
    layers: LayerRange
    state: Literal["fetching", "loading", "loaded", "ready", "failed"]
    epoch: Count = 0
    done: Count = 0
    total: Count = 0
    rate: Count = 0
    slowdown: Annotated[float, msgspec.Meta(ge=0, le=MAX_SLOWDOWN)] = 0.0


class PrefetchState(Message, frozen=True, kw_only=True):
    """How far a peer is with the newest :class:`Prefetch`; ``reason`` says why it failed.

    While it is ``fetching``, ``done`` of ``total`` bytes are here and checked.
    """

    number: Count
    state: Literal["fetching", "done", "failed"]
    reason: Sentence = ""
    done: Count = 0
    total: Count = 0


class TransferState(Message, frozen=True, kw_only=True):
    """Files of a model that come to a peer: ``done`` of ``total`` bytes are here.

    ``rate`` in bytes per second; ``source`` is who sends them, for a person. ``is_replica``: nobody
    waits for them.
    """

    model: Text
    done: Count
    total: Count
    rate: Count = 0
    source: Annotated[str, msgspec.Meta(max_length=64)] = ""
    is_replica: bool = False


#: Transfers that a report has room for.
MAX_TRANSFERS = 4
#: Models of which a report says what is there, and ranges of layers of each.
MAX_PARTIAL_MODELS = 4
MAX_LAYER_RANGES = 8


class PartialModel(Message, frozen=True, kw_only=True):
    """What of a model lies on a peer's disk: layers all of whose files do.

    No ``layers``: only what is beside them, or more ranges than there is room for.
    """

    root: Root
    layers: Annotated[tuple[LayerRange, ...], msgspec.Meta(max_length=MAX_LAYER_RANGES)] = ()


class PeerReport(Message, frozen=True, kw_only=True, tag="report"):
    """What a peer is and has; the first message of a session, then twice a second (heartbeat)."""

    name: Text
    version: Text
    #: What that version speaks (``molink.wire.protocol``).
    protocol: Count = 1
    addresses: Addresses
    control_port: Port
    api_address: Text
    daemon_pid: Index
    #: ``auto``, ``none`` or ``A:B`` (half-open layer range).
    stage: Text
    device: Device
    #: Names of models of which this peer can serve every file to others.
    models: tuple[Text, ...]
    workers: Annotated[tuple[WorkerState, ...], msgspec.Meta(max_length=8)] = ()
    prefetch: PrefetchState | None = None
    #: How far the copy of the coordinator's state is that this peer holds: term and revision.
    replica: tuple[Count, Count] = (0, 0)
    #: As ``sys.platform`` has it; and the first and the last port of stages (0 = any).
    platform: Text = ""
    worker_ports: tuple[Port, Port] = (0, 0)
    #: How much of the model that is served lies on this PC's disk, in percent; 100: all of it.
    replicated_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    #: Why this peer offers no layers for now, though its user wants it to at other times.
    pause_reason: Text = ""
    #: Models of which others may read here what there is.
    partial_models: Annotated[
        tuple[PartialModel, ...], msgspec.Meta(max_length=MAX_PARTIAL_MODELS)
    ] = ()
    #: Files that come to this PC.
    transfers: Annotated[tuple[TransferState, ...], msgspec.Meta(max_length=MAX_TRANSFERS)] = ()
    #: Pipelines with a route as this peer knows it: its epoch, and whether it is ready.
    routes: Annotated[tuple[tuple[Text, Count, bool], ...], msgspec.Meta(max_length=16)] | None = (
        None
    )
    #: Whether this peer passes on what two others say that can't reach each other.
    can_relay: bool = False
    #: Where this peer is a further device of a PC: the peer that is the PC's own.
    primary_peer: Annotated[str, msgspec.Meta(max_length=64)] = ""
    #: For people only, and left out where the report is too long for it.
    load: PeerLoad | None = None


class ReachReport(Message, frozen=True, kw_only=True, tag="reached"):
    """The sender has tried to connect to another member's control port, and whether it could.

    ``latency`` is one way there as it was measured, in seconds, ``rate`` in bytes/s; ``None`` where
    that is not known. Told whenever something is news, and of all members when a session begins.
    One message for each pair: a report's header has no room for all of a large swarm.
    """

    peer: Text
    is_reachable: bool
    latency: Annotated[float, msgspec.Meta(ge=0, le=MAX_LATENCY)] | None = None
    rate: Annotated[float, msgspec.Meta(ge=MIN_RATE, le=MAX_RATE)] | None = None
    #: By way of a relay: directly it can't be reached.
    is_relayed: bool = False


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
    profile: Profile = UNKNOWN_PROFILE


class StageReady(Message, frozen=True, kw_only=True, tag="stage-ready"):
    """The stage has allocated its pool and stands in the ring of ``epoch``."""

    pipeline: Text
    epoch: Count
    stage: Index


class StageFailed(Message, frozen=True, kw_only=True, tag="stage-failed"):
    """The worker of an assignment failed or died, or its next stage made no progress.

    ``next_lost`` says that it was the latter: the next stage is to blame, not this one.
    ``previous_blocked`` says that this stage had to cut off the previous one, which is to blame.
    ``out_of_memory`` says that the device has too little memory for it beside another pipeline's
    stage, ``files_missing`` that no PC which is there has some of its files.
    """

    pipeline: Text
    epoch: Count
    stage: Index
    reason: Sentence
    next_lost: bool = False
    previous_blocked: bool = False
    out_of_memory: bool = False
    files_missing: bool = False


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The sender stops in good order; it stays a member and may come back. Answered by Done."""

    ref: Count
