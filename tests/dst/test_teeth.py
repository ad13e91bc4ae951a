"""Mutation tests: without one of the product's rules the simulation fails within 200 seeds."""

from collections.abc import Callable
from typing import Any

import pytest

from molink.link.in_link import InLink
from molink.link.receiver import LinkReceiver
from molink.link.send_window import SendWindow
from molink.ring.volume_queue import VolumeQueue
from molink.swarm.election.events import CoordinatorHeardEvent
from molink.swarm.election.leader_election import LeaderElection
from molink.swarm.election.term_budget import TermBudget
from molink.swarm.frontend.stream import RequestStream
from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.data_plane import Frame, LinkHello
from tests.dst.process import Failure
from tests.dst.world import run_all

#: Maximum seeds tried.
SEEDS = 200


def without_epochs_of_links(patch: pytest.MonkeyPatch) -> None:
    """A stage accepts messages of any epoch's link."""
    hello, frame = InLink._on_hello, LinkReceiver.on_frame

    def any_hello(self: InLink, sender: Any, message: LinkHello) -> None:
        here = self._receiver.epoch
        hello(self, sender, LinkHello(message.pipeline, here, message.from_stage, message.channel))

    def any_frame(self: LinkReceiver, message: Frame, payload: Any, now: float) -> Any:
        return frame(
            self,
            Frame(self.epoch, message.channel, message.frame_number, message.body),
            payload,
            now,
        )

    patch.setattr(InLink, "_on_hello", any_hello)
    patch.setattr(LinkReceiver, "on_frame", any_frame)


def without_numbers(patch: pytest.MonkeyPatch) -> None:
    """A stage accepts frames in any order."""
    frame = LinkReceiver.on_frame

    def any_number(self: LinkReceiver, message: Frame, payload: Any, now: float) -> Any:
        self._channels[message.channel].next_frame = message.frame_number
        return frame(self, message, payload, now)

    patch.setattr(LinkReceiver, "on_frame", any_number)


def without_resending(patch: pytest.MonkeyPatch) -> None:
    """Frames lost with a connection are not resent."""
    patch.setattr(SendWindow, "rewind_unacknowledged", lambda self: None)


def without_after(patch: pytest.MonkeyPatch) -> None:
    """A volume runs before its predecessor, unchecked."""
    patch.setattr(VolumeQueue, "is_ready", lambda self, waiting: True)
    patch.setattr(VolumeQueue, "find_problems", lambda self: iter(()))


def without_positions(patch: pytest.MonkeyPatch) -> None:
    """A daemon emits every token it receives, regardless of its position."""
    token = RequestStream.on_token

    def any_position(self: RequestStream, message: Any, now: float) -> Any:
        expected = len(self._prompt) + len(self._emitted)
        values = {name: getattr(message, name) for name in message.__struct_fields__}
        return token(self, type(message)(**{**values, "position": expected}), now)

    patch.setattr(RequestStream, "on_token", any_position)


def without_what_was_emitted(patch: pytest.MonkeyPatch) -> None:
    """A daemon has the next scheduler start from the prompt alone."""
    submit = RequestStream._submit

    def from_the_prompt(self: RequestStream, target: Any, now: float) -> Any:
        emitted, self._emitted = self._emitted, []
        try:
            return submit(self, target, now)
        finally:
            self._emitted = emitted

    patch.setattr(RequestStream, "_submit", from_the_prompt)
    without_positions(patch)


def without_terms(patch: pytest.MonkeyPatch) -> None:
    """A daemon obeys coordinators of past terms."""
    hears = LeaderElection._on_coordinator_heard

    def any_term(self: LeaderElection, event: CoordinatorHeardEvent, now: float) -> None:
        if event.term < self.term:
            self.term = event.term
        hears(self, event, now)

    patch.setattr(LeaderElection, "_on_coordinator_heard", any_term)


def without_counting_votes_by_branch(patch: pytest.MonkeyPatch) -> None:
    """A leader believes each that says whom it follows."""

    def count_all(self: LeaderElection, leader: str, *_: object) -> int:
        return sum(one.hears_leader and one.leader == leader for one in self._answers.values())

    patch.setattr(LeaderElection, "_count_votes", count_all)


def without_term_budgets(patch: pytest.MonkeyPatch) -> None:
    """A peer believes any term."""
    patch.setattr(TermBudget, "allows_term", lambda *_: True)


def without_merging(patch: pytest.MonkeyPatch) -> None:
    """A PC forgets entries that another coordinator's log lacks."""
    patch.setattr(MembershipLog, "merge_log", lambda self, other: other)


@pytest.mark.parametrize(
    ("without", "first"),
    [
        (without_counting_votes_by_branch, 497),
        (without_term_budgets, 8),
        (without_terms, 89),
        (without_epochs_of_links, 11),
        (without_numbers, 4),
        (without_resending, 290),
        (without_after, 5),
        (without_positions, 66),
        (without_what_was_emitted, 0),
        (without_merging, 185),
    ],
)
def test_removing_a_safeguard_is_detected(
    without: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: a seed known to fail, to save time."""
    without(monkeypatch)
    with pytest.raises(Failure, match=r"again: python -m tests\.dst"):
        run_all(range(first, first + SEEDS))
