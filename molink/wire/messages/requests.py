"""What a person asks for, by the command line or a daemon: of the coordinator, or of a daemon.

Each has a ``ref`` that the answer repeats; where no other is named, it is
:class:`molink.wire.messages.control.Done`. A daemon asks under its peer's key.
"""

from typing import Annotated, Literal

import msgspec

from molink.facts.dtypes import DTypeChoice
from molink.facts.model import ModelFacts, Objective, Quantize
from molink.facts.scalars import Count, Text
from molink.wire.messages.base import Message, Payload


class ServeModel(Message, frozen=True, kw_only=True, tag="serve-model"):
    """Desired state, from a member that holds the model: serve it.

    ``model.root`` says which bytes that model is.
    ``min_peers`` is how many peers with a stage have to be there before the first placement.
    ``micro_batches`` 0 leaves the number to molink. ``objective`` is what the ring is placed for;
    it has ``min_stages`` stages if there are so many peers (0 = as many as ``min_peers``).
    """

    ref: Count
    model: ModelFacts
    min_peers: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    dtype: DTypeChoice = "auto"
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    quantize: Quantize = "none"
    objective: Objective = "latency"
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0


class StopServing(Message, frozen=True, kw_only=True, tag="stop-serving"):
    """Desired state: no model; from an owner, or the member that has asked for the present one."""

    ref: Count


class BringModel(Message, frozen=True, kw_only=True, tag="bring-model"):
    """The command line asks its own daemon to have the swarm serve a model, until it is asked for.

    To be repeated: each time the answer, :class:`Bringing`, says how far that is.
    ``model`` is a folder, or a name of the hub.
    """

    ref: Count
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class Bringing(Message, frozen=True, kw_only=True, tag="bringing"):
    """How far a daemon is with a :class:`BringModel`, in bytes of ``total``.

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


class JudgeRequest(Message, frozen=True, kw_only=True, tag="judge"):
    """Let the PC in that knocks and shows ``code``, or refuse it. Who may invite may ask for it."""

    ref: Count
    code: Annotated[str, msgspec.Meta(max_length=64)]
    refuse: bool = False


class JudgeReply(Message, frozen=True, kw_only=True, tag="judge-reply"):
    """The name of the PC that :class:`JudgeRequest` was about."""

    ref: Count
    name: Text


class StatusRequest(Message, frozen=True, kw_only=True, tag="status"):
    """Ask a daemon, or the coordinator, for the state of the swarm."""

    ref: Count


class StatusReply(Message, frozen=True, kw_only=True, tag="status-reply"):
    """``molink status --json`` as UTF-8 (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload


class DrainRequest(Message, frozen=True, kw_only=True, tag="drain"):
    """The command line asks its own daemon to hold no layers for now, or to do so again."""

    ref: Count
    drain: bool


class ShutdownRequest(Message, frozen=True, kw_only=True, tag="shutdown"):
    """The command line asks its own daemon to stop; ``leave`` also forgets the swarm."""

    ref: Count
    leave: bool = False
