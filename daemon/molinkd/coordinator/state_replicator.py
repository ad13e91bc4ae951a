"""The coordinator's state in the hands of its peers: sent out, and merged from other parts."""

import logging
import time
from collections.abc import Callable, Iterable

from molink.errors import RequestError
from molink.swarm.election.replica import ReplicaSync, Version, decode_replica
from molink.wire.messages.base import Payload
from molink.wire.messages.election import StateReplica, StateRequest
from molinkd.coordinator.membership import Membership, MembershipChange
from molinkd.coordinator.state_store import StateStore

log = logging.getLogger(__name__)

#: Sends a message with its payload to the peer of that id.
SendToPeer = Callable[[str, StateRequest | StateReplica, bytes | None], None]


class StateReplicator:
    """Replicates the state to every peer, and merges the membership logs of other parts."""

    def __init__(self, state: StateStore, membership: Membership, send_to_peer: SendToPeer) -> None:
        self._state, self._membership, self._send_to_peer = state, membership, send_to_peer
        self._sync = ReplicaSync()
        #: The last encoded state and its version.
        self._encoded: tuple[Version, bytes] = ((-1, -1), b"")

    def on_peer_report(self, peer: str, held: Version, digest: str, *, is_new: bool) -> None:
        """Handle a report of the replica that a peer holds; ``is_new`` on a new connection."""
        if is_new:
            self._sync.drop_peer(peer)
        ours = self._state.read_version(), self._membership.log.digest
        lineage = self._state.read_lineage()
        step = self._sync.plan_sync(peer, (held, digest), ours, lineage, time.monotonic())
        if step == "ask":
            self._send_to_peer(peer, StateRequest(), None)
        elif step == "send":
            self.send_state([peer])

    def send_state(self, peers: Iterable[str]) -> None:
        """Send the state to peers at once."""
        version = self._state.read_version()
        if self._encoded[0] != version:
            self._encoded = version, self._state.to_replica().encode()
        data = self._encoded[1]
        for peer in peers:
            self._send_to_peer(peer, StateReplica(payload=Payload("u8", (len(data),))), data)

    def merge_state(self, peer: str, payload: memoryview | None) -> MembershipChange:
        """Merge the membership log of a replica that a peer was asked for.

        Raises:
            RequestError: it was not requested, or is of another swarm.
            StateError: it is invalid.
        """
        if payload is None or not self._sync.accept_answer(peer):
            raise RequestError("this replica was not requested")
        ours = self._membership.log
        theirs = decode_replica(payload, ours)
        if theirs.swarm != ours.swarm:
            raise RequestError(f"this is a replica of swarm {theirs.swarm}")
        change = self._membership.merge_log(theirs.log)
        for one in (*change.added, *change.removed):
            log.info("%s is %s in the part that %s was in", one.name, one.standing, peer)
        self._state.bump_revision()
        return change
