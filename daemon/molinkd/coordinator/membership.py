"""Membership: members, invitations, and the keys that may connect.

Members connect under their own keys, and holders of an invitation for a single message. A revoked
PC may connect for one reply, which tells it so. Every change of members and invitations is made
here and stored before the ZAP authenticator, which checks handshakes, learns of it.
"""

import time
from collections.abc import Iterable
from dataclasses import replace

from molink.errors import (
    NotAuthorized,
    Overloaded,
    PeerBanned,
    RequestError,
    Unavailable,
    VersionMismatch,
)
from molink.facts.identity import derive_peer_id
from molink.swarm.controller.records import MAX_PEERS, InvitationRecord, MemberRecord, Standing
from molink.swarm.controller.registry import Registry
from molink.swarm.membership.invitations import (
    INVITATION_PREFIX,
    Invitations,
    JoinRateLimiter,
)
from molink.swarm.membership.join_token import ContactPoint
from molink.swarm.membership.sanitize import sanitize_name
from molink.swarm.membership.versions import PeerVersion, explain_mismatch, own_version
from molink.wire.messages.control_plane import JoinRequest
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.pairing import PairingOutcome
from molink.wire.sockets.key_pair import KeyPair, is_public_key
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.coordinator.options import format_address
from molinkd.coordinator.state_store import StateStore

#: Prefix of the ZAP user id of connections under a revoked member's key.
REVOKED_PREFIX = "revoked:"
#: Contact points in a token, which people have to paste.
MAX_CONTACT_POINTS = 2
#: After a revoked PC was told so, its connections are refused for this many seconds.
NOTIFY_INTERVAL = 30.0
#: Bucket of the join rate for paired PCs, and seconds for which their invitation is stored.
_PAIRING_BUCKET = "pairing"
_PAIRED_TTL = 30 * 86400.0


