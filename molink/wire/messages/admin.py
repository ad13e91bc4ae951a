"""Administrative requests from the command line and daemons to the coordinator or a daemon.

Each has a ``ref`` that the reply repeats. The reply is
:class:`molink.wire.messages.control_plane.DoneReply` unless noted. A daemon sends requests under
its peer's key.
"""

from typing import Annotated, Literal

import msgspec

from molink.facts.dtypes import DTypeChoice
from molink.facts.model import AdapterFolders, KVCacheDType, ModelFacts, Objective, Quantize
from molink.facts.scalars import Addresses, Count, Text
from molink.wire.messages.base import Message, Payload
from molink.wire.messages.instructions import MAX_PIPELINES, PeerInfo
from molink.wire.messages.membership import MAX_USES, SignedEntry


class ServeModel(Message, frozen=True, kw_only=True, tag="serve-model"):
    """Desired state, sent by a peer that has the model: serve it.

    ``model.root`` identifies the model's bytes. The first placement waits for ``min_peers`` peers
    with a stage. ``micro_batches`` 0 is automatic. The ring is placed for ``objective`` and has
    ``min_stages`` stages if there are enough peers (0: ``min_peers``).
    """

    ref: Count
    model: ModelFacts
    #: Marks a restarted daemon's repeated request, which must not override later requests.
    is_retry: bool = False
    min_peers: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    dtype: DTypeChoice = "auto"
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    quantize: Quantize = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    objective: Objective = "latency"
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0


class StopServing(Message, frozen=True, kw_only=True, tag="stop-serving"):
    """Desired state: no model. Allowed for owners and for the peer that requested the model."""

    ref: Count


class SwitchModel(Message, frozen=True, kw_only=True, tag="switch-model"):
    """Desired state: stop or resume serving one of the models.

    Allowed for owners and for the peer that requested the model.
    """

    ref: Count
    model: Text
    served: bool = False


class Rebalance(Message, frozen=True, kw_only=True, tag="rebalance"):
    """Place all models again from scratch. Only for owners."""

    ref: Count


#: Maximum models per request, and peers that one may be pinned to.
MAX_MODELS = 8
MAX_PINS = 64


class ServingOptions(Message, frozen=True, kw_only=True):
    """How to serve a model.

    ``pins`` maps PCs, by id or name, to their stage: ``auto`` or ``A-B``.
    """

    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIPELINES)] = 1
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    objective: Objective = "latency"
    dtype: DTypeChoice = "auto"
    quantize: Quantize = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    pins: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=MAX_PINS)] = ()


class ModelSpec(ServingOptions, frozen=True, kw_only=True):
    """A model of :class:`ApplyModels`, with its desired pipelines."""

    model: ModelFacts


class DesiredModels(msgspec.Struct, frozen=True, kw_only=True):
    """All models to serve; ``molink`` is the version that PCs must run, if any."""

    models: Annotated[tuple[ModelSpec, ...], msgspec.Meta(max_length=MAX_MODELS)]
    molink: Text = ""


class ApplyModels(Message, frozen=True, kw_only=True, tag="apply-models"):
    """Desired state, sent by an owner that has the models: serve exactly these.

    The payload is msgpack of :class:`DesiredModels`. Answered by :class:`ApplyReply`. All or
    nothing is applied, and nothing with ``dry_run``.
    """

    ref: Count
    payload: Payload
    dry_run: bool = False


class ApplyReply(Message, frozen=True, kw_only=True, tag="apply-reply"):
    """The changes of :class:`ApplyModels`, one per line (payload: UTF-8); empty without any."""

    ref: Count
    payload: Payload


class ModelEntry(ServingOptions, frozen=True, kw_only=True):
    """A model of an :class:`ApplyFile`: a folder or a hub model's name, and how to serve it."""

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    adapters: AdapterFolders = msgspec.field(default_factory=dict)


class ApplyFile(Message, frozen=True, kw_only=True, tag="apply-file"):
    """The command line asks its daemon to have the swarm serve the models of a file.

    The command line repeats it until the coordinator has answered (:class:`ApplyReply`); until then
    :class:`LoadModelReply` reports progress.
    """

    ref: Count
    models: Annotated[tuple[ModelEntry, ...], msgspec.Meta(max_length=MAX_MODELS)]
    molink: Text = ""
    dry_run: bool = False


class LoadModel(Message, frozen=True, kw_only=True, tag="load-model"):
    """The command line asks its daemon to load a model and have the swarm serve it.

    The command line repeats it; each :class:`LoadModelReply` reports progress. ``model`` is a
    folder or a hub model's name.
    """

    ref: Count
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class LoadModelReply(Message, frozen=True, kw_only=True, tag="load-model-reply"):
    """Progress of a :class:`LoadModel`, in bytes of ``total``.

    With ``asked`` the coordinator has been asked to serve it as ``name``.
    """

    ref: Count
    state: Literal["looking", "fetching", "hashing", "asked"]
    name: Text = ""
    done: Count = 0
    total: Count = 0


