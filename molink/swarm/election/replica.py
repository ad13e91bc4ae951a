"""Replicas of the coordinator's state, which let another PC take over.

A *replica* is the whole state in one message; it is small and seldom changes. A change raises the
revision, a new leader raises the term. The *lineage* lists the last revision of each earlier term.
So a peer's replica either belongs to the own history, or contains changes that the own replica
lacks, since another peer led a part of the swarm during a partition. Then only its membership log
is merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from molink.errors import StateError
from molink.facts.scalars import Count, Text
from molink.swarm.controller.records import DesiredModel, MemberRecord, PipelineRecord
from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.sanitize import sanitize_name
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.membership import MAX_ENTRIES, Entries

#: Maximum bytes of an encoded replica, the limit of a message's payload.
MAX_REPLICA_BYTES = 256 << 10
#: Maximum earlier terms in the lineage.
MAX_LINEAGE = 64
#: Seconds after which a request for a replica, or an unconfirmed replica, is sent again.
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
    #: The signed membership. All other fields are claims of the coordinator that sent them.
    log: MembershipLog
    #: The information last sent to peers about each other.
    announced: tuple[PeerInfo, ...]
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
        """Members in the order in which they become leader, which is the order of joining."""
        return tuple(self.log.branches)

    @property
    def members(self) -> list[MemberRecord]:
        """All peers that are or were members, in order of joining."""
        return self.log.list_members({one.peer: one for one in self.announced})

    def encode(self) -> bytes:
        """Encode as msgpack.

        Raises:
            StateError: it exceeds :data:`MAX_REPLICA_BYTES`.
        """
        present = self.log.branches
        body = _EncodedReplica(
            swarm=self.swarm,
            name=self.name,
            max_peers=self.max_peers,
            term=self.term,
            revision=self.revision,
            lineage=self.lineage,
            log=self.log.entries,
            announced=tuple(one for one in self.announced if one.peer in present),
            models=self.models,
            pipelines=self.pipelines,
            last_numbers=self.last_numbers,
        )
        data = msgspec.msgpack.encode(body)
        if len(data) > MAX_REPLICA_BYTES:
            raise StateError(f"the swarm's state has {len(data)} bytes, too many to replicate")
        return data


class _EncodedReplica(msgspec.Struct, frozen=True, kw_only=True):
    swarm: Text
    name: Text
    max_peers: Count
    term: Count
    revision: Count
    lineage: Annotated[tuple[Version, ...], msgspec.Meta(max_length=MAX_LINEAGE)]
    log: Entries
    announced: Annotated[tuple[PeerInfo, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
    models: tuple[DesiredModel, ...]
    pipelines: tuple[PipelineRecord, ...]
    last_numbers: tuple[Count, Count]


def decode_replica(data: bytes | memoryview, known: MembershipLog | None = None) -> Replica:
    """Decode a replica and check its membership log. Entries in ``known`` are not checked again.

    Raises:
        StateError: it is invalid.
    """
    try:
        found = msgspec.msgpack.decode(data, type=_EncodedReplica)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StateError(f"not a replica of a swarm's state: {error}") from None
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    fields["name"] = sanitize_name(found.name, found.swarm)
    fields["log"] = MembershipLog.check_entries(found.swarm, found.log, known)
    return Replica(**fields)


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
    """Return the lineage after another term starts."""
    return (*lineage, (term, revision))[-MAX_LINEAGE:]


class ReplicaSync:
    """Plans the replication to each peer, from the version and the log digest in its reports."""

    def __init__(self) -> None:
        #: Times at which peers were asked for their replica, and peers whose answer is due.
        self._asked_at: dict[str, float] = {}
        self._awaited: set[str] = set()
        #: Version last sent to each peer, and the time.
        self._sent: dict[str, tuple[Version, float]] = {}

    def drop_peer(self, peer: str) -> None:
        """Start again with a peer that reconnected."""
        self._asked_at.pop(peer, None)
        self._awaited.discard(peer)
        self._sent.pop(peer, None)

    def accept_answer(self, peer: str) -> bool:
        """Whether a replica of ``peer`` is the answer to a request; there is one per request."""
        awaited = peer in self._awaited
        self._awaited.discard(peer)
        return awaited

    def plan_sync(
        self,
        peer: str,
        held: tuple[Version, str],
        ours: tuple[Version, str],
        lineage: Sequence[Version],
        now: float,
    ) -> Literal["send", "ask"] | None:
        """Plan the action for a peer that holds a replica of a version and log digest."""
        if held == ours:
            return None
        same_version = held[0] == ours[0]  # and other entries
        if same_version or not includes_version(held[0], *ours[0], lineage):
            asked = self._asked_at.setdefault(peer, now)
            if asked == now:
                self._awaited.add(peer)
                return "ask"
            if same_version or (peer in self._awaited and now - asked < RESEND_TIMEOUT):
                return None
        sent = self._sent.get(peer)
        if sent is not None and sent[0] == ours[0] and now - sent[1] < RESEND_TIMEOUT:
            return None
        self._sent[peer] = ours[0], now
        return "send"