class Membership:
    """Members and invitations, in step with the state and the authenticator."""

    def __init__(
        self,
        state: StateStore,
        authenticator: ZapAuthenticator,
        own_key: str,
        trusted: Iterable[tuple[str, str]] = (),
        max_peers: int = MAX_PEERS,
    ) -> None:
        """``trusted`` are owners, by key and name.

        Raises:
            RequestError: a key is invalid.
        """
        self._state, self._authenticator, self._own_key = state, authenticator, own_key
        self._max_peers = max_peers
        for public_key, name in trusted:
            peer = derive_peer_id(_validate_key(public_key))
            state.save_member(
                MemberRecord(peer, public_key, sanitize_name(name, peer), is_owner=True)
            )
        #: Everyone who ever joined, in order of joining.
        self.records = {member.peer: member for member in state.read_members()}
        self.invitations = Invitations(state.read_invitations())
        self._join_limiter = JoinRateLimiter(time.monotonic())
        #: When a notified revoked peer may connect again, by its id.
        self._notify_at: dict[str, float] = {}

    def authorize_all(self) -> None:
        """Tell the authenticator all keys that may connect."""
        self.purge_expired()
        for member in self.records.values():
            if member.standing == "member":
                self._authenticator.allow_peer(member.public_key, member.peer)
            elif member.standing == "revoked":
                self._allow_notice(member.peer)
        for invitation in self.invitations:
            self._authenticator.allow_peer(invitation.public_key, invitation.id)

    # --- invitations -------------------------------------------------------------------------

    def create_invitation(
        self, creator: str, ttl: float, uses: int
    ) -> tuple[str, InvitationRecord]:
        """Create an invitation for ``uses`` PCs, valid for ``ttl`` seconds; returns key and record.

        Raises:
            UsageError: ``ttl`` or ``uses`` is out of range.
            NotAuthorized: ``creator`` may not create one that is valid for so long.
        """
        owner = self.records[creator].is_owner
        keys, now = KeyPair.generate(), time.time()
        invitation = self.invitations.create_invitation(
            creator, keys.public, ttl, now, owner=owner, uses=uses
        )
        self._state.add_invitation(invitation)
        self._authenticator.allow_peer(invitation.public_key, invitation.id)
        self.purge_expired()
        return keys.secret, invitation

    def list_invitations(self, peer: str) -> list[InvitationRecord]:
        """The invitations that ``peer`` may see: all for an owner, else its own."""
        owner = self.records[peer].is_owner
        return [one for one in self.invitations if owner or one.creator == peer]

    def end_invitation(self, id: str, requester: str) -> list[MemberRecord]:
        """Revoke an invitation; returns the members that joined by it, and stay.

        Raises:
            RequestError: there is no such invitation.
            NotAuthorized: ``requester`` is neither an owner nor its creator.
        """
        record, owner = self.invitations.get_invitation(id), self.records[requester].is_owner
        if not owner and (record is None or record.creator != requester):
            raise NotAuthorized("only the swarm's first PC may revoke another PC's invitation")
        if record is None:
            raise RequestError(f"there is no invitation {id}", param="target")
        return self._end_invitations([id])

    def purge_expired(self) -> None:
        """Remove expired and excess invitations; let revoked peers be notified again."""
        for id in self.invitations.purge_expired(time.time()):
            self._delete_invitation(id)
        now = time.monotonic()
        for peer in [peer for peer, at in self._notify_at.items() if at <= now]:
            self._allow_notice(peer)

    def _end_invitations(self, ids: Iterable[str]) -> list[MemberRecord]:
        ended = [id for id in dict.fromkeys(ids) if self.invitations.revoke_invitation(id)]
        for id in ended:
            self._delete_invitation(id)
        return [
            one
            for one in self.records.values()
            if one.standing == "member" and one.invitation in ended
        ]

    def _delete_invitation(self, id: str) -> None:
        self._state.delete_invitation(id)
        self._authenticator.deny_peer(id)
        self._join_limiter.drop_invitation(id)

    # --- members -----------------------------------------------------------------------------

    def join_by_invitation(self, invitation: str, message: JoinRequest) -> MemberRecord:
        """Make the holder of an invitation a member, unless it is one.

        Raises:
            TokenError: the invitation has expired or is used up.
            PeerBanned: the peer was revoked.
            RequestError: the key can't be a peer's.
            Unavailable: the swarm is full.
            Overloaded: too many PCs join at this moment.
            VersionMismatch: its molink is incompatible.
        """
        unlike = explain_mismatch(PeerVersion(message.version, message.protocol), own_version())
        if unlike:
            raise VersionMismatch(unlike)
        peer, known = self._find_joiner(message.public_key)
        if known is not None and known.standing == "member":
            return known
        redeemed = self.invitations.redeem_invitation(invitation, peer, time.time())
        self._check_capacity()
        self._check_rate(invitation)
        return self._add_joiner(message.public_key, message.name, redeemed)

    def admit_peer(self, public_key: str, name: str, requester: str) -> MemberRecord:
        """Make the holder of a key a member on behalf of ``requester``, unless it is one.

        It is stored as a used invitation of ``requester`` whose secret nobody has, so it is listed
        and revoked like others.

        Raises:
            PeerBanned: the peer was revoked.
            RequestError: the key can't be a peer's.
            Unavailable: the swarm is full.
            Overloaded: too many PCs join at this moment.
        """
        peer, known = self._find_joiner(public_key)
        if known is not None and known.standing == "member":
            return known
        self._check_capacity()
        self._check_rate(_PAIRING_BUCKET)
        owner, now = self.records[requester].is_owner, time.time()
        unused_key = KeyPair.generate().public
        invitation = self.invitations.create_invitation(
            requester, unused_key, _PAIRED_TTL, now, owner=owner
        )
        self._state.add_invitation(invitation)
        redeemed = self.invitations.redeem_invitation(invitation.id, peer, now)
        return self._add_joiner(public_key, name, redeemed)

    def _find_joiner(self, public_key: str) -> tuple[str, MemberRecord | None]:
        """The id and record of the peer that wants to join with that key."""
        if _validate_key(public_key) == self._own_key or any(
            one.public_key == public_key for one in self.invitations
        ):
            raise RequestError("this key is not a peer's", param="public_key")
        peer = derive_peer_id(public_key)
        known = self.records.get(peer)
        if known is not None and known.standing == "revoked":
            raise PeerBanned(
                f"this PC was removed from the swarm. `molink un-revoke {known.name}` on the "
                "swarm's first PC readmits it"
            )
        return peer, known

    def find_objection(self, public_key: str) -> PairingOutcome | None:
        """Why the holder of a key can't be admitted now; ``None`` if it can."""
        try:
            _, known = self._find_joiner(public_key)
            if known is None or known.standing != "member":
                self._check_capacity()
        except PeerBanned:
            return "revoked"
        except Unavailable:
            return "full"
        except RequestError:
            return "refused"
        return None

    def _check_rate(self, invitation: str) -> None:
        wait = self._join_limiter.admit_join(invitation, time.monotonic())
        if wait:
            raise Overloaded("too many PCs join at this moment; try again in a few seconds", wait)

    def _add_joiner(self, public_key: str, name: str, redeemed: InvitationRecord) -> MemberRecord:
        peer = derive_peer_id(public_key)
        known = self.records.get(peer)
        member = MemberRecord(
            peer,
            public_key,
            sanitize_name(name, peer),
            is_owner=known is not None and known.is_owner,
            invitation=redeemed.id,
        )
        self._state.admit_member(member, redeemed)
        self.invitations.put_record(redeemed)
        self._add_member(member)
        return member

    def remove_member(self, peer: str, standing: Standing) -> list[MemberRecord]:
        """Remove a member that left or is revoked, with its invitations.

        Revocation also ends the invitation by which it joined. Returns the members that joined by
        an ended invitation, and stay.
        """
        self._state.save_standing(peer, standing)
        self.records[peer] = replace(self.records[peer], standing=standing)
        self._authenticator.deny_peer(peer)
        ids = self.invitations.created_by(peer)
        if standing == "revoked":
            ids += self.invitations.redeemed_by(peer)
            self._allow_notice(peer)
        return self._end_invitations(ids)

    def list_devices(self, peer: str) -> list[str]:
        """The further devices of a PC, given its primary peer."""
        return [
            one.peer
            for one in self.records.values()
            if one.announced is not None and one.announced.primary_peer == peer and not one.is_owner
        ]

    def import_member(self, member: MemberRecord) -> None:
        """Store a member record of another part of the swarm.

        Raises:
            Unavailable: the swarm is full.
        """
        known = self.records.get(member.peer)
        if member.standing == "member":
            self._check_capacity()
        if member.standing == "revoked" and known is not None:
            self.remove_member(member.peer, "revoked")
            return
        self._state.save_member(member)
        if member.standing == "member":
            self._add_member(member)
        else:
            self.records[member.peer] = member
            self._allow_notice(member.peer)

    def readmit_member(self, peer: str) -> MemberRecord:
        """Readmit a revoked peer.

        Raises:
            RequestError: the peer is unknown or was not revoked.
            Unavailable: the swarm is full.
        """
        known = self.records.get(peer)
        if known is None or known.standing != "revoked":
            raise RequestError(f"{peer} was not revoked", param="target")
        self._check_capacity()
        self._state.save_standing(peer, "member")
        self._notify_at.pop(peer, None)
        self._authenticator.deny_peer(REVOKED_PREFIX + peer)
        member = replace(known, standing="member")
        self._add_member(member)
        return member

    def record_announcement(self, member: PeerInfo) -> None:
        """Store what other peers are told about a member."""
        self._state.save_announced(member)
        known = self.records[member.peer]
        self.records[member.peer] = replace(known, name=member.name, announced=member)

    def mark_notified(self, user: str) -> None:
        """Refuse a revoked peer, by its user id, for a while after it has been told."""
        self._authenticator.deny_peer(user)
        self._notify_at[user.removeprefix(REVOKED_PREFIX)] = time.monotonic() + NOTIFY_INTERVAL

    def _check_capacity(self) -> None:
        members = sum(one.standing == "member" for one in self.records.values())
        if members >= self._max_peers:
            raise Unavailable(
                f"the swarm is full with {members} PCs. On its first PC, `molink revoke` an unused "
                "one, or start molink with a higher `max_peers`"
            )

    def _add_member(self, member: MemberRecord) -> None:
        self.records[member.peer] = member
        self._authenticator.allow_peer(member.public_key, member.peer)

    def _allow_notice(self, peer: str) -> None:
        self._notify_at.pop(peer, None)
        self._authenticator.allow_peer(self.records[peer].public_key, REVOKED_PREFIX + peer)


def list_contact_points(registry: Registry, leader: str) -> tuple[ContactPoint, ...]:
    """A few members that will know where the coordinator runs, besides the present leader."""
    pcs = [peer for peer in registry.sessions if registry.primary_peer(peer) == peer != leader]
    infos = [registry.members[peer].announced for peer in pcs]
    return tuple(
        ContactPoint(
            one.public_key, tuple(format_address(host, one.control_port) for host in one.addresses)
        )
        for one in infos
        if one is not None and one.addresses
    )[:MAX_CONTACT_POINTS]


def is_invitation_id(user: str) -> bool:
    """Whether a user id belongs to an invitation."""
    return user.startswith(INVITATION_PREFIX)


def is_revoked_id(user: str) -> bool:
    """Whether a user id belongs to a revoked peer."""
    return user.startswith(REVOKED_PREFIX)


def _validate_key(public_key: str) -> str:
    if not is_public_key(public_key):
        raise RequestError("not a CURVE public key", param="public_key")
    return public_key
