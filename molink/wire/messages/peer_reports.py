"""Peers' reports to the coordinator: what they have, and the state of their stages."""

from typing import Annotated, Literal

import msgspec

from molink.facts.device import Device
from molink.facts.model import LayerRange, Root
from molink.facts.profile import MAX_SLOWDOWN, UNKNOWN_PROFILE, Profile
from molink.facts.scalars import Addresses, Count, Index, Sentence, Text
from molink.wire.messages.base import Message, Port
from molink.wire.messages.load import PeerLoad

#: Valid link measurements, in seconds and bytes/s.
MAX_LATENCY = 10.0
MIN_RATE = 1e3
MAX_RATE = 1e12


class WorkerState(Message, frozen=True, kw_only=True):
    """A worker process of a peer.

    ``epoch`` is the epoch of the newest Assign (``fetching`` … ``loaded``) or FormPipeline
    (``ready``) that it has carried out, by which a restarted coordinator adopts a running pipeline.
    ``done`` of ``total`` bytes are fetched and verified (``fetching``) or in memory (``loading``,
    at ``rate`` bytes/s). ``slowdown`` is the ratio of decode step times to the profile; 0 if not
    measured.
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
    """Progress of the newest :class:`Prefetch`; ``reason`` says why it failed.

    ``done`` of ``total`` bytes are fetched and verified.
    """

    number: Count
    state: Literal["fetching", "done", "failed"]
    reason: Sentence = ""
    done: Count = 0
    total: Count = 0


class TransferState(Message, frozen=True, kw_only=True):
    """A model's files being fetched: ``done`` of ``total`` bytes at ``rate`` bytes/s.

    ``source`` names the sender for users. With ``is_replica``, nothing waits for the files.
    """

    model: Text
    done: Count
    total: Count
    rate: Count = 0
    source: Annotated[str, msgspec.Meta(max_length=64)] = ""
    is_replica: bool = False


#: Maximum transfers in a report.
MAX_TRANSFERS = 4
#: Maximum partial models in a report, and layer ranges of each.
MAX_PARTIAL_MODELS = 4
MAX_LAYER_RANGES = 8


class PartialModel(Message, frozen=True, kw_only=True):
    """The layers of a model whose files are all on a peer's disk.

    Empty means that it has only files besides the layers, or too many ranges for a report.
    """

    root: Root
    layers: Annotated[tuple[LayerRange, ...], msgspec.Meta(max_length=MAX_LAYER_RANGES)] = ()


class PeerReport(Message, frozen=True, kw_only=True, tag="peer-report"):
    """A peer's identity, hardware and state.

    It is the first message of a session, and is then sent every 500 ms as a heartbeat.
    """

    name: Text
    version: Text
    #: Protocol of that version (``molink.wire.protocol``).
    protocol: Count = 1
    addresses: Addresses
    control_port: Port
    api_address: Text
    daemon_pid: Index
    #: Requests that this peer's endpoint has received since its daemon started.
    requests: Count = 0
    #: ``auto``, ``none`` or ``A-B`` (layers, from 1).
    stage: Text
    device: Device
    #: Models of which this peer has all files.
    models: tuple[Text, ...]
    workers: Annotated[tuple[WorkerState, ...], msgspec.Meta(max_length=8)] = ()
    prefetch: PrefetchState | None = None
    #: Version of this peer's copy of the coordinator's state: term and revision.
    replica: tuple[Count, Count] = (0, 0)
    #: Digest of the membership log in it.
    log_digest: Annotated[str, msgspec.Meta(max_length=16)] = ""
    #: ``sys.platform``; and the port range of stages (0: any).
    platform: Text = ""
    worker_ports: tuple[Port, Port] = (0, 0)
    #: Percentage of the served model on this PC's disk.
    replicated_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    #: Why this peer offers no layers at present, although its user allows it at other times.
    pause_reason: Text = ""
    #: Models for which this peer serves a part of the files.
    partial_models: Annotated[
        tuple[PartialModel, ...], msgspec.Meta(max_length=MAX_PARTIAL_MODELS)
    ] = ()
    transfers: Annotated[tuple[TransferState, ...], msgspec.Meta(max_length=MAX_TRANSFERS)] = ()
    #: Routes that this peer knows, by pipeline: epoch, and whether it is ready.
    routes: Annotated[tuple[tuple[Text, Count, bool], ...], msgspec.Meta(max_length=16)] | None = (
        None
    )
    #: Whether this peer can relay traffic between two others.
    can_relay: bool = False
    #: ``host:port`` of the rendezvous where it is registered.
    rendezvous: Text = ""
    #: The main peer of the same PC, if this peer is a further device.
    primary_peer: Annotated[str, msgspec.Meta(max_length=64)] = ""
    #: For users only; omitted if the report would be too long.
    load: PeerLoad | None = None


class ReachReport(Message, frozen=True, kw_only=True, tag="reach-report"):
    """The result of connecting to another peer's control port.

    ``latency`` is one way in seconds, ``rate`` in bytes/s, ``loss`` a share of packets; ``None`` if
    unknown. It is sent on each change, and for all peers at the start of a session. Each pair has
    its own message, since all pairs of a large swarm would not fit into a report's header.
    """

    peer: Text
    is_reachable: bool
    latency: Annotated[float, msgspec.Meta(ge=0, le=MAX_LATENCY)] | None = None
    rate: Annotated[float, msgspec.Meta(ge=MIN_RATE, le=MAX_RATE)] | None = None
    loss: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    #: Whether the connection uses a relay, since a direct one is impossible.
    is_relayed: bool = False
    #: Whether the connections have moved from that relay to direct ones between the routers.
    is_punched: bool = False
    #: Id of a relay that held back or cut connections; 0 if none did. Probes may still pass.
    failed_relay: Count = 0
    #: Id of the relay that was tried beside the used one, which the report doesn't concern then.
    tried_relay: Count = 0


class StageLoaded(Message, frozen=True, kw_only=True, tag="stage-loaded"):
    """A worker has loaded its weights and listens on ``port``.

    ``max_blocks`` KV blocks fit its pool; ``profile`` has its measured step times.
    """

    pipeline: Text
    epoch: Count
    stage: Index
    port: Port
    max_blocks: Index
    profile: Profile = UNKNOWN_PROFILE


class StageReady(Message, frozen=True, kw_only=True, tag="stage-ready"):
    """A stage has allocated its pool and joined the ring of ``epoch``."""

    pipeline: Text
    epoch: Count
    stage: Index


class StageFailed(Message, frozen=True, kw_only=True, tag="stage-failed"):
    """A worker failed or died, or its next stage made no progress.

    With ``next_lost``, the next stage is the cause. With ``previous_blocked``, the previous stage
    is the cause, and this stage had to block it. With ``out_of_memory``, the device lacks memory
    while it also holds another pipeline's stage. With ``files_missing``, no connected PC has some
    of the stage's files.
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
    """The sender stops; it remains a member and may return. DoneReply answers it."""

    ref: Count
