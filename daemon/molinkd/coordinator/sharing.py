"""The coordinator's state in the hands of its peers: sent out, and taken back from another part."""

import logging
import time
from collections.abc import Callable, Iterator

from molink.errors import RequestError, Unavailable
from molink.swarm.controller.events import MemberAdded, MemberRemoved
from molink.swarm.election.replica import Replication, Version, decode_replica, merge
from molink.wire.messages.base import Payload
from molink.wire.messages.leading import SendState, SharedState
from molinkd.coordinator.door import Door
from molinkd.coordinator.state import State

log = logging.getLogger(__name__)

#: Tells a peer: its id, the message, the payload.
Tell = Callable[[str, SendState | SharedState, bytes | None], None]


class Sharing:
    """Sees that every peer holds the state as it is, and that it knows what they know."""

    def __init__(self, state: State, door: Door, tell: Tell) -> None:
        self._state, self._door, self._tell = state, door, tell
        self._replication = Replication()
        #: The state as sent last, and its version.
        self._encoded: tuple[Version, bytes] = ((-1, -1), b"")

    def reported(self, peer: str, held: Version, *, fresh: bool) -> None:
        """A peer reports which version it holds; ``fresh`` over a connection that is new."""
        if fresh:
            self._replication.forget(peer)
        ours = self._state.version()
        due = self._replication.due(peer, held, ours, self._state.lineage(), time.monotonic())
        if due == "ask":
            self._tell(peer, SendState(), None)
        elif due == "send":
            if self._encoded[0] != ours:
                self._encoded = ours, self._state.replica().encode()
            data = self._encoded[1]
            self._tell(peer, SharedState(payload=Payload("u8", (len(data),))), data)

    def merge(self, peer: str, payload: memoryview | None) -> Iterator[MemberAdded | MemberRemoved]:
        """Take what a peer of another part of the swarm knows; yields what follows from it.

        Raises:
            RequestError: it was not asked for, or is of another swarm.
            StateError: it is no state.
        """
        if payload is None or not self._replication.asked(peer):
            raise RequestError("nobody asked for a copy of the state")
        theirs, ours = decode_replica(payload), self._state.replica()
        if theirs.swarm != ours.swarm:
            raise RequestError(f"this is a copy of the state of swarm {theirs.swarm}")
        for member in merge(ours, theirs, by_owner=self._door.records[peer].owner):
            log.info("%s is %s in the part that %s was in", member.name, member.standing, peer)
            try:
                self._door.take_over(member)
            except Unavailable as error:
                log.warning("%s was not taken over: %s", member.name, error)
                continue
            if member.standing == "member":
                yield MemberAdded(member)
            else:
                yield MemberRemoved(member.peer, "was revoked in another part")
        self._state.touch()
