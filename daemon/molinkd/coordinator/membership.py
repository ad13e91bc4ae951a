"""Who gets in: members under their own keys, and holders of an invitation for one message.

A PC that was revoked gets in for one answer, which says so. Every change of members and invitations
is made here.

The gatekeeper, which answers handshakes, is told what the state has; nothing is let in that isn't
written down.
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

#: How the user id of a connection under a revoked member's key begins.
REVOKED_PREFIX = "revoked:"
#: Members that a token names: more would make it longer than a person likes to paste.
MAX_CONTACT_POINTS = 2
#: Seconds until a PC that was told that it is revoked is let in again to be told once more.
NOTIFY_INTERVAL = 30.0
#: Under which those who knock count for the rate of joining, and how long it is remembered who let
#: them in, in seconds.
_PAIRING_BUCKET = "knocks"
_PAIRED_TTL = 30 * 86400.0


class Membership:
    """Members and invitations as the state has them, and the gatekeeper that goes by them."""

    def __init__(
        self,
        state: StateStore,
        authenticator: ZapAuthenticator,
        own_key: str,
        trusted: Iterable[tuple[str, str]] = (),
        max_peers: int = MAX_PEERS,
    ) -> None:
        """``trusted`` (public key, name) are owners. Raises :class:`RequestError` for a bad key."""
        self._state, self._authenticator, self._own_key = state, authenticator, own_key
        self._max_peers = max_peers
        for public_key, name in trusted:
            peer = derive_peer_id(_validate_key(public_key))
            state.save_member(
                MemberRecord(peer, public_key, sanitize_name(name, peer), is_owner=True)
            )
        #: All that ever joined, in the order of joining.
        self.records = {member.peer: member for member in state.read_members()}
        self.invitations = Invitations(state.read_invitations())
        self._join_limiter = JoinRateLimiter(time.monotonic())
        #: When a revoked peer that was told so is let in again, by its id.
        self._notify_at: dict[str, float] = {}

    def authorize_all(self) -> None:
        """Tell the gatekeeper everybody who may come in."""
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
        """A new invitation for ``uses`` PCs, with its secret key, to be given away.

        Raises:
            UsageError: ``ttl`` is no duration.
            NotAuthorized: ``creator`` may not make one that is valid for so long.
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
        """The invitations that ``peer`` may see: an owner all, another one its own."""
        owner = self.records[peer].is_owner
        return [one for one in self.invitations if owner or one.creator == peer]

    def end_invitation(self, id: str, requester: str) -> list[MemberRecord]:
        """End an invitation as ``requester`` wants it; returns the members that came by it, and
        stay.

        Raises:
            RequestError: there is none of that id.
            NotAuthorized: ``requester`` is no owner, nor has it made that one.
        """
        record, owner = self.invitations.get_invitation(id), self.records[requester].is_owner
        if not owner and (record is None or record.creator != requester):
            raise NotAuthorized(
                "only the swarm's first PC may end an invitation that another one has made"
            )
        if record is None:
            raise RequestError(f"there is no invitation {id}", param="target")
        return self._end_invitations([id])

    def purge_expired(self) -> None:
        """End invitations that have expired or are too many, and what else is over by now."""
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
        """Make the holder of an invitation a member; one that is a member stays as it is.

        Raises:
            TokenError: the invitation has expired, or is used up.
            PeerBanned: the peer was revoked.
            RequestError: the key it names can't be a peer's own.
            Unavailable: the swarm is full.
            Overloaded: too many join at this moment.
            VersionMismatch: its molink and ours don't understand each other.
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
        """Make the holder of a key a member on the word of ``by``; one that is one stays so.

        It is written down as an invitation of ``by`` for that one PC, whose secret nobody has: so
        it is listed, and ends, as others do.

        Raises:
            PeerBanned: the peer was revoked.
            RequestError: the key can't be a peer's own.
            Unavailable: the swarm is full.
            Overloaded: too many join at this moment.
        """
        peer, known = self._find_joiner(public_key)
        if known is not None and known.standing == "member":
            return known
        self._check_capacity()
        self._check_rate(_PAIRING_BUCKET)
        owner, nobody, now = (
            self.records[requester].is_owner,
            KeyPair.generate().public,
            time.time(),
        )
        invitation = self.invitations.create_invitation(
            requester, nobody, _PAIRED_TTL, now, owner=owner
        )
        self._state.add_invitation(invitation)
        return self._add_joiner(
            public_key, name, self.invitations.redeem_invitation(invitation.id, peer, now)
        )

    def _find_joiner(self, public_key: str) -> tuple[str, MemberRecord | None]:
        """The id of a peer that wants to join by that key, and what is known of it."""
        if _validate_key(public_key) == self._own_key or any(
            one.public_key == public_key for one in self.invitations
        ):
            raise RequestError("that key is not a peer's own", param="public_key")
        peer = derive_peer_id(public_key)
        known = self.records.get(peer)
        if known is not None and known.standing == "revoked":
            raise PeerBanned(
                f"this PC was shut out of the swarm. `molink un-revoke {known.name}` on the "
                "swarm's first PC lets it in again"
            )
        return peer, known

    def find_objection(self, public_key: str) -> PairingOutcome | None:
        """Why nobody can let the holder of a key in now; ``None`` if a member can."""
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
            raise Overloaded("too many PCs join at this moment: try again in a few seconds", wait)

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
        """A member left or is revoked: nothing it sends counts, nor do its invitations.

        With one that is revoked ends the invitation by which it came. Returns the members that came
        by one that ended, and stay.
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
        """The further devices of a PC, by the peer that is its own."""
        return [
            one.peer
            for one in self.records.values()
            if one.announced is not None and one.announced.primary_peer == peer and not one.is_owner
        ]

    def import_member(self, member: MemberRecord) -> None:
        """Write down what another part of the swarm knows of a peer.

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
        """A revoked peer is a member again.

        Raises:
            RequestError: there is no such peer, or it was not revoked.
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
        """Remember what the others are told of a member."""
        self._state.save_announced(member)
        known = self.records[member.peer]
        self.records[member.peer] = replace(known, name=member.name, announced=member)

    def mark_notified(self, user: str) -> None:
        """A revoked peer, known by its user id, gets its answer: for now it is not let in again."""
        self._authenticator.deny_peer(user)
        self._notify_at[user.removeprefix(REVOKED_PREFIX)] = time.monotonic() + NOTIFY_INTERVAL

    def _check_capacity(self) -> None:
        members = sum(one.standing == "member" for one in self.records.values())
        if members >= self._max_peers:
            raise Unavailable(
                f"the swarm has {members} PCs, as many as it may have. On the PC that runs it, "
                "`molink revoke` one that is not used any more, or start it with a higher "
                "`max_peers`"
            )

    def _add_member(self, member: MemberRecord) -> None:
        self.records[member.peer] = member
        self._authenticator.allow_peer(member.public_key, member.peer)

    def _allow_notice(self, peer: str) -> None:
        self._notify_at.pop(peer, None)
        self._authenticator.allow_peer(self.records[peer].public_key, REVOKED_PREFIX + peer)


def list_contact_points(registry: Registry, leader: str) -> tuple[ContactPoint, ...]:
    """A few members that know where the coordinator is, should it be elsewhere some day.

    Not ``leader``, on whose PC it is now.
    """
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
    """Whether a user id is that of an invitation."""
    return user.startswith(INVITATION_PREFIX)


def is_revoked_id(user: str) -> bool:
    """Whether a user id is that of a revoked peer."""
    return user.startswith(REVOKED_PREFIX)


def _validate_key(public_key: str) -> str:
    if not is_public_key(public_key):
        raise RequestError("this is no CURVE public key", param="public_key")
    return public_key
