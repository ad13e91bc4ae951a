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
    RequestError,
    ShutOut,
    Unavailable,
    VersionMismatch,
)
from molink.facts.identity import peer_id
from molink.swarm.controller.records import MAX_PEERS, InvitationRecord, MemberRecord, Standing
from molink.swarm.controller.registry import Registry
from molink.swarm.membership.hygiene import clean_name
from molink.swarm.membership.invitations import PREFIX, Invitations
from molink.swarm.membership.join_rate import JoinRate
from molink.swarm.membership.token import Guide
from molink.swarm.membership.versions import Spoken, mismatch, ours
from molink.wire.messages.instructions import Member
from molink.wire.messages.joining import JoinRequest
from molink.wire.messages.porch import Outcome
from molink.wire.sockets.curve import KeyPair, is_public_key
from molink.wire.sockets.zap import Gatekeeper
from molinkd.coordinator.arguments import host_port
from molinkd.coordinator.state import State

#: How the user id of a connection under a revoked member's key begins.
REVOKED = "revoked:"
#: Members that a token names: more would make it longer than a person likes to paste.
GUIDES = 2
#: Seconds until a PC that was told that it is revoked is let in again to be told once more.
TELL_AGAIN = 30.0
#: Under which those who knock count for the rate of joining, and how long it is remembered who let
#: them in, in seconds.
_KNOCKS = "knocks"
_APPROVED_TTL = 30 * 86400.0


