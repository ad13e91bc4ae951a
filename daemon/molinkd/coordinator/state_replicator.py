"""The coordinator's state in the hands of its peers: sent out, and taken back from another part."""

import logging
import time
from collections.abc import Callable, Iterator

from molink.errors import RequestError, Unavailable
from molink.swarm.controller.events import MemberAddedEvent, MemberRemovedEvent
from molink.swarm.election.replica import ReplicaSync, Version, decode_replica, merge_replicas
from molink.wire.messages.base import Payload
from molink.wire.messages.election import StateReplica, StateRequest
from molinkd.coordinator.membership import Membership
from molinkd.coordinator.state_store import StateStore

log = logging.getLogger(__name__)

#: Sends a message with its payload to the peer of that id.
SendToPeer = Callable[[str, StateRequest | StateReplica, bytes | None], None]


class StateReplicator:
    """Replicates the state to every peer, and merges the states of other parts of the swarm."""

    def __init__(self, state: StateStore, membership: Membership, send_to_peer: SendToPeer) -> None:
        self._state, self._membership, self._send_to_peer = state, membership, send_to_peer
        self._sync = ReplicaSync()
        #: The last encoded state and its version.
        self._encoded: tuple[Version, bytes] = ((-1, -1), b"")

    def on_peer_report(self, peer: str, held: Version, *, is_new: bool) -> None:
        """Handle a report of the version that a peer holds; ``is_new`` on a new connection."""
        if is_new:
            self._sync.drop_peer(peer)
        ours = self._state.read_version()
        step = self._sync.plan_sync(peer, held, ours, self._state.read_lineage(), time.monotonic())
        if step == "ask":
            self._send_to_peer(peer, StateRequest(), None)
        elif step == "send":
            if self._encoded[0] != ours:
                self._encoded = ours, self._state.to_replica().encode()
            data = self._encoded[1]
            self._send_to_peer(peer, StateReplica(payload=Payload("u8", (len(data),))), data)

    def merge_state(
        self, peer: str, payload: memoryview | None
    ) -> Iterator[MemberAddedEvent | MemberRemovedEvent]:
        """Merge the state of another part of the swarm; yields the events that follow.

        Raises:
            RequestError: it was not requested, or is of another swarm.
            StateError: it is invalid.
        """
        if payload is None or not self._sync.has_asked(peer):
            raise RequestError("this replica was not requested")
        theirs, ours = decode_replica(payload), self._state.to_replica()
        if theirs.swarm != ours.swarm:
            raise RequestError(f"this is a replica of swarm {theirs.swarm}")
        for member in merge_replicas(
            ours, theirs, by_owner=self._membership.records[peer].is_owner
        ):
            log.info("%s is %s in the part that %s was in", member.name, member.standing, peer)
            try:
                self._membership.import_member(member)
            except Unavailable as error:
                log.warning("%s was not imported: %s", member.name, error)
                continue
            if member.standing == "member":
                yield MemberAddedEvent(member)
            else:
                yield MemberRemovedEvent(member.peer, "was revoked in another part of the swarm")
        self._state.bump_revision()
