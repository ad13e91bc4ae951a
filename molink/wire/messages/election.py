"""Messages about who leads: between peers, and of the coordinator's state to them.

See :mod:`molink.swarm.election.leader_election` and :mod:`molink.swarm.election.replica`.
"""

from typing import Annotated

import msgspec

from molink.facts.scalars import Addresses, Count, Text
from molink.wire.messages.base import Message, Payload


class LeaderView(Message, frozen=True, kw_only=True):
    """Whom a peer follows as its coordinator (see :mod:`molink.swarm.election.leader_election`).

    ``is_leader``: the coordinator runs at this very peer, with that key, at these addresses;
    ``hears_leader``: it runs elsewhere, and this peer is in touch with it; ``can_lead``: it could
    run here. ``replica`` is how far the copy of its state is that this peer holds: a term, and a
    revision in it.
    """

    term: Count
    leader: Text
    is_leader: bool
    hears_leader: bool
    can_lead: bool
    replica: tuple[Count, Count]
    coordinator_key: Annotated[str, msgspec.Meta(max_length=40)] = ""
    addresses: Addresses = ()


class LeaderRequest(Message, frozen=True, kw_only=True, tag="who-leads"):
    """Ask a peer whom it follows, and say whom the sender follows."""

    ref: Count
    swarm: Text
    view: LeaderView


class LeaderReply(Message, frozen=True, kw_only=True, tag="leader"):
    """The answer to :class:`LeaderRequest`."""

    ref: Count
    view: LeaderView


class LeaderHeartbeat(Message, frozen=True, kw_only=True, tag="noted"):
    """The coordinator has read a report, so it is known to live. The first word of a session.

    It leads in ``term``, on the PC of peer ``leader`` (empty: one without a daemon). A peer that
    speaks another ``protocol`` hears nothing else from it.
    """

    term: Count
    leader: Text
    version: Text = ""
    protocol: Count = 1


class StateReplica(Message, frozen=True, kw_only=True, tag="shared-state"):
    """The coordinator's state for each peer to keep (payload ``u8 [n]``, see ``swarm/replica.py``).

    A peer sends its own copy when the coordinator asks for it by :class:`StateRequest`.
    """

    payload: Payload


class StateRequest(Message, frozen=True, kw_only=True, tag="send-state"):
    """The copy of the state that a peer holds knows of changes that the coordinator doesn't."""