class LogRequest(Message, frozen=True, kw_only=True, tag="log-request"):
    """Ask the coordinator for the membership log; replied to by :class:`LogReply`."""

    ref: Count


class LogReply(Message, frozen=True, kw_only=True, tag="log-reply"):
    """The membership log: msgpack of its signed entries (payload ``u8 [n]``).

    For join tokens it also has the coordinator's addresses, and members that can name a later
    coordinator.
    """

    ref: Count
    payload: Payload
    addresses: Addresses = ()
    contacts: Annotated[tuple[PeerInfo, ...], msgspec.Meta(max_length=2)] = ()


class AppendEntries(Message, frozen=True, kw_only=True, tag="append-entries"):
    """Append entries that the sender has signed to the membership log: all or none.

    With ``code`` they admit the PC that shows it.
    """

    ref: Count
    entries: Annotated[tuple[SignedEntry, ...], msgspec.Meta(min_length=1, max_length=32)]
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""


class InviteRequest(Message, frozen=True, kw_only=True, tag="invite-request"):
    """Request a join token for ``uses`` PCs, valid for ``ttl`` seconds (0: forever)."""

    ref: Count
    ttl: float = 86400.0
    uses: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1


class InviteReply(Message, frozen=True, kw_only=True, tag="invite-reply"):
    """A join token, and the id of its invitation (``invite:…``)."""

    ref: Count
    token: Annotated[str, msgspec.Meta(max_length=2048)]
    id: Text = ""


class InvitationsRequest(Message, frozen=True, kw_only=True, tag="invitations-request"):
    """List invitations: all of them for an owner, their own for other peers."""

    ref: Count


class InvitationsReply(Message, frozen=True, kw_only=True, tag="invitations-reply"):
    """``molink invite --list --json`` as UTF-8 (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload


class LeaveRequest(Message, frozen=True, kw_only=True, tag="leave-request"):
    """The command line, or the daemon, leaves the swarm permanently.

    ``devices`` are the further devices of its PC, which also leave.
    """

    ref: Count
    devices: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()


class RenameRequest(Message, frozen=True, kw_only=True, tag="rename-request"):
    """The daemon renames its PC."""

    ref: Count
    name: Text


class RevokeRequest(Message, frozen=True, kw_only=True, tag="revoke-request"):
    """Ban a peer, by name or id, or end an invitation (``invite:…``).

    Only for owners; the creator of an invitation may also end it.
    """

    ref: Count
    target: Text


class RevokeReply(Message, frozen=True, kw_only=True, tag="revoke-reply"):
    """Reply to :class:`RevokeRequest`.

    ``kept_peers`` names peers that joined by the same invitation and stay; ``ended_peers`` names
    peers that were shut out because the revoked peer had admitted them.
    """

    ref: Count
    kept_peers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_USES)] = ()
    ended_peers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_USES)] = ()


class UnrevokeRequest(Message, frozen=True, kw_only=True, tag="unrevoke-request"):
    """Lift the ban of a peer, by name or id. Only for owners."""

    ref: Count
    target: Text


class AddOwnerRequest(Message, frozen=True, kw_only=True, tag="add-owner-request"):
    """Make another member an owner, by name or id. Only for owners."""

    ref: Count
    target: Text


class PairingDecisionRequest(Message, frozen=True, kw_only=True, tag="pairing-decision-request"):
    """Approve or refuse the PC that shows ``code``. Allowed for peers that may invite."""

    ref: Count
    code: Annotated[str, msgspec.Meta(max_length=64)]
    refuse: bool = False


class PairingDecisionReply(Message, frozen=True, kw_only=True, tag="pairing-decision-reply"):
    """The name of the approved or refused PC.

    The coordinator's reply to an approval has the key for which the approver has to sign.
    """

    ref: Count
    name: Text
    verify_key: Annotated[str, msgspec.Meta(max_length=40)] = ""


class StatusRequest(Message, frozen=True, kw_only=True, tag="status-request"):
    """Ask a daemon or the coordinator for the swarm's status.

    With ``scale_out`` it includes the gain from one more PC, which takes a while to compute.
    """

    ref: Count
    scale_out: bool = False


class StatusReply(Message, frozen=True, kw_only=True, tag="status-reply"):
    """``molink status --json`` as UTF-8 (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload


class DrainRequest(Message, frozen=True, kw_only=True, tag="drain-request"):
    """The command line asks its daemon to release its layers for now, or to hold some again.

    ``device`` names one device; if empty, all devices of this PC are meant.
    """

    ref: Count
    drain: bool
    device: Annotated[str, msgspec.Meta(max_length=64)] = ""


class ShutdownRequest(Message, frozen=True, kw_only=True, tag="shutdown-request"):
    """The command line asks its daemon to stop; ``leave`` also leaves the swarm."""

    ref: Count
    leave: bool = False
