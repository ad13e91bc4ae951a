"""Who gets in: members under their own keys, and holders of an invitation for one message.

The gatekeeper, which answers handshakes, is told what the state has; nothing is let in that isn't
written down.
"""

import time
from collections.abc import Iterable
from dataclasses import replace

from molink.errors import NotAuthorized, Overloaded, RequestError
from molink.facts.identity import peer_id
from molink.swarm.hygiene import clean_name
from molink.swarm.invitations import PREFIX, Invitations
from molink.swarm.records import MemberRecord, Standing
from molink.wire.messages.control import JoinRequest
from molink.wire.sockets.curve import KeyPair, is_public_key
from molink.wire.sockets.zap import Gatekeeper
from molinkd.coordinator.state import State

MAX_MEMBERS = 255


class Door:
    """Members and invitations as the state has them, and the gatekeeper that goes by them."""

    def __init__(
        self,
        state: State,
        gatekeeper: Gatekeeper,
        own_key: str,
        trusted: Iterable[tuple[str, str]] = (),
    ) -> None:
        """``trusted`` (public key, name) are owners. Raises :class:`RequestError` for a bad key."""
        self._state, self._gatekeeper, self._own_key = state, gatekeeper, own_key
        for public_key, name in trusted:
            peer = peer_id(_checked(public_key))
            state.save_member(MemberRecord(peer, public_key, clean_name(name, peer), owner=True))
        #: All that ever joined, in the order of joining.
        self.records = {member.peer: member for member in state.members()}
        self.invitations = Invitations(state.invitations())

    def open(self) -> None:
        """Tell the gatekeeper everybody who may come in."""
        self.purge()
        for member in self.records.values():
            if member.standing == "member":
                self._gatekeeper.allow(member.public_key, member.peer)
        for invitation in self.invitations:
            self._gatekeeper.allow(invitation.public_key, invitation.id)

    def invite(self, creator: str, ttl: float) -> tuple[str, int]:
        """A new invitation: its secret key, to be given away, and when it expires.

        Raises:
            UsageError: ``ttl`` is no duration.
            NotAuthorized: ``creator`` may not make one that is valid for so long.
        """
        owner = self.records[creator].owner
        keys = KeyPair.generate()
        invitation = self.invitations.create(creator, keys.public, ttl, time.time(), owner=owner)
        self._state.add_invitation(invitation)
        self._gatekeeper.allow(invitation.public_key, invitation.id)
        self.purge()
        return keys.secret, invitation.expires

    def join(self, invitation: str, message: JoinRequest) -> MemberRecord:
        """Make the holder of an invitation a member; one that is a member stays as it is.

        Raises:
            NotAuthorized: the invitation has expired, or the peer was revoked.
            RequestError: the key it names can't be a peer's own.
            Overloaded: the swarm is full.
        """
        if not self.invitations.holds(invitation, time.time()):
            raise NotAuthorized("this invitation has expired; ask for a new one")
        public_key = _checked(message.public_key)
        if public_key == self._own_key or any(
            one.public_key == public_key for one in self.invitations
        ):
            raise RequestError("that key is not a peer's own", param="public_key")
        peer = peer_id(public_key)
        known = self.records.get(peer)
        if known is not None and known.standing == "revoked":
            raise NotAuthorized("this PC was shut out of the swarm")
        if known is not None and known.standing == "member":
            return known
        if sum(one.standing == "member" for one in self.records.values()) >= MAX_MEMBERS:
            raise Overloaded(f"the swarm has {MAX_MEMBERS} members, as many as it can have")
        owner = known is not None and known.owner
        member = MemberRecord(peer, public_key, clean_name(message.name, peer), owner)
        self._state.save_member(member)
        self.records[peer] = member
        self._gatekeeper.allow(public_key, peer)
        return member

    def dismiss(self, peer: str, standing: Standing) -> None:
        """A member left or is revoked: nothing it sends counts, nor do its invitations."""
        self._state.save_standing(peer, standing)
        self.records[peer] = replace(self.records[peer], standing=standing)
        self._gatekeeper.deny(peer)
        for id in self.invitations.of(peer):
            self.revoke_invitation(id)

    def revoke_invitation(self, id: str) -> None:
        """End an invitation.

        Raises:
            RequestError: there is none of that id.
        """
        if not self.invitations.revoke(id):
            raise RequestError(f"there is no invitation {id}", param="target")
        self._end(id)

    def purge(self) -> None:
        """End invitations that have expired or are too many."""
        for id in self.invitations.purge(time.time()):
            self._end(id)

    def _end(self, id: str) -> None:
        self._state.delete_invitation(id)
        self._gatekeeper.deny(id)


def is_invitation(user: str) -> bool:
    """Whether a user id is that of an invitation."""
    return user.startswith(PREFIX)


def _checked(public_key: str) -> str:
    if not is_public_key(public_key):
        raise RequestError("this is no CURVE public key", param="public_key")
    return public_key
