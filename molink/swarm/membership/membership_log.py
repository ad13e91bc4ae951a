"""The membership log: signed entries that say who belongs to the swarm.

Every PC keeps all entries and checks them itself, regardless of their sender. Entries refer to
earlier ones by hash and never change. The merged log of two PCs is the union of their entries, even
after a partition. See ``docs/decisions/0030-hostile-members.md``.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from molink.errors import StateError, Unavailable
from molink.swarm.controller.records import InvitationRecord, InvitationUse, MemberRecord
from molink.swarm.membership.membership_rules import (
    LoggedInvitation,
    LoggedMember,
    ResolvedMembership,
    resolve_membership,
)
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.membership import (
    INVITATION_PREFIX,
    MAX_ENTRIES,
    SWARM_ID_DIGITS,
    AdmissionEntry,
    Entries,
    Founder,
    FoundingEntry,
    InvitationEndEntry,
    InvitationEntry,
    JoinEntry,
    NameEntry,
    OwnershipEntry,
    SignedEntry,
    Statement,
    check_signature,
    peer_of_key,
)
from molink.wire.signing import derive_public_key

#: Maximum bytes of a log, of its entries not signed by owners, of one such member's entries, and of
#: the joins by one invitation. A replica has room for the log and the rest of the state.
MAX_BYTES = 192 << 10
MAX_UNOWNED = 144 << 10
MAX_SIGNED = 16 << 10
MAX_JOINS = 64 << 10


class MembershipLog:
    """The checked entries that one PC knows. Immutable: a change creates another log."""

    def __init__(self, swarm: str, entries: Mapping[str, SignedEntry] | None = None) -> None:
        """``entries`` are checked entries by hash."""
        self.swarm = swarm
        self._entries = dict(entries or {})

    @classmethod
    def found_swarm(cls, founders: Sequence[Founder], nonce: bytes) -> "MembershipLog":
        """Create the log of a new swarm; ``nonce`` is random, ``u8 [16]``."""
        body = msgspec.msgpack.encode(FoundingEntry(nonce, tuple(founders)))
        entry = SignedEntry(body, b"")
        return cls(entry.hash[:SWARM_ID_DIGITS], {entry.hash: entry})

    @classmethod
    def check_entries(
        cls, swarm: str, entries: Iterable[SignedEntry], known: "MembershipLog | None" = None
    ) -> "MembershipLog":
        """Create a log of these entries only, and check those that are not in ``known``.

        Entries signed by keys that nobody admitted are left out.

        Raises:
            StateError: one is invalid, or the founding of ``swarm`` is missing.
        """
        checked = cls(swarm)._check_new(entries, {} if known is None else known._entries)
        log = cls(swarm, checked)
        if not any(isinstance(one, FoundingEntry) for one in log._decoded.values()):
            raise StateError(f"the log lacks the founding of swarm {swarm}")
        return cls(swarm, {key: one for key, one in checked.items() if key in log._signed_by_known})

    @classmethod
    def decode(cls, swarm: str, data: bytes | memoryview) -> "MembershipLog":
        """Decode a log encoded by :meth:`encode`.

        Raises:
            StateError: it is invalid.
        """
        try:
            entries = msgspec.msgpack.decode(data, type=Entries)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StateError(f"not a membership log: {error}") from None
        return cls.check_entries(swarm, entries)

    def encode(self) -> bytes:
        """Encode the entries as msgpack."""
        return msgspec.msgpack.encode(self.entries)

    def with_entries(self, entries: Iterable[SignedEntry]) -> "MembershipLog":
        """Return this log followed by the entries that it lacks.

        Raises:
            StateError: one is invalid.
            Unavailable: the log is full.
        """
        added = self._check_new(entries, {})
        if not added:
            return self
        log = MembershipLog(self.swarm, self._entries | added)
        signed = log._sum_signed(log._entries)
        for one in map(log._decoded.__getitem__, added):
            if isinstance(one, FoundingEntry):
                continue
            if signed[peer_of_key(one.signer)] > _limit_of(one):
                raise Unavailable("this PC has signed too much for the membership log")
        is_full = len(log._entries) > MAX_ENTRIES or log._size > MAX_BYTES
        if is_full or signed.total() > MAX_UNOWNED:
            raise Unavailable("the swarm's membership log is full. Revoke PCs that are not needed")
        return log

    def merge_log(self, other: "MembershipLog") -> "MembershipLog":
        """Return this log followed by the entries of another log of the same swarm that it lacks.

        Entries signed by keys that nobody admitted are left out and, if the bounds leave no room
        for all, those that no owner signed.
        """
        assert other.swarm == self.swarm
        missing = {key: one for key, one in other._entries.items() if key not in self._entries}
        if not missing:
            return self
        merged = MembershipLog(self.swarm, self._entries | missing)
        signed, kept = merged._sum_signed(self._entries), set[str]()
        number, taken = len(self._entries), self._size
        # Owners' entries come first if room is scarce.
        by_owners = [key for key in missing if merged._is_signed_by_owner(key)]
        for key in dict.fromkeys((*by_owners, *missing)):
            entry, size = other._decoded[key], missing[key].size
            if isinstance(entry, FoundingEntry) or key not in merged._signed_by_known:
                continue
            if key not in by_owners:
                signer = peer_of_key(entry.signer)
                own, total = signed[signer] + size, signed.total() + size
                if own > _limit_of(entry) or total > MAX_UNOWNED:
                    continue
                signed[signer] = own
            number, taken = number + 1, taken + size
            if number > MAX_ENTRIES or taken > MAX_BYTES:
                break
            kept.add(key)
        added = {key: one for key, one in missing.items() if key in kept}
        return MembershipLog(self.swarm, self._entries | added)

    def without_expired(self, now: float) -> "MembershipLog":
        """Return this log without invitations that expired unused, and without their ends."""
        expired = {
            one.hash
            for one in self.invitations
            if not one.joins and 0 < one.entry.expires_at <= now
        }
        if not expired:
            return self
        ends = {
            entry_hash
            for entry_hash, one in self._decoded.items()
            if isinstance(one, InvitationEndEntry) and one.of in expired
        }
        dropped = expired | ends
        kept = {key: one for key, one in self._entries.items() if key not in dropped}
        return MembershipLog(self.swarm, kept)

    def without_admissions(self) -> "MembershipLog":
        """Return this log without the entries that admit PCs."""
        kept = {
            key: self._entries[key]
            for key, one in self._decoded.items()
            if not isinstance(one, (InvitationEntry, JoinEntry, AdmissionEntry))
        }
        return MembershipLog(self.swarm, kept)

    def _check_new(
        self, entries: Iterable[SignedEntry], known: Mapping[str, SignedEntry]
    ) -> dict[str, SignedEntry]:
        """Check the entries that this log lacks; return them by hash."""
        added: dict[str, SignedEntry] = {}
        for one in entries:
            entry_hash = one.hash
            if entry_hash not in self._entries and entry_hash not in added:
                if known.get(entry_hash) != one:
                    check_signature(self.swarm, one)
                added[entry_hash] = one
        return added

    @property
    def _size(self) -> int:
        return sum(one.size for one in self._entries.values())

    def _sum_signed(self, entries: Mapping[str, SignedEntry]) -> Counter[str]:
        """Sum the bytes of entries by the peer or invitation that signed them, except owners."""
        sums = Counter[str]()
        for key, one in entries.items():
            entry = self._decoded[key]
            if not isinstance(entry, FoundingEntry) and not self._is_signed_by_owner(key):
                sums[peer_of_key(entry.signer)] += one.size
        return sums

    def _is_signed_by_owner(self, entry_hash: str) -> bool:
        entry = self._decoded[entry_hash]
        return isinstance(entry, FoundingEntry) or peer_of_key(entry.signer) in self.owners

    @cached_property
    def _signed_by_known(self) -> frozenset[str]:
        """Return hashes of entries whose key was admitted, or is an invitation's, by any member."""
        known: set[str] = set()
        found: set[str] = set()
        before = -1
        while len(found) > before:  # in any order
            before = len(found)
            for key, one in self._decoded.items():
                if isinstance(one, FoundingEntry):
                    known.update(peer_of_key(founder.verify_key) for founder in one.founders)
                elif peer_of_key(one.signer) not in known:
                    continue
                elif isinstance(one, (InvitationEntry, JoinEntry, AdmissionEntry)):
                    known.add(peer_of_key(one.verify_key))
                elif isinstance(one, OwnershipEntry):
                    known.add(one.peer)
                found.add(key)
        return frozenset(found)

    # --- contents ----------------------------------------------------------------------------

    @property
    def entries(self) -> tuple[SignedEntry, ...]:
        """All entries in order."""
        return tuple(self._entries.values())

    @cached_property
    def digest(self) -> str:
        """Digest of 16 hexadecimal digits; equal for logs that differ at most in invitations."""
        compared = (
            key for key, one in self._decoded.items() if not isinstance(one, InvitationEntry)
        )
        joined = "".join(sorted(compared)).encode("ascii")
        return hashlib.blake2b(joined, digest_size=8).hexdigest()

    @cached_property
    def _decoded(self) -> dict[str, FoundingEntry | Statement]:
        return {entry_hash: one.decode() for entry_hash, one in self._entries.items()}

    @cached_property
    def _resolved(self) -> ResolvedMembership:
        return resolve_membership(self._decoded)

    @property
    def members(self) -> Mapping[str, LoggedMember]:
        """All peers that are or were members, in the order in which they joined."""
        return self._resolved.members

    @property
    def invitations(self) -> tuple[LoggedInvitation, ...]:
        """Invitations of current members, in order, including ended and expired ones."""
        return self._resolved.invitations

    @property
    def owners(self) -> frozenset[str]:
        """Ids of the current owners."""
        return self._resolved.owners

    def revocations_of(self, peer: str) -> tuple[str, ...]:
        """Return the hashes of the revocations of ``peer`` that count."""
        return self._resolved.revocations.get(peer, ())

    def is_member(self, peer: str) -> bool:
        """Whether a peer is a current member."""
        found = self.members.get(peer)
        return found is not None and found.standing == "member"

    def find_named(self, name_or_id: str) -> LoggedMember | None:
        """Return the current or former member with an id or name."""
        named = (one for one in self.members.values() if one.name == name_or_id)
        return self.members.get(name_or_id) or next(named, None)

    def count_names(self, peer: str) -> int:
        """Count the names that a peer has given itself since its admission."""
        named = (one for one in self._decoded.values() if isinstance(one, NameEntry))
        return sum(peer_of_key(one.signer) == peer for one in named)

    @property
    def branches(self) -> dict[str, str]:
        """The vote group of each current member."""
        return {one.peer: one.branch for one in self.members.values() if one.standing == "member"}

    # --- records -----------------------------------------------------------------------------

    def list_members(self, announced: Mapping[str, PeerInfo]) -> list[MemberRecord]:
        """List all peers that are or were members, with the information sent about them, by peer
        id.
        """
        return [
            _make_record(one, announced.get(one.peer)) for one in self._resolved.members.values()
        ]

    def list_invitations(self) -> list[InvitationRecord]:
        """List invitations that nobody has ended, including expired and used-up ones."""
        found: list[InvitationRecord] = []
        for one in self.invitations:
            if one.is_ended:
                continue
            used_by: dict[str, InvitationUse] = {}
            for _, join in one.joins:
                peer = peer_of_key(join.verify_key)
                used_by.setdefault(peer, InvitationUse(peer, join.at))
            found.append(
                InvitationRecord(
                    one.id,
                    derive_public_key(one.entry.verify_key),
                    one.entry.expires_at,
                    one.creator,
                    one.entry.created_at,
                    one.entry.max_uses,
                    tuple(used_by.values()),
                )
            )
        return found

    def list_admissions(self) -> list[InvitationRecord]:
        """List admissions of members without an invitation, in the form of used invitations."""
        found: list[InvitationRecord] = []
        for one in self.members.values():
            entry = self._decoded.get(one.admission)
            if one.standing == "member" and isinstance(entry, AdmissionEntry):
                use = InvitationUse(one.peer, entry.at)
                id = INVITATION_PREFIX + one.admission[:16]
                found.append(InvitationRecord(id, "", 0, one.admitted_by, entry.at, used_by=(use,)))
        return found


def _make_record(member: LoggedMember, announced: PeerInfo | None) -> MemberRecord:
    key = derive_public_key(member.verify_key)
    if announced is not None and announced.public_key != key:
        announced = None
    if announced is not None:
        announced = msgspec.structs.replace(announced, name=member.name)
    return MemberRecord(
        member.peer,
        key,
        member.name,
        member.is_owner,
        member.standing,
        announced,
        member.invitation,
    )


def _limit_of(entry: Statement) -> int:
    return MAX_JOINS if isinstance(entry, JoinEntry) else MAX_SIGNED