class Door:
    """Members and invitations as the state has them, and the gatekeeper that goes by them."""

    def __init__(
        self,
        state: State,
        gatekeeper: Gatekeeper,
        own_key: str,
        trusted: Iterable[tuple[str, str]] = (),
        max_peers: int = MAX_PEERS,
    ) -> None:
        """``trusted`` (public key, name) are owners. Raises :class:`RequestError` for a bad key."""
        self._state, self._gatekeeper, self._own_key = state, gatekeeper, own_key
        self._max_peers = max_peers
        for public_key, name in trusted:
            peer = peer_id(_checked(public_key))
            state.save_member(MemberRecord(peer, public_key, clean_name(name, peer), owner=True))
        #: All that ever joined, in the order of joining.
        self.records = {member.peer: member for member in state.members()}
        self.invitations = Invitations(state.invitations())
        self._rate = JoinRate(time.monotonic())
        #: When a revoked peer that was told so is let in again, by its id.
        self._tell_at: dict[str, float] = {}

    def open(self) -> None:
        """Tell the gatekeeper everybody who may come in."""
        self.purge()
        for member in self.records.values():
            if member.standing == "member":
                self._gatekeeper.allow(member.public_key, member.peer)
            elif member.standing == "revoked":
                self._let_be_told(member.peer)
        for invitation in self.invitations:
            self._gatekeeper.allow(invitation.public_key, invitation.id)

    # --- invitations -------------------------------------------------------------------------

    def invite(self, creator: str, ttl: float, uses: int) -> tuple[str, InvitationRecord]:
        """A new invitation for ``uses`` PCs, with its secret key, to be given away.

        Raises:
            UsageError: ``ttl`` is no duration.
            NotAuthorized: ``creator`` may not make one that is valid for so long.
        """
        owner = self.records[creator].owner
        keys, now = KeyPair.generate(), time.time()
        invitation = self.invitations.create(creator, keys.public, ttl, now, owner=owner, uses=uses)
        self._state.add_invitation(invitation)
        self._gatekeeper.allow(invitation.public_key, invitation.id)
        self.purge()
        return keys.secret, invitation

    def listed(self, peer: str) -> list[InvitationRecord]:
        """The invitations that ``peer`` may see: an owner all, another one its own."""
        owner = self.records[peer].owner
        return [one for one in self.invitations if owner or one.creator == peer]

    def end_invitation(self, id: str, by: str) -> list[MemberRecord]:
        """End an invitation as ``by`` wants it; returns the members that came by it, and stay.

        Raises:
            RequestError: there is none of that id.
            NotAuthorized: ``by`` is no owner, nor has it made that one.
        """
        record, owner = self.invitations.get(id), self.records[by].owner
        if not owner and (record is None or record.creator != by):
            raise NotAuthorized(
                "only the swarm's first PC may end an invitation that another one has made"
            )
        if record is None:
            raise RequestError(f"there is no invitation {id}", param="target")
        return self._end_invitations([id])

    def purge(self) -> None:
        """End invitations that have expired or are too many, and what else is over by now."""
        for id in self.invitations.purge(time.time()):
            self._forget_invitation(id)
        now = time.monotonic()
        for peer in [peer for peer, at in self._tell_at.items() if at <= now]:
            self._let_be_told(peer)

    def _end_invitations(self, ids: Iterable[str]) -> list[MemberRecord]:
        ended = [id for id in dict.fromkeys(ids) if self.invitations.revoke(id)]
        for id in ended:
            self._forget_invitation(id)
        return [
            one
            for one in self.records.values()
            if one.standing == "member" and one.invitation in ended
        ]

    def _forget_invitation(self, id: str) -> None:
        self._state.delete_invitation(id)
        self._gatekeeper.deny(id)
        self._rate.forget(id)

    # --- members -----------------------------------------------------------------------------

    def join(self, invitation: str, message: JoinRequest) -> MemberRecord:
        """Make the holder of an invitation a member; one that is a member stays as it is.

        Raises:
            TokenError: the invitation has expired, or is used up.
            ShutOut: the peer was revoked.
            RequestError: the key it names can't be a peer's own.
            Unavailable: the swarm is full.
            Overloaded: too many join at this moment.
            VersionMismatch: its molink and ours don't understand each other.
        """
        unlike = mismatch(Spoken(message.version, message.protocol), ours())
        if unlike:
            raise VersionMismatch(unlike)
        peer, known = self._stranger(message.public_key)
        if known is not None and known.standing == "member":
            return known
        used = self.invitations.used(invitation, peer, time.time())
        self._check_room()
        self._check_rate(invitation)
        return self._admit(message.public_key, message.name, used)

    def admit(self, public_key: str, name: str, by: str) -> MemberRecord:
        """Make the holder of a key a member on the word of ``by``; one that is one stays so.

        It is written down as an invitation of ``by`` for that one PC, whose secret nobody has: so
        it is listed, and ends, as others do.

        Raises:
            ShutOut: the peer was revoked.
            RequestError: the key can't be a peer's own.
            Unavailable: the swarm is full.
            Overloaded: too many join at this moment.
        """
        peer, known = self._stranger(public_key)
        if known is not None and known.standing == "member":
            return known
        self._check_room()
        self._check_rate(_KNOCKS)
        owner, nobody, now = self.records[by].owner, KeyPair.generate().public, time.time()
        invitation = self.invitations.create(by, nobody, _APPROVED_TTL, now, owner=owner)
        self._state.add_invitation(invitation)
        return self._admit(public_key, name, self.invitations.used(invitation.id, peer, now))

    def _stranger(self, public_key: str) -> tuple[str, MemberRecord | None]:
        """The id of a peer that wants to join by that key, and what is known of it."""
        if _checked(public_key) == self._own_key or any(
            one.public_key == public_key for one in self.invitations
        ):
            raise RequestError("that key is not a peer's own", param="public_key")
        peer = peer_id(public_key)
        known = self.records.get(peer)
        if known is not None and known.standing == "revoked":
            raise ShutOut(
                f"this PC was shut out of the swarm. `molink un-revoke {known.name}` on the "
                "swarm's first PC lets it in again"
            )
        return peer, known

    def objection(self, public_key: str) -> Outcome | None:
        """Why nobody can let the holder of a key in now; ``None`` if a member can."""
        try:
            _, known = self._stranger(public_key)
            if known is None or known.standing != "member":
                self._check_room()
        except ShutOut:
            return "revoked"
        except Unavailable:
            return "full"
        except RequestError:
            return "refused"
        return None

    def _check_rate(self, invitation: str) -> None:
        wait = self._rate.admit(invitation, time.monotonic())
        if wait:
            raise Overloaded("too many PCs join at this moment: try again in a few seconds", wait)

    def _admit(self, public_key: str, name: str, used: InvitationRecord) -> MemberRecord:
        peer = peer_id(public_key)
        known = self.records.get(peer)
        member = MemberRecord(
            peer,
            public_key,
            clean_name(name, peer),
            owner=known is not None and known.owner,
            invitation=used.id,
        )
        self._state.admit(member, used)
        self.invitations.keep(used)
        self._enter(member)
        return member

    def dismiss(self, peer: str, standing: Standing) -> list[MemberRecord]:
        """A member left or is revoked: nothing it sends counts, nor do its invitations.

        With one that is revoked ends the invitation by which it came. Returns the members that came
        by one that ended, and stay.
        """
        self._state.save_standing(peer, standing)
        self.records[peer] = replace(self.records[peer], standing=standing)
        self._gatekeeper.deny(peer)
        ids = self.invitations.of(peer)
        if standing == "revoked":
            ids += self.invitations.by(peer)
            self._let_be_told(peer)
        return self._end_invitations(ids)

    def devices(self, peer: str) -> list[str]:
        """The further devices of a PC, by the peer that is its own."""
        return [
            one.peer
            for one in self.records.values()
            if one.announced is not None and one.announced.pc == peer and not one.owner
        ]

    def take_over(self, member: MemberRecord) -> None:
        """Write down what another part of the swarm knows of a peer.

        Raises:
            Unavailable: the swarm is full.
        """
        known = self.records.get(member.peer)
        if member.standing == "member":
            self._check_room()
        if member.standing == "revoked" and known is not None:
            self.dismiss(member.peer, "revoked")
            return
        self._state.save_member(member)
        if member.standing == "member":
            self._enter(member)
        else:
            self.records[member.peer] = member
            self._let_be_told(member.peer)

    def readmit(self, peer: str) -> MemberRecord:
        """A revoked peer is a member again.

        Raises:
            RequestError: there is no such peer, or it was not revoked.
            Unavailable: the swarm is full.
        """
        known = self.records.get(peer)
        if known is None or known.standing != "revoked":
            raise RequestError(f"{peer} was not revoked", param="target")
        self._check_room()
        self._state.save_standing(peer, "member")
        self._tell_at.pop(peer, None)
        self._gatekeeper.deny(REVOKED + peer)
        member = replace(known, standing="member")
        self._enter(member)
        return member

    def announced(self, member: Member) -> None:
        """Remember what the others are told of a member."""
        self._state.save_announced(member)
        known = self.records[member.peer]
        self.records[member.peer] = replace(known, name=member.name, announced=member)

    def told(self, user: str) -> None:
        """A revoked peer, known by its user id, gets its answer: for now it is not let in again."""
        self._gatekeeper.deny(user)
        self._tell_at[user.removeprefix(REVOKED)] = time.monotonic() + TELL_AGAIN

    def _check_room(self) -> None:
        members = sum(one.standing == "member" for one in self.records.values())
        if members >= self._max_peers:
            raise Unavailable(
                f"the swarm has {members} PCs, as many as it may have. On the PC that runs it, "
                "`molink revoke` one that is not used any more, or start it with a higher "
                "`max_peers`"
            )

    def _enter(self, member: MemberRecord) -> None:
        self.records[member.peer] = member
        self._gatekeeper.allow(member.public_key, member.peer)

    def _let_be_told(self, peer: str) -> None:
        self._tell_at.pop(peer, None)
        self._gatekeeper.allow(self.records[peer].public_key, REVOKED + peer)


def guides(registry: Registry, leader: str) -> tuple[Guide, ...]:
    """A few members that know where the coordinator is, should it be elsewhere some day.

    Not ``leader``, on whose PC it is now.
    """
    pcs = [peer for peer in registry.sessions if registry.pc(peer) == peer != leader]
    told = [registry.members[peer].announced for peer in pcs]
    return tuple(
        Guide(one.public_key, tuple(host_port(host, one.control_port) for host in one.addresses))
        for one in told
        if one is not None and one.addresses
    )[:GUIDES]


def is_invitation(user: str) -> bool:
    """Whether a user id is that of an invitation."""
    return user.startswith(PREFIX)


def is_revoked(user: str) -> bool:
    """Whether a user id is that of a revoked peer."""
    return user.startswith(REVOKED)


def _checked(public_key: str) -> str:
    if not is_public_key(public_key):
        raise RequestError("this is no CURVE public key", param="public_key")
    return public_key
