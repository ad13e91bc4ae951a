"""How a PC becomes a member: with the invitation's key, the only message such a key may send."""

from molink.facts.scalars import Addresses, Count, Text
from molink.wire.messages.base import Message, PublicKey


class JoinRequest(Message, frozen=True, kw_only=True, tag="join"):
    """A PC that holds an invitation asks to be a member under its own key."""

    ref: Count
    public_key: PublicKey
    name: Text
    version: Text
    protocol: Count = 1


class JoinRedirect(Message, frozen=True, kw_only=True, tag="elsewhere"):
    """A member's answer to :class:`JoinRequest`: the coordinator that takes it."""

    ref: Count
    coordinator_key: PublicKey
    addresses: Addresses


class JoinReply(Message, frozen=True, kw_only=True, tag="joined"):
    """The coordinator has made the sender of :class:`JoinRequest` a member."""

    ref: Count
    swarm: Text
    peer: Text
