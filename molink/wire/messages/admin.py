"""What a person asks for, by the command line or a daemon: of the coordinator, or of a daemon.

Each has a ``ref`` that the answer repeats; where no other is named, it is
:class:`molink.wire.messages.control_plane.DoneReply`. A daemon asks under its peer's key.
"""

from typing import Annotated, Literal

import msgspec

from molink.facts.dtypes import DTypeChoice
from molink.facts.model import ModelFacts, Objective, Quantize
from molink.facts.scalars import Count, Text
from molink.wire.messages.base import Message, Payload
from molink.wire.messages.instructions import MAX_PIPELINES


class ServeModel(Message, frozen=True, kw_only=True, tag="serve-model"):
    """Desired state, from a member that holds the model: serve it.

    ``model.root`` says which bytes that model is.
    ``min_peers`` is how many peers with a stage have to be there before the first placement.
    ``micro_batches`` 0 leaves the number to molink. ``objective`` is what the ring is placed for;
    it has ``min_stages`` stages if there are so many peers (0 = as many as ``min_peers``).
    """

    ref: Count
    model: ModelFacts
    #: A daemon that was started anew asks again: what was applied since goes on.
    is_retry: bool = False
    min_peers: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    dtype: DTypeChoice = "auto"
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    quantize: Quantize = "none"
    objective: Objective = "latency"
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0


class StopServing(Message, frozen=True, kw_only=True, tag="stop-serving"):
    """Desired state: no model; from an owner, or the member that has asked for the present one."""

    ref: Count


class SwitchModel(Message, frozen=True, kw_only=True, tag="switch-model"):
    """Desired state: one of the models is ``served`` no more, or again as before.

    From an owner, or the member that has asked for that model. Answered by Done.
    """

    ref: Count
    model: Text
    served: bool = False


class Rebalance(Message, frozen=True, kw_only=True, tag="rebalance"):
    """Place all models anew, as if nothing served them; from an owner. Answered by Done."""

    ref: Count


#: Models that may be asked for at once, and peers that one may be bound to.
MAX_MODELS = 8
MAX_PINS = 64


class ModelSpec(Message, frozen=True, kw_only=True):
    """One of the models of :class:`ApplyModels`, with the pipelines that it is to have.

    ``pins`` are PCs by id or name, each with its stage: ``auto`` or ``A:B``.
    """

    model: ModelFacts
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIPELINES)] = 1
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    objective: Objective = "latency"
    dtype: DTypeChoice = "auto"
    quantize: Quantize = "none"
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    pins: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=MAX_PINS)] = ()


class DesiredModels(msgspec.Struct, frozen=True, kw_only=True):
    """All models that are to be served; ``molink`` is the version that PCs have to run, if any."""

    models: Annotated[tuple[ModelSpec, ...], msgspec.Meta(max_length=MAX_MODELS)]
    molink: Text = ""


class ApplyModels(Message, frozen=True, kw_only=True, tag="apply-models"):
    """Desired state, from an owner that holds the models: serve these, and no others.

    The payload is msgpack of :class:`DesiredModels`. Answered by :class:`ApplyReply`; all or
    nothing is done, and nothing at all if it is ``dry_run``.
    """

    ref: Count
    payload: Payload
    dry_run: bool = False


class ApplyReply(Message, frozen=True, kw_only=True, tag="applied"):
    """What :class:`ApplyModels` changes, a line each (payload: UTF-8); none: there is nothing."""

    ref: Count
    payload: Payload


class ModelEntry(Message, frozen=True, kw_only=True):
    """A model of an :class:`ApplyFile`: a folder or a name of the hub, and how it is served."""

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIPELINES)] = 1
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    objective: Objective = "latency"
    dtype: DTypeChoice = "auto"
    quantize: Quantize = "none"
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    pins: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=MAX_PINS)] = ()


class ApplyFile(Message, frozen=True, kw_only=True, tag="apply-file"):
    """The command line asks its own daemon to have the swarm serve what a file names.

    To be repeated: until the coordinator has answered (:class:`ApplyReply`),
    :class:`LoadModelReply` says how far it is.
    """

    ref: Count
    models: Annotated[tuple[ModelEntry, ...], msgspec.Meta(max_length=MAX_MODELS)]
    molink: Text = ""
    dry_run: bool = False


class LoadModel(Message, frozen=True, kw_only=True, tag="bring-model"):
    """The command line asks its own daemon to have the swarm serve a model, until it is asked for.

    To be repeated: each time the answer, :class:`LoadModelReply`, says how far that is.
    ``model`` is a folder, or a name of the hub.
    """

    ref: Count
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class LoadModelReply(Message, frozen=True, kw_only=True, tag="bringing"):
    """How far a daemon is with a :class:`LoadModel`, in bytes of ``total``.

    ``asked``: the coordinator knows, and serves it as ``name``.
    """

    ref: Count
    state: Literal["looking", "fetching", "hashing", "asked"]
    name: Text = ""
    done: Count = 0
    total: Count = 0


class InviteRequest(Message, frozen=True, kw_only=True, tag="invite"):
    """Ask for a join token that is valid for ``ttl`` seconds (0 = for ever), for ``uses`` PCs."""

    ref: Count
    ttl: float = 86400.0
    uses: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1


class InviteReply(Message, frozen=True, kw_only=True, tag="invitation"):
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


class RevokeRequest(Message, frozen=True, kw_only=True, tag="revoke"):
    """Shut a peer out for good, or end an invitation (``invite:…``).

    Only an owner may; whoever made an invitation may end that one too.
    """

    ref: Count
    target: Text


class RevokeReply(Message, frozen=True, kw_only=True, tag="revoke-reply"):
    """The answer to :class:`RevokeRequest`.

    ``kept_peers`` are the names of members that came by an invitation which ended with it,
    ``num_others`` how many more there are.
    """

    ref: Count
    kept_peers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)] = ()
    num_others: Count = 0


class UnrevokeRequest(Message, frozen=True, kw_only=True, tag="un-revoke"):
    """Make a peer that was revoked a member again; only an owner may. Answered by Done."""

    ref: Count
    target: Text


class PairingDecisionRequest(Message, frozen=True, kw_only=True, tag="judge"):
    """Let the PC in that knocks and shows ``code``, or refuse it. Who may invite may ask for it."""

    ref: Count
    code: Annotated[str, msgspec.Meta(max_length=64)]
    refuse: bool = False


class PairingDecisionReply(Message, frozen=True, kw_only=True, tag="judge-reply"):
    """The name of the PC that :class:`PairingDecisionRequest` was about."""

    ref: Count
    name: Text


class StatusRequest(Message, frozen=True, kw_only=True, tag="status"):
    """Ask a daemon, or the coordinator, for the state of the swarm.

    With its ``scale_out``: what a PC more would bring; that takes a while.
    """

    ref: Count
    scale_out: bool = False


class StatusReply(Message, frozen=True, kw_only=True, tag="status-reply"):
    """``molink status --json`` as UTF-8 (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload


class DrainRequest(Message, frozen=True, kw_only=True, tag="drain"):
    """The command line asks its own daemon to hold no layers for now, or to do so again.

    On the ``device`` of that name; empty: on all of this PC.
    """

    ref: Count
    drain: bool
    device: Annotated[str, msgspec.Meta(max_length=64)] = ""


class ShutdownRequest(Message, frozen=True, kw_only=True, tag="shutdown"):
    """The command line asks its own daemon to stop; ``leave`` also forgets the swarm."""

    ref: Count
    leave: bool = False
