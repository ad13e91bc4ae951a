"""Leader election between peers, and replication of the coordinator's state.

See :mod:`molink.swarm.election.leader_election` and :mod:`molink.swarm.election.replica`.
"""

from typing import Annotated

import msgspec

from molink.facts.scalars import Addresses, Count, Text
from molink.wire.messages.base import Message, Payload


class Lease(Message, frozen=True, kw_only=True):
    """A coordinator's signed proof of life (see :mod:`molink.swarm.election.leases`).

    ``clock`` is milliseconds since the coordinator's start.
    """

    term: Count
    leader: Text
    clock: Count
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]


class LeaderView(Message, frozen=True, kw_only=True):
    """A peer's view of the leader (see :mod:`molink.swarm.election.leader_election`).

    ``is_leader``: the coordinator runs at this peer, with this key and these addresses.
    ``hears_leader``: it runs elsewhere, and this peer is connected to it. ``can_lead``: it could
    run at this peer. ``replica`` is the version of this peer's copy of the state: term and
    revision. ``lease`` is the last lease of the leader that this peer hears.
    """

    term: Count
    leader: Text
    is_leader: bool
    hears_leader: bool
    can_lead: bool
    replica: tuple[Count, Count]
    coordinator_key: Annotated[str, msgspec.Meta(max_length=40)] = ""
    addresses: Addresses = ()
    lease: Lease | None = None


class LeaderRequest(Message, frozen=True, kw_only=True, tag="leader-request"):
    """Ask a peer for its view of the leader, and send the own view."""

    ref: Count
    swarm: Text
    view: LeaderView


class LeaderReply(Message, frozen=True, kw_only=True, tag="leader-reply"):
    """Reply to :class:`LeaderRequest`."""

    ref: Count
    view: LeaderView


class LeaderHeartbeat(Message, frozen=True, kw_only=True, tag="leader-heartbeat"):
    """The coordinator's reply to each report, and its first message of a session.

    The coordinator leads in ``term`` on the PC of peer ``leader`` (empty: without a daemon). Peers
    with another ``protocol`` get no other message. ``verify_key`` verifies the leases of this run.
    """

    term: Count
    leader: Text
    version: Text = ""
    protocol: Count = 1
    lease: Lease | None = None
    verify_key: Annotated[str, msgspec.Meta(max_length=40)] = ""


class StateReplica(Message, frozen=True, kw_only=True, tag="state-replica"):
    """A copy of the coordinator's state for each peer (payload ``u8 [n]``).

    A peer sends its own copy on :class:`StateRequest`.
    """

    payload: Payload


class StateRequest(Message, frozen=True, kw_only=True, tag="state-request"):
    """Asks a peer for its copy of the state, which is newer than the coordinator's."""
