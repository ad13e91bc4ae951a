"""Replicas of the coordinator's state, which let another PC take over.

A *replica* is the whole state in one message; it is small and seldom changes. A change raises the
revision, a new leader the term. The *lineage* names the last revision of each earlier term. So a
peer's replica is either part of our history, or contains changes that ours lacks: then another peer
led a part of the swarm during a partition.
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
from molink.swarm.membership.sanitize import sanitize_name

#: Bytes of an encoded replica, the limit of a message's payload.
MAX_REPLICA_BYTES = 256 << 10
#: Earlier terms in the lineage.
MAX_LINEAGE = 64
#: Former members in an encoded replica; beyond these only the revoked ones.
MAX_FORMER_MEMBERS = 128
#: Seconds until a request for a replica, or an unconfirmed replica, is sent again.
RESEND_TIMEOUT = 5.0

#: A term, and a revision in it.
Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Replica:
    """The coordinator's state, except its own key, port and addresses."""

    swarm: str
    name: str
    max_peers: int
    term: int
    revision: int
    #: Earlier terms, oldest first, with the last revision of each.
    lineage: tuple[Version, ...]
    members: tuple[MemberRecord, ...]
    invitations: tuple[InvitationRecord, ...]
    models: tuple[DesiredModel, ...]
    pipelines: tuple[PipelineRecord, ...]
    #: The highest pipeline number and epoch ever used.
    last_numbers: tuple[int, int]

    @property
    def version(self) -> Version:
        """Orders replicas of one lineage."""
        return self.term, self.revision

    @property
    def order(self) -> tuple[str, ...]:
        """Members in the order in which they become leader: that of joining."""
        return tuple(one.peer for one in self.members if one.standing == "member")

    def encode(self) -> bytes:
        """Encode as msgpack.

        Raises:
            StateError: it exceeds :data:`MAX_REPLICA_BYTES`.
        """
        past = [one.peer for one in self.members if one.standing == "left"]
        dropped = set(past[:-MAX_FORMER_MEMBERS])
        kept = tuple(one for one in self.members if one.peer not in dropped)
        data = msgspec.msgpack.encode(replace(self, members=kept))
        if len(data) > MAX_REPLICA_BYTES:
            raise StateError(f"the swarm's state has {len(data)} bytes, too many to replicate")
        return data


def decode_replica(data: bytes | memoryview) -> Replica:
    """Decode a replica, and sanitize its names.

    Raises:
        StateError: it is invalid, or a member's id doesn't match its key.
    """
    try:
        found = msgspec.msgpack.decode(data, type=Replica)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StateError(f"not a replica of a swarm's state: {error}") from None
    for member in found.members:
        if not member.public_key.isascii() or member.peer != derive_peer_id(member.public_key):
            raise StateError(f"the replica names {member.peer} with another peer's key")
    name = sanitize_name(found.name, found.swarm)
    return replace(found, name=name, members=tuple(map(_sanitize_member, found.members)))


def _sanitize_member(member: MemberRecord) -> MemberRecord:
    announced = member.announced
    if announced is not None:
        name = sanitize_name(announced.name, member.peer)
        announced = msgspec.structs.replace(announced, name=name)
    return replace(member, name=sanitize_name(member.name, member.peer), announced=announced)


def includes_version(
    version: Version, term: int, revision: int, lineage: Sequence[Version]
) -> bool:
    """Whether the state at this term and revision includes everything in ``version``."""
    if version[0] == term:
        return version[1] <= revision
    if lineage and version[0] < lineage[0][0]:
        return True  # older than the lineage
    return any(version[0] == old and version[1] <= last for old, last in lineage)


def next_lineage(lineage: Sequence[Version], term: int, revision: int) -> tuple[Version, ...]:
    """The lineage after another term starts."""
    return (*lineage, (term, revision))[-MAX_LINEAGE:]


def merge_replicas(ours: Replica, theirs: Replica, *, by_owner: bool) -> list[MemberRecord]:
    """Member records to change after a partition heals.

    New members of the other part become members here. Its revocations count only if an owner
    reports them (``by_owner``), since only owners revoke. Its invitations end, as one that was
    revoked here may be among them. The desired models stay ours.
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
    """Plans the replication to each peer, by the version in its reports."""

    def __init__(self) -> None:
        #: When peers were asked for their replica.
        self._asked_at: dict[str, float] = {}
        #: Version last sent to each peer, and when.
        self._sent: dict[str, tuple[Version, float]] = {}

    def drop_peer(self, peer: str) -> None:
        """Start over with a peer that reconnected."""
        self._asked_at.pop(peer, None)
        self._sent.pop(peer, None)

    def has_asked(self, peer: str) -> bool:
        """Whether a peer was asked for its replica."""
        return peer in self._asked_at

    def plan_sync(
        self, peer: str, held: Version, ours: Version, lineage: Sequence[Version], now: float
    ) -> Literal["send", "ask"] | None:
        """What to do for a peer that holds version ``held`` while the state is at ``ours``."""
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
