"""Decides from the entries of a membership log who is a member, an owner, or shut out.

The order of entries matters only if an invitation is used more often than allowed, or a peer was
admitted several times; then the first ones count. See ``docs/decisions/0030-hostile-members.md``.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from molink.swarm.membership.sanitize import add_number, sanitize_name
from molink.wire.messages.membership import (
    INVITATION_PREFIX,
    AdmissionEntry,
    DepartureEntry,
    FoundingEntry,
    InvitationEndEntry,
    InvitationEntry,
    JoinEntry,
    NameEntry,
    OwnershipEntry,
    ReadmissionEntry,
    RevocationEntry,
    Statement,
    peer_of_key,
)


@dataclass(frozen=True, slots=True)
class LoggedMember:
    """A peer that is or was a member.

    ``branch`` is its vote group. All descendants of one child of an owner form a group, and so do
    all peers that joined by one invitation: a member has one vote, for any number of PCs that it
    admits.
    """

    peer: str
    verify_key: str
    #: The unique display name, which no other member has or had: ``own_name``, or with a number
    #: added.
    name: str
    #: The name that it gave itself.
    own_name: str
    #: ``revoked`` if it, or a peer that admitted it, was revoked.
    standing: Literal["member", "left", "revoked"]
    is_owner: bool
    branch: str
    #: Hash of the join or admission that counts; empty for a founder.
    admission: str = ""
    #: Id of the invitation by which it joined; empty if there was none.
    invitation: str = ""
    #: The peer that created that invitation, or admitted it; empty for a founder.
    admitted_by: str = ""
    #: When it joined, in unix time; never before the peer that admitted it.
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class LoggedInvitation:
    """An invitation by a member, which may have expired or be used up."""

    hash: str
    entry: InvitationEntry
    creator: str
    is_ended: bool
    #: Valid joins: hash and entry.
    joins: tuple[tuple[str, JoinEntry], ...]

    @property
    def id(self) -> str:
        """The display id: ``invite:…``."""
        return INVITATION_PREFIX + self.hash[:16]


@dataclass(frozen=True, slots=True)
class ResolvedMembership:
    """The result of resolving a log; ``members`` are in the order of joining, founders first."""

    members: dict[str, LoggedMember]
    invitations: tuple[LoggedInvitation, ...]
    owners: frozenset[str]
    #: Hashes of the revocations that count, by peer.
    revocations: dict[str, tuple[str, ...]]


def resolve_membership(
    entries: Mapping[str, FoundingEntry | Statement],
) -> ResolvedMembership:
    """Resolve checked entries by hash, in the order of the log."""
    return _Resolver(entries).resolve()


@dataclass(slots=True)
class _Resolver:
    entries: Mapping[str, FoundingEntry | Statement]
    #: Position of each entry in the log.
    rank: dict[str, int] = field(default_factory=dict)
    founders: dict[str, LoggedMember] = field(default_factory=dict)
    #: Invitations by creator.
    invitations: dict[str, list[tuple[str, InvitationEntry]]] = field(default_factory=dict)
    admissions: dict[str, list[tuple[str, AdmissionEntry]]] = field(default_factory=dict)
    #: Joins by the invitation's verify key.
    joins: dict[str, list[tuple[str, JoinEntry]]] = field(default_factory=dict)
    #: Peers that left, and the hash of the join or admission that ended.
    departures: set[tuple[str, str]] = field(default_factory=set)
    #: Revocations (hash and signer) by revoked peer.
    revocations: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    #: Signers of readmissions, by revocation.
    readmissions: dict[str, list[str]] = field(default_factory=dict)
    #: Ends of invitations (signer, and the peers that stay) by invitation.
    ends: dict[str, list[tuple[str, frozenset[str]]]] = field(default_factory=dict)
    #: By owner, the peers that it made owners.
    ownerships: dict[str, list[str]] = field(default_factory=dict)
    #: Every peer that has ever been an owner, by its distance from a founder.
    depths: dict[str, int] = field(default_factory=dict)
    owners: set[str] = field(default_factory=set)
    #: By peer: time, hash and name of its statements about its name.
    renamings: dict[str, list[tuple[float, str, str]]] = field(default_factory=dict)
    #: Times since which peers have used a name.
    claims: dict[tuple[str, str], float] = field(default_factory=dict)
    found: dict[str, LoggedMember] = field(default_factory=dict)

    def resolve(self) -> ResolvedMembership:
        for number, (entry_hash, entry) in enumerate(self.entries.items()):
            self.rank[entry_hash] = number
            self._index_entry(entry_hash, entry)
        self._find_owners()
        invitations = self._find_members()
        self._find_descendants_of_revoked()
        self._assign_names()
        members = sorted(self.found.values(), key=lambda one: self.rank.get(one.admission, -1))
        invitations.sort(key=lambda one: self.rank[one.hash])
        return ResolvedMembership(
            {one.peer: one for one in members},
            tuple(invitations),
            frozenset(self.owners),
            {peer: self._live_revocations(peer) for peer in self.revocations},
        )

    def _index_entry(self, entry_hash: str, entry: FoundingEntry | Statement) -> None:
        if isinstance(entry, FoundingEntry):
            for one in entry.founders:
                peer = peer_of_key(one.verify_key)
                name = sanitize_name(one.name, peer)
                self.founders[peer] = LoggedMember(
                    peer, one.verify_key, name, name, "member", True, peer
                )
            return
        signer = entry.signer if isinstance(entry, JoinEntry) else peer_of_key(entry.signer)
        match entry:
            case InvitationEntry():
                self.invitations.setdefault(signer, []).append((entry_hash, entry))
            case JoinEntry():
                self.joins.setdefault(signer, []).append((entry_hash, entry))
            case AdmissionEntry():
                self.admissions.setdefault(signer, []).append((entry_hash, entry))
            case NameEntry():
                name = sanitize_name(entry.name, signer)
                said = _order_time(entry.at), entry_hash, name
                self.renamings.setdefault(signer, []).append(said)
            case DepartureEntry():
                self.departures.add((signer, entry.of))
            case RevocationEntry():
                self.revocations.setdefault(entry.peer, []).append((entry_hash, signer))
            case ReadmissionEntry():
                self.readmissions.setdefault(entry.of, []).append(signer)
            case InvitationEndEntry():
                self.ends.setdefault(entry.of, []).append((signer, frozenset(entry.kept)))
            case OwnershipEntry():
                self.ownerships.setdefault(signer, []).append(entry.peer)

    def _find_owners(self) -> None:
        self.depths = dict.fromkeys(self.founders, 0)
        queue = deque(self.founders)
        while queue:
            owner = queue.popleft()
            for peer in self.ownerships.get(owner, ()):
                if peer not in self.depths:
                    self.depths[peer] = self.depths[owner] + 1
                    queue.append(peer)
        self.owners = set(self.founders)
        named = set(self.founders)
        while named:  # each round may readmit further owners
            named = {
                peer
                for owner in self.owners
                for peer in self.ownerships.get(owner, ())
                if peer not in self.owners and not self._live_revocations(peer)
            }
            self.owners |= named

    def _live_revocations(self, peer: str) -> tuple[str, ...]:
        """Return the hashes of the revocations of ``peer`` that count.

        Only revocations by owners count, and for an owner only those by owners nearer to a founder.
        They outlast their signer's ownership; readmissions do not.
        """
        depth = self.depths.get(peer, len(self.depths))
        entitled = {owner for owner, above in self.depths.items() if above < depth}
        enders = self.owners & entitled
        return tuple(
            entry_hash
            for entry_hash, signer in self.revocations.get(peer, ())
            if signer in entitled and enders.isdisjoint(self.readmissions.get(entry_hash, ()))
        )

    def _find_members(self) -> list[LoggedInvitation]:
        """Walk from the founders to all peers that members admitted; return the invitations."""
        self.found = dict(self.founders)
        invitations: list[LoggedInvitation] = []
        # The earliest admission of a peer counts, so that nobody can claim it by a later one.
        queue = [(-1, one.peer, one) for one in self.founders.values()]
        while queue:
            _, peer, found = heapq.heappop(queue)
            self._claim_name(found, found.own_name, found.since)
            known = self.found.get(peer)
            if found is not known and known is not None:
                if (known.standing, found.standing) == ("left", "member"):
                    self.found[peer] = found
                    invitations += self._resolve_invitations(peer)
                continue
            self.found[peer] = found
            if found.standing == "revoked":
                continue
            issued = self._resolve_invitations(peer)
            if found.standing == "member":
                invitations += issued
            for child in self._list_children(found, issued):
                heapq.heappush(queue, (self.rank[child.admission], child.peer, child))
        return invitations

    def _find_descendants_of_revoked(self) -> None:
        queue = deque(one for one in self.found.values() if one.standing == "revoked")
        while queue:
            parent = queue.popleft()
            for child in self._list_children(parent, self._resolve_invitations(parent.peer)):
                self._claim_name(child, child.own_name, child.since)
                if child.peer not in self.found:
                    self.found[child.peer] = child
                    queue.append(child)

    def _claim_name(self, member: LoggedMember, name: str, since: float) -> None:
        claim = member.peer, name
        self.claims[claim] = min(since, self.claims.get(claim, since))

    def _assign_names(self) -> None:
        """Give each claim a unique name, earlier claims first.

        A name stays when other members join, leave or are revoked, since their claims remain.
        """
        for peer, renamings in self.renamings.items():
            if (member := self.found.get(peer)) is not None:
                for at, _, name in renamings:
                    self._claim_name(member, name, max(at, member.since))
                self.found[peer] = replace(member, own_name=max(renamings)[2])
        given: dict[tuple[str, str], str] = {}
        numbers: dict[str, int] = {}
        taken: set[str] = set()
        for _, peer, name in sorted((since, *claim) for claim, since in self.claims.items()):
            unique = name
            while unique in taken:
                numbers[name] = numbers.get(name, 1) + 1
                unique = add_number(name, numbers[name])
            taken.add(unique)
            given[peer, name] = unique
        for peer, member in self.found.items():
            self.found[peer] = replace(member, name=given[peer, member.own_name])

    def _resolve_invitations(self, creator: str) -> list[LoggedInvitation]:
        found: list[LoggedInvitation] = []
        for entry_hash, entry in self.invitations.get(creator, ()):
            ends = [
                kept
                for signer, kept in self.ends.get(entry_hash, ())
                if signer == creator or signer in self.depths
            ]
            joins = tuple(self._count_joins(entry, ends))
            found.append(LoggedInvitation(entry_hash, entry, creator, bool(ends), joins))
        return found

    def _count_joins(
        self, invitation: InvitationEntry, ends: Iterable[frozenset[str]]
    ) -> Iterator[tuple[str, JoinEntry]]:
        """Return the joins that count: those of the first ``max_uses`` peers."""
        used: set[str] = set()
        for entry_hash, join in self.joins.get(invitation.verify_key, ()):
            peer = peer_of_key(join.verify_key)
            if all(peer in kept for kept in ends) and (
                peer in used or len(used) < invitation.max_uses
            ):
                used.add(peer)
                yield entry_hash, join

    def _list_children(
        self, parent: LoggedMember, invitations: list[LoggedInvitation]
    ) -> Iterator[LoggedMember]:
        for invitation in invitations:
            for entry_hash, join in invitation.joins:
                yield self._make_child(parent, entry_hash, join, invitation)
        for entry_hash, admission in self.admissions.get(parent.peer, ()):
            yield self._make_child(parent, entry_hash, admission, None)

    def _make_child(
        self,
        parent: LoggedMember,
        entry_hash: str,
        entry: JoinEntry | AdmissionEntry,
        invitation: LoggedInvitation | None,
    ) -> LoggedMember:
        peer = peer_of_key(entry.verify_key)
        name = sanitize_name(entry.name, peer)
        by = "" if invitation is None else invitation.id
        invited_at = parent.since if invitation is None else invitation.entry.created_at
        standing: Literal["member", "left", "revoked"] = "member"
        if parent.standing == "revoked" or self._live_revocations(peer):
            standing = "revoked"
        elif (peer, entry_hash) in self.departures:
            standing = "left"
        is_owner = peer in self.owners
        branch = parent.branch
        if is_owner or (parent.is_owner and not by):
            branch = peer
        elif parent.is_owner:
            branch = by
        return LoggedMember(
            peer,
            entry.verify_key,
            name,
            name,
            standing,
            is_owner,
            branch,
            entry_hash,
            by,
            parent.peer,
            max(parent.since, _order_time(invited_at), _order_time(entry.at)),
        )


def _order_time(at: float) -> float:
    """Return a stated time for comparison; an invalid time counts as the latest."""
    return at if math.isfinite(at) else math.inf
