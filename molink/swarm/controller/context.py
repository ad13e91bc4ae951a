"""State shared by all deployments: registry, failures, links, numbers and the transition log."""

import logging
from collections.abc import Iterable

from molink.swarm.controller.backoff import Backoff
from molink.swarm.controller.events import ControllerAction, SendMessageAction
from molink.swarm.controller.reachability import Reachability
from molink.swarm.controller.records import MemberRecord
from molink.swarm.controller.registry import Registry
from molink.swarm.election.terms import next_epoch
from molink.swarm.placement.links import Links
from molink.util.transition_log import TransitionLog
from molink.wire.messages.instructions import Instruction

log = logging.getLogger(__name__)

#: Number of transitions kept, enough for about an hour with failures.
NUM_TRANSITIONS = 200
#: Number of events kept, a screenful.
_NUM_EVENTS = 20


class ControllerContext:
    """Shared state of one run of the control plane."""

    def __init__(
        self,
        swarm: str,
        members: Iterable[MemberRecord],
        now: float,
        last: tuple[int, int],
        term: int,
    ) -> None:
        """``last`` is the newest pipeline number and the newest epoch of all deployments."""
        self.registry = Registry(swarm, members)
        self.backoff = Backoff()
        self.reachability = Reachability()
        self.links = Links()
        #: Neither ever decreases, since daemons use them to distinguish new from old.
        self.pipeline_number, self.epoch = last
        #: The term of all epochs created from now on.
        self.term = term
        #: Time of the last :class:`TimePassedEvent`, in seconds, on the clock of the transition
        #: log.
        self.clock = now
        self._migrations = 0
        self._transitions = TransitionLog(NUM_TRANSITIONS, decimals=1)
        self._events = TransitionLog(_NUM_EVENTS, decimals=1)
        self._actions: list[ControllerAction] = []

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return self._transitions.format_lines()

    @property
    def events(self) -> tuple[str, ...]:
        """Recent events, for people, oldest first."""
        return self._events.format_lines()

    def log_transition(self, now: float, text: str, event: str = "") -> None:
        """Log a transition, and also as ``event`` if it concerns people."""
        self._transitions.add_entry(now, text)
        if event:
            self._events.add_entry(now, event)
        log.info("%s", text)

    # --- numbers -----------------------------------------------------------------------------

    def new_pipeline_id(self) -> str:
        """Return a new pipeline id: ``p1``, ``p2`` …"""
        self.pipeline_number += 1
        return f"p{self.pipeline_number}"

    def new_epoch(self) -> int:
        """Return a new epoch, larger than all earlier ones of any pipeline."""
        self.epoch = next_epoch(self.epoch, self.term)
        return self.epoch

    def new_migration_id(self) -> int:
        """Return a new migration number."""
        self._migrations += 1
        return self._migrations

    # --- actions -----------------------------------------------------------------------------

    def add_actions(self, *decisions: ControllerAction) -> None:
        """Queue actions after those already queued."""
        self._actions += decisions

    def send_message(self, peer: str, message: Instruction) -> None:
        """Queue a message to a peer if it is live."""
        if self.registry.is_live(peer):
            self._actions.append(SendMessageAction(peer, message))

    def pop_actions(self) -> list[ControllerAction]:
        """Return and clear all queued actions."""
        decisions, self._actions = self._actions, []
        return decisions
