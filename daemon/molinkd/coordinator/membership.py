"""Membership: the log, and the keys that may connect by it.

Members connect under their own keys, and holders of an invitation for a single message. A revoked
PC may connect for one reply, which tells it so. Every change is a signed entry that is stored
before the ZAP authenticator, which checks handshakes, learns of it.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from molink.errors import (
    NotAuthorized,
    Overloaded,
    PeerBanned,
    RequestError,
    Unavailable,
    VersionMismatch,
)
from molink.facts.identity import derive_peer_id
from molink.swarm.controller.records import MAX_PEERS, InvitationRecord, MemberRecord
from molink.swarm.membership.invitations import (
    JoinRateLimiter,
    check_lifetime,
    check_use,
    find_excess,
)
from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.versions import PeerVersion, explain_mismatch, own_version
from molink.wire.messages.base import Payload
from molink.wire.messages.control_plane import JoinRequest
from molink.wire.messages.instructions import PeerInfo, Revoked
from molink.wire.messages.membership import (
    INVITATION_PREFIX,
    AdmissionEntry,
    DepartureEntry,
    FoundingEntry,
    InvitationEndEntry,
    InvitationEntry,
    JoinEntry,
    NameEntry,
    SignedEntry,
    Statement,
    peer_of_key,
)
from molink.wire.messages.pairing import PairingOutcome
from molink.wire.signing import derive_public_key
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.coordinator.state_store import StateStore

#: Prefix of the ZAP user id of connections under a revoked member's key.
REVOKED_PREFIX = "revoked:"
#: Names that one PC may give itself after it has joined: they stay in the log.
MAX_NAMES = 8
#: After a revoked PC was told so, its connections are refused for this many seconds.
NOTIFY_INTERVAL = 30.0


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """What a change of the log did: records of peers that became members, and of those that were.

    ``is_new``: whether there were new entries at all.
    """

    added: tuple[MemberRecord, ...] = ()
    removed: tuple[MemberRecord, ...] = ()
    is_new: bool = False


class Membership:
    """Members and invitations, in step with the state and the authenticator."""

    def __init__(
        self, state: StateStore, authenticator: ZapAuthenticator, max_peers: int = MAX_PEERS
    ) -> None:
        self._state, self._authenticator = state, authenticator
        self._max_peers = max_peers
        self.log: MembershipLog = state.read_log()
        #: Everyone who ever joined, in order of joining.
        self.records: dict[str, MemberRecord] = {}
        #: Invitations that were not ended, by id.
        self.invitations: dict[str, InvitationRecord] = {}
        self._join_limiter = JoinRateLimiter(time.monotonic())
        #: When a notified revoked peer may connect again, by its id.
        self._notify_at: dict[str, float] = {}
        #: Keys that the authenticator knows, by user id.
        self._allowed: dict[str, str] = {}
        self._read_log()

    def authorize_all(self) -> None:
        """Tell the authenticator all keys that may connect."""
        self._allowed.clear()
        self._save_log(self.log.without_expired(time.time()))

    # --- the log -----------------------------------------------------------------------------

    def append_entries(self, entries: Sequence[SignedEntry], sender: str) -> MembershipChange:
        """Append entries that the member ``sender`` has signed, all or none.

        Raises:
            NotAuthorized: it signed none of them, or may not say this.
            RequestError: they have no effect.
            StateError: one is invalid.
            Unavailable: the swarm or the log is full.
            Overloaded: too many PCs join at this moment.
        """
        log = self.log.with_entries(entries)
        for one in entries:
            entry = one.decode()
            if isinstance(entry, (FoundingEntry, JoinEntry)) or (
                peer_of_key(entry.signer) != sender
            ):
                raise NotAuthorized(f"a {type(entry).__name__} of another PC")
            self._check_entry(entry, sender, log)
        if log.members == self.log.members and log.invitations == self.log.invitations:
            if log.owners != self.log.owners:
                return self._save_log(log)
            raise RequestError("this changes nothing: it was done before, or isn't this PC's to do")
        self._check_capacity(log)
        return self._save_log(log)

    def merge_log(self, other: MembershipLog) -> MembershipChange:
        """Add the entries of another part of the swarm.

        New members count against the rate at which PCs may join, by the member that admitted them.
        Beyond it, or if the swarm is full, nobody is admitted for now.
        """
        merged = self.log.merge_log(other).without_expired(time.time())
        joined = merged.branches.keys() - self.log.branches.keys()
        try:
            self._check_capacity(merged)
            for branch, number in Counter(merged.branches[peer] for peer in joined).items():
                for _ in range(number):
                    self._check_rate(branch)
        except (Overloaded, Unavailable):
            merged = self.log.merge_log(other.without_admissions())
        return self._save_log(merged)

    def _check_entry(self, entry: Statement, sender: str, log: MembershipLog) -> None:
        owner, now = sender in self.log.owners, time.time()
        match entry:
            case InvitationEntry():
                check_lifetime(entry, now, owner=owner)
                if len(find_excess(log, sender, now)) > 1:
                    raise Unavailable("this PC has too many unused invitations")
            case InvitationEndEntry(of=invitation):
                found = [one for one in self.log.invitations if one.hash == invitation]
                if not owner and (not found or found[0].creator != sender):
                    raise NotAuthorized.owner_only("revoke another PC's invitation")
            case AdmissionEntry():
                self._check_rate(sender)
                self._check_names(log)
            case NameEntry():
                if log.count_names(sender) > MAX_NAMES:
                    raise Unavailable("this PC has had too many names")
                self._check_names(log)
            case DepartureEntry():
                pass
            case _ if not owner:
                raise NotAuthorized.owner_only("do this")

    def _check_names(self, log: MembershipLog) -> None:
        """Check that a changed log leaves all members their names.

        Raises:
            RequestError: a wrong clock made the newcomer look as if it was here first.
        """
        for peer, known in self.log.members.items():
            after = log.members.get(peer, known)
            if after.name != known.name and after.own_name == known.own_name:
                raise RequestError(
                    f"{known.name} has this name, and the clocks of these PCs differ: set them, or "
                    "take another `--name`"
                )

    def _save_log(self, log: MembershipLog) -> MembershipChange:
        """Store a log, then let the authenticator and the records follow."""
        is_new = log.digest != self.log.digest or log.invitations != self.log.invitations
        if log is not self.log:
            self._state.save_log(log)
        self.log, before = log, self.records
        self._read_log()
        self._update_authenticator()
        were = {peer for peer, one in before.items() if one.standing == "member"}
        present = {peer for peer, one in self.records.items() if one.standing == "member"}
        return MembershipChange(
            tuple(one for peer, one in self.records.items() if peer in present - were),
            tuple(
                self.records.get(peer, replace(one, standing="left"))
                for peer, one in before.items()
                if peer in were - present
            ),
            is_new,
        )

    def _read_log(self) -> None:
        announced = self._state.read_announced()
        self.records = {one.peer: one for one in self.log.list_members(announced)}
        self.invitations = {one.id: one for one in self.log.list_invitations()}

    def _update_authenticator(self) -> None:
        now, wanted = time.monotonic(), dict[str, str]()
        for one in self.records.values():
            if one.standing == "member":
                wanted[one.peer] = one.public_key
            elif one.standing == "revoked" and self._notify_at.get(one.peer, now) <= now:
                self._notify_at.pop(one.peer, None)
                wanted[REVOKED_PREFIX + one.peer] = one.public_key
        wanted |= {one.id: one.public_key for one in self.invitations.values()}
        for user in self._allowed.keys() - wanted.keys():
            self._authenticator.deny_peer(user)
            self._join_limiter.drop_invitation(user)
        for user in wanted.keys() - self._allowed.keys():
            self._authenticator.allow_peer(wanted[user], user)
        self._allowed = wanted

    # --- invitations -------------------------------------------------------------------------

    def list_invitations(self, peer: str) -> list[InvitationRecord]:
        """The invitations and admissions that ``peer`` may see: all for an owner, else its own."""
        owner = self.records[peer].is_owner
        found = sorted(
            (*self.invitations.values(), *self.log.list_admissions()),
            key=lambda one: one.created_at,
        )
        return [one for one in found if owner or one.creator == peer]

    def purge_expired(self) -> None:
        """Remove expired invitations; let revoked peers be notified again."""
        log = self.log.without_expired(time.time())
        if log is not self.log:
            self._save_log(log)
        elif self._notify_at:
            self._update_authenticator()

    # --- members -----------------------------------------------------------------------------

    def join_by_invitation(
        self, invitation: str, message: JoinRequest
    ) -> tuple[MemberRecord, MembershipChange]:
        """Make the holder of an invitation a member, unless it is one.

        Raises:
            TokenError: the invitation has expired or is used up.
            PeerBanned: the peer was revoked.
            RequestError: the request isn't signed for this peer by this invitation, or takes
                another PC's name.
            Unavailable: the swarm is full.
            Overloaded: too many PCs join at this moment.
            VersionMismatch: its molink is incompatible.
        """
        unlike = explain_mismatch(PeerVersion(message.version, message.protocol), own_version())
        if unlike:
            raise VersionMismatch(unlike)
        record = self.invitations.get(invitation)
        signed, peer = self._decode_join(message, record)
        self._check_revoked(peer)
        known = self.records.get(peer)
        if known is not None and known.standing == "member":
            return known, MembershipChange()
        check_use(record, peer, time.time())
        log = self.log.with_entries([signed])
        self._check_names(log)
        self._check_capacity(log)
        self._check_rate(invitation)
        if not log.is_member(peer):
            raise RequestError("this PC has left by this invitation before; ask for another")
        change = self._save_log(log)
        return self.records[peer], change

    def _decode_join(
        self, message: JoinRequest, invitation: InvitationRecord | None
    ) -> tuple[SignedEntry, str]:
        entry = None if message.entry is None else message.entry.decode()
        if message.entry is None or not isinstance(entry, JoinEntry):
            raise RequestError("the request to join holds no signed entry")
        try:
            key, invited = derive_public_key(entry.verify_key), derive_public_key(entry.signer)
        except ValueError as error:
            raise RequestError(f"the request to join holds an invalid key: {error}") from None
        if key != message.public_key or (
            invitation is not None and invited != invitation.public_key
        ):
            raise RequestError("this key is not the joining PC's", param="public_key")
        return message.entry, derive_peer_id(key)

    def _check_revoked(self, peer: str) -> None:
        known = self.records.get(peer)
        if known is not None and known.standing == "revoked":
            raise PeerBanned(
                f"this PC was removed from the swarm. `molink un-revoke {known.name}` on an "
                "owner's PC readmits it"
            )

    def find_objection(self, public_key: str) -> PairingOutcome | None:
        """Why the holder of a key can't be admitted now; ``None`` if it can."""
        if any(one.public_key == public_key for one in self.invitations.values()):
            return "refused"
        peer = derive_peer_id(public_key)
        try:
            self._check_revoked(peer)
        except PeerBanned:
            return "revoked"
        known = self.records.get(peer)
        is_member = known is not None and known.standing == "member"
        return "full" if not is_member and len(self.log.branches) >= self._max_peers else None

    def _check_rate(self, source: str) -> None:
        wait = self._join_limiter.admit_join(source, time.monotonic())
        if wait:
            raise Overloaded("too many PCs join at this moment; try again in a few seconds", wait)

    def _check_capacity(self, log: MembershipLog) -> None:
        """Check that a changed log has no more members than there may be, or than there are."""
        members = len(self.log.branches)
        if len(log.branches) > max(members, self._max_peers):
            raise Unavailable(
                f"the swarm is full with {members} PCs. On an owner's PC, `molink revoke` an "
                "unused one, or start molink with a higher `max_peers`"
            )

    def record_announcement(self, member: PeerInfo) -> None:
        """Store what other peers are told about a member."""
        self._state.save_announced(member)
        known = self.records[member.peer]
        self.records[member.peer] = replace(known, name=member.name, announced=member)

    def prove_revoked(self) -> tuple[Revoked, bytes]:
        """The message for a revoked peer, with the log that proves it."""
        log = self.log.encode()
        return Revoked(swarm=self.log.swarm, payload=Payload("u8", (len(log),))), log

    def mark_notified(self, user: str) -> None:
        """Refuse a revoked peer, by its user id, for a while after it has been told."""
        self._notify_at[user.removeprefix(REVOKED_PREFIX)] = time.monotonic() + NOTIFY_INTERVAL
        self._update_authenticator()


def is_invitation_id(user: str) -> bool:
    """Whether a user id belongs to an invitation."""
    return user.startswith(INVITATION_PREFIX)


def is_revoked_id(user: str) -> bool:
    """Whether a user id belongs to a revoked peer."""
    return user.startswith(REVOKED_PREFIX)
