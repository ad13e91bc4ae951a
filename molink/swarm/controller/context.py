"""What all pipelines of a swarm share: who is there, who failed, what is used up, and the story."""

import logging
from collections import deque
from collections.abc import Iterable

from molink.swarm.controller.backoff import Backoff
from molink.swarm.controller.events import ControllerAction, SendMessageAction
from molink.swarm.controller.reachability import Reachability
from molink.swarm.controller.records import MemberRecord
from molink.swarm.controller.registry import Registry
from molink.swarm.placement.links import Links
from molink.swarm.terms import next_epoch
from molink.wire.messages.instructions import Instruction

log = logging.getLogger(__name__)

#: Transitions that are kept: those of a bad hour.
STORY_LENGTH = 200


class ControllerContext:
    """One for each run of the control plane."""

    def __init__(
        self,
        swarm: str,
        members: Iterable[MemberRecord],
        now: float,
        last: tuple[int, int],
        term: int,
    ) -> None:
        """``last``: the number of the newest pipeline and the newest epoch, of them all."""
        self.registry = Registry(swarm, members)
        self.backoff = Backoff()
        self.reachability = Reachability()
        self.links = Links()
        #: Neither ever falls: daemons tell the old from the new by them.
        self.pipeline_number, self.epoch = last
        #: Epochs that are made from now on are of this term.
        self.term = term
        #: The time of the last tick, in seconds, by which the story is told.
        self.clock = now
        self._migrations = 0
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)
        self._actions: list[ControllerAction] = []

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return tuple(self._story)

    def log_transition(self, now: float, text: str) -> None:
        """Write down a transition."""
        self._story.append(f"{now:.1f} {text}")
        log.info("%s", text)

    # --- numbers -----------------------------------------------------------------------------

    def new_pipeline_id(self) -> str:
        """For the next pipeline: ``p1``, ``p2`` …"""
        self.pipeline_number += 1
        return f"p{self.pipeline_number}"

    def new_epoch(self) -> int:
        """Larger than all before, of all pipelines."""
        self.epoch = next_epoch(self.epoch, self.term)
        return self.epoch

    def new_migration_id(self) -> int:
        """Tells one move from all others."""
        self._migrations += 1
        return self._migrations

    # --- decisions ---------------------------------------------------------------------------

    def add_actions(self, *decisions: ControllerAction) -> None:
        """To be carried out after those before."""
        self._actions += decisions

    def send_message(self, peer: str, message: Instruction) -> None:
        """Tell a peer, if it is there."""
        if self.registry.is_live(peer):
            self._actions.append(SendMessageAction(peer, message))

    def pop_actions(self) -> list[ControllerAction]:
        """All decisions since this was last called."""
        decisions, self._actions = self._actions, []
        return decisions
