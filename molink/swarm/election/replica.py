"""What every peer keeps of the coordinator's state, so that another PC can go on with it.

A *replica* is the whole state in one message: it is small, and changes seldom. A change raises its
revision, a new leader its term; the *lineage* names for each earlier term the revision from which
the next leader went on. So a replica that a peer holds is a part of our past, or it knows of
changes that we don't: then a part of the swarm was led by another peer while it was split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from molink.errors import StateError
from molink.facts.identity import derive_peer_id
from molink.swarm.controller.records import (
    DesiredModel,
    InvitationRecord,
    MemberRecord,
    PipelineRecord,
)

#: Bytes of an encoded replica: those of one message's payload.
MAX_REPLICA_BYTES = 256 << 10
#: Earlier terms that are remembered.
MAX_LINEAGE = 64
#: Members of the past that are passed on; of older ones only the revoked.
MAX_FORMER_MEMBERS = 128
#: A peer that was asked for its replica has so long to send it, in seconds.
RESEND_TIMEOUT = 5.0

#: A term, and a revision in it.
Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Replica:
    """The coordinator's state, all of it but its own key, port and addresses."""

    swarm: str
    name: str
    max_peers: int
    term: int
    revision: int
    #: Earlier terms, oldest first, with the last revision of each.
    lineage: tuple[Version, ...]
    members: tuple[MemberRecord, ...]
    invitations: tuple[InvitationRecord, ...]
    desired: DesiredModel | None
    pipeline: PipelineRecord | None
    #: The number of the newest pipeline, and the newest epoch.
    last_numbers: tuple[int, int]
    #: Models and pipelines beside those, which earlier versions didn't know.
    more_models: tuple[DesiredModel, ...] = ()
    more_pipelines: tuple[PipelineRecord, ...] = ()

    @property
    def models(self) -> tuple[DesiredModel, ...]:
        """All that are to be served."""
        return (() if self.desired is None else (self.desired,)) + self.more_models

    @property
    def pipelines(self) -> tuple[PipelineRecord, ...]:
        """All that are committed."""
        return (() if self.pipeline is None else (self.pipeline,)) + self.more_pipelines

    @property
    def version(self) -> Version:
        """Which of two replicas of one lineage is newer."""
        return self.term, self.revision

    @property
    def order(self) -> tuple[str, ...]:
        """Members in the order of succession, which is that of joining."""
        return tuple(one.peer for one in self.members if one.standing == "member")

    def encode(self) -> bytes:
        """As msgpack, at most :data:`MAX_REPLICA_BYTES` long.

        Raises:
            StateError: it is longer.
        """
        past = [one.peer for one in self.members if one.standing == "left"]
        dropped = set(past[:-MAX_FORMER_MEMBERS])
        kept = tuple(one for one in self.members if one.peer not in dropped)
        data = msgspec.msgpack.encode(replace(self, members=kept))
        if len(data) > MAX_REPLICA_BYTES:
            raise StateError(f"the swarm's state has {len(data)} bytes, too many to pass it on")
        return data


def decode_replica(data: bytes | memoryview) -> Replica:
    """The replica in ``data``.

    Raises:
        StateError: it isn't one, or names a member by another's id.
    """
    try:
        found = msgspec.msgpack.decode(data, type=Replica)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StateError(f"this is no copy of a swarm's state: {error}") from None
    for member in found.members:
        if not member.public_key.isascii() or member.peer != derive_peer_id(member.public_key):
            raise StateError(f"this copy of a swarm's state names {member.peer} by another's key")
    return found


def includes_version(
    version: Version, term: int, revision: int, lineage: Sequence[Version]
) -> bool:
    """Whether a state holds everything that was known in ``version``."""
    if version[0] == term:
        return version[1] <= revision
    if lineage and version[0] < lineage[0][0]:
        return True  # of a term that is no longer remembered
    return any(version[0] == old and version[1] <= last for old, last in lineage)


def next_lineage(lineage: Sequence[Version], term: int, revision: int) -> tuple[Version, ...]:
    """The lineage once another term begins."""
    return (*lineage, (term, revision))[-MAX_LINEAGE:]


def merge_replicas(ours: Replica, theirs: Replica, *, by_owner: bool) -> list[MemberRecord]:
    """Members to write down when a part of the swarm comes back that another peer had led.

    Who is new there is a member here too. Who was revoked there is revoked, but only an owner is
    believed in that, since only owners revoke. Invitations of that part have ended with it: one
    that ended here may be among them. What is served is as we have it.
    """
    known = {one.peer: one for one in ours.members}
    changed: list[MemberRecord] = []
    for other in theirs.members:
        mine = known.get(other.peer)
        if other.standing == "revoked":
            if by_owner and not (
                mine is not None and (mine.is_owner or mine.standing == "revoked")
            ):
                changed.append(replace(mine or other, standing="revoked", is_owner=False))
        elif other.standing == "member" and (mine is None or mine.standing == "left"):
            changed.append(replace(mine or other, standing="member", is_owner=False))
    return changed


class ReplicaSync:
    """What each peer has to be sent, by what its reports say that it holds."""

    def __init__(self) -> None:
        #: Peers that were asked for theirs, and when.
        self._asked_at: dict[str, float] = {}
        #: The version that a peer was sent last.
        self._sent: dict[str, tuple[Version, float]] = {}

    def drop_peer(self, peer: str) -> None:
        """A peer's connection is another one."""
        self._asked_at.pop(peer, None)
        self._sent.pop(peer, None)

    def has_asked(self, peer: str) -> bool:
        """Whether a peer was asked for what it knows of."""
        return peer in self._asked_at

    def plan_sync(
        self, peer: str, held: Version, ours: Version, lineage: Sequence[Version], now: float
    ) -> Literal["send", "ask"] | None:
        """What to do about a peer that holds ``held`` while the state is at ``ours``."""
        if held == ours:
            self._asked_at.pop(peer, None)
            return None
        if not includes_version(held, *ours, lineage):
            asked = self._asked_at.setdefault(peer, now)
            if asked == now:
                return "ask"
            if now - asked < RESEND_TIMEOUT:
                return None
        sent = self._sent.get(peer)
        if sent is not None and sent[0] == ours and now - sent[1] < RESEND_TIMEOUT:
            return None
        self._sent[peer] = ours, now
        return "send"
