"""Decides whom a peer follows as its coordinator, and when it leads the swarm itself.

No PC is special: every peer holds a replica of the coordinator's state, and each daemon runs one of
these. A *term* numbers the time of one leader. Terms only rise, and no two leaders share one: the
low bits are the leader's own. An epoch holds the term in which it was made in its high bits, so
that what an older leader still says is older everywhere.

Two PCs must do, so there is no majority to ask for. What is guaranteed instead: of peers that reach
each other one leads and the others follow it; a swarm that is split has a leader in each part; once
the parts meet, the leader that more peers follow goes on under a higher term, and the other steps
down. A peer speaks for itself only: that somebody leads is believed of that peer alone, over a
connection under its own key, and how many follow it is what they say themselves.

A plain object: events and ``now`` (monotonic seconds) in, decisions out.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Literal

from molink.swarm.election.events import (
    ConnectionLostEvent,
    CoordinatorFailedEvent,
    CoordinatorHeardEvent,
    CoordinatorStartedEvent,
    ElectionAction,
    ElectionEvent,
    ElectionTimePassedEvent,
    FollowLeaderAction,
    MembershipChangedEvent,
    PeerAnsweredEvent,
    PeerTimedOutEvent,
    QueryLeaderAction,
    RaiseTermAction,
    ResignedEvent,
    StartCoordinatorAction,
    StepDownAction,
)
from molink.swarm.terms import MAX_ROUND, next_term, round_of
from molink.wire.messages.election import LeaderView

#: A coordinator that says nothing for this long, in seconds, is lost.
LEADER_TIMEOUT = 3.0
#: The same before a daemon has heard any, for the one that it has started itself: it measures its
#: device and reads its model's files before it turns to it.
STARTUP_TIMEOUT = 120.0
#: Pause between two rounds of questions while there is nobody to follow, in seconds.
QUERY_INTERVAL = 0.5
#: How often a leader looks for another part of its swarm, in seconds.
PROBE_INTERVAL = 2.0
#: Whom it asks each time.
PROBE_FANOUT = 4
#: Whom a peer of more than ``PROBES`` others asks first, beside the leader that it knew; and how
#: often, in seconds, until that has had its time to start: half as often each time. Its connection
#: is tried again anyway.
FEW, SELDOM = 1, 1.0
#: The longest that a peer leaves it to those before it in the order to ask all, in seconds.
MAX_RANK_DELAY = 3.0
#: How long the peer whose turn it is has to begin to lead, in seconds.
CLAIM_TIMEOUT = 5.0
#: After its own start a peer gives the leader that it knew so much time to start too, in seconds.
RESTART_GRACE = 10.0
#: The same while the swarm runs, for a coordinator without a daemon, which nobody can ask.
STANDALONE_GRACE = 10.0
#: How far above ours, in rounds, a term may be that a single peer names.
MAX_TERM_ADVANCE = 64
#: A leader takes a higher term for the sake of others at most this often, in seconds.
RAISE_INTERVAL = 1.0
#: Ticks further apart than this, in seconds, say that this process (or PC) stood still.
SUSPEND_THRESHOLD = 2.0
#: After one, answers are waited for anew for this long, in seconds, before this peer leads: what
#: has run out says nothing of the others, whose words may lie in its sockets.
RESUME_GRACE = 1.0

#: The version of a replica where there is none: such a peer leads only what it founds.
NO_REPLICA = (0, 0)

Role = Literal["looking", "following", "starting", "leading", "ended"]


class LeaderElection:
    """One peer's part in who leads the swarm."""

    def __init__(
        self,
        own_id: str,
        now: float,
        *,
        known: MembershipChangedEvent,
        term: int = 0,
        leader: str = "",
        can_lead: bool = True,
    ) -> None:
        """``term`` and ``leader`` as this peer knew them last; it looks for who leads now.

        One that isn't ``can_lead`` never leads.
        """
        self._own_id = own_id
        self._order = known.order
        #: How far the replica is that this peer holds: term, and revision in it.
        self._replica = known.replica
        self.term = term
        #: The peer that leads, or led last; empty for a coordinator without a daemon.
        self.leader = leader
        self.role: Role = "looking"
        self._heard_at = self._timer_at = now
        #: When the next round of questions is due.
        self._query_at = now
        #: Until the round after that, while a leader is given its time to start.
        self._query_backoff = SELDOM
        #: Before this nobody takes the place of a leader that can't be reached.
        self._wait_until = now if leader == own_id else now + RESTART_GRACE + self._rank_delay
        #: The same after a standstill.
        self._resumed_at = now
        self._answers: dict[str, LeaderView] = {}
        self._unanswered: set[str] = set()
        #: A leader of a higher term; a round of questions says whom the others follow.
        self._rival = ""
        #: Whose turn it is to lead, and since when.
        self._candidate: tuple[str, float] = ("", now)
        #: Peers that didn't lead although it was their turn, and until when they are passed over.
        self._unfit_until: dict[str, float] = {} if can_lead else {own_id: math.inf}
        self._raised_at = now - RAISE_INTERVAL
        self._probe_index = 0
        #: Whether this round of questions is to all: only then this peer may lead.
        self._asked_all = False
        #: The term that this peer is about to lead in, and since when.
        self._pending_term = (term, now)
        #: Where the coordinator of this PC listens.
        self._own_coordinator: CoordinatorStartedEvent | None = None
        #: Whether any coordinator has been heard yet.
        self._has_heard_leader = False
        self._story: deque[str] = deque(maxlen=64)
        self._actions: list[ElectionAction] = []

    # --- what others are told ------------------------------------------------------------------

    def build_view(self, now: float) -> LeaderView:
        """What this peer answers when it is asked whom it follows."""
        own = self._own_coordinator if self.role == "leading" else None
        return LeaderView(
            term=self.term,
            leader=self._own_id if self.role == "starting" else self.leader,
            is_leader=own is not None,
            hears_leader=self._has_leader(now),
            can_lead=self.role != "ended" and not self._is_unfit(self._own_id, now),
            replica=self._replica,
            coordinator_key=own.coordinator_key if own is not None else "",
            addresses=own.addresses if own is not None else (),
        )

    def _has_leader(self, now: float) -> bool:
        """Whether there is, or is about to be, a coordinator for this peer."""
        if self.role == "starting":
            return now - self._pending_term[1] <= CLAIM_TIMEOUT
        return self.role == "following" and now - self._heard_at <= LEADER_TIMEOUT

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return tuple(self._story)

    @property
    def _other_peers(self) -> tuple[str, ...]:
        return tuple(peer for peer in self._order if peer != self._own_id)

    @property
    def _rank_delay(self) -> float:
        """For how long to leave it to those before in the order to ask all, in seconds.

        It is them who may lead, and who leads tells all others. The first few don't wait.
        """
        before = [peer for peer in self._order if peer != self.leader]
        rank = before.index(self._own_id) if self._own_id in before else len(before)
        return min(rank // PROBE_FANOUT * QUERY_INTERVAL, MAX_RANK_DELAY)

    # --- events --------------------------------------------------------------------------------

    def handle(self, event: ElectionEvent, now: float) -> list[ElectionAction]:
        """Take an event; returns what to do, in order."""
        if self.role == "ended":
            return []
        match event:
            case CoordinatorHeardEvent():
                self._on_coordinator_heard(event, now)
            case ConnectionLostEvent():
                if self.role == "following":
                    self._start_search("the connection to the coordinator is lost", now)
            case MembershipChangedEvent():
                self._on_membership_changed(event)
            case PeerAnsweredEvent():
                self._on_peer_answered(event.peer, event.view, now)
            case PeerTimedOutEvent(peer):
                self._unanswered.discard(peer)
                self._answers.pop(peer, None)
            case CoordinatorStartedEvent():
                self._on_coordinator_started(event, now)
            case CoordinatorFailedEvent():
                self._on_coordinator_failed(now)
            case ResignedEvent():
                self._log_transition(now, "ended")
                self.role = "ended"
            case ElectionTimePassedEvent():
                self._on_timer(now)
        self._evaluate_answers(now)
        decisions, self._actions = self._actions, []
        return decisions

    def _on_coordinator_heard(self, event: CoordinatorHeardEvent, now: float) -> None:
        if event.term < self.term:
            return  # of a leader whose time is over
        self._heard_at, self._has_heard_leader = now, True
        if self.role in ("leading", "starting"):
            return
        if self.role == "looking":
            self._log_transition(
                now, f"hears {event.leader or 'the coordinator'} in term {event.term}"
            )
            self.role = "following"
        self.term, self.leader = event.term, event.leader

    def _on_membership_changed(self, event: MembershipChangedEvent) -> None:
        self._order, self._replica = event.order, event.replica
        self._unanswered &= set(event.order)
        # Who is no member any more has no say in who leads.
        for gone in self._answers.keys() - set(event.order):
            del self._answers[gone]

    def _on_peer_answered(self, peer: str, view: LeaderView, now: float) -> None:
        self._unanswered.discard(peer)
        if peer not in self._other_peers:
            return
        if round_of(view.term) > min(round_of(self.term) + MAX_TERM_ADVANCE, MAX_ROUND):
            self._log_transition(now, f"{peer} names term {view.term}, which can't be")
            return
        self._answers[peer] = view
        if self.role == "leading":
            self._check_for_rival(peer, view, now)
        elif self.role == "looking" and not self._asked_all:
            self._query_named_leader(view)

    def _on_coordinator_started(self, event: CoordinatorStartedEvent, now: float) -> None:
        if self.role not in ("starting", "leading"):
            return
        self.term = max(self.term, self._pending_term[0], event.term)
        self._log_transition(now, f"leads in term {self.term}")
        self.role, self.leader, self._own_coordinator, self._heard_at = (
            "leading",
            self._own_id,
            event,
            now,
        )
        self._actions.append(
            FollowLeaderAction(self._own_id, self.term, event.coordinator_key, event.addresses)
        )
        self._query_all(now)  # and so tell them

    def _on_coordinator_failed(self, now: float) -> None:
        if self.role == "leading":
            self._actions.append(StepDownAction())
        self._own_coordinator = None
        self._unfit_until[self._own_id] = now + RESTART_GRACE
        self._start_search("the coordinator can't run here", now)

    def _on_timer(self, now: float) -> None:
        stood_still = now - self._timer_at > SUSPEND_THRESHOLD
        self._timer_at = now
        if stood_still:
            # Nobody could be heard; and another may lead by now.
            self._heard_at, self._resumed_at, self._candidate = now, now + RESUME_GRACE, ("", now)
            self._start_query_round(now)
        elif self.role == "leading":
            if now - self._heard_at > (
                2 * LEADER_TIMEOUT if self._has_heard_leader else STARTUP_TIMEOUT
            ):
                self._log_transition(now, "the coordinator here says nothing any more")
                self._heard_at = now
                self._actions.append(StartCoordinatorAction(self.term))
            if now >= self._query_at:
                self._probe_peers(now)
        elif self.role == "following" and now - self._heard_at > LEADER_TIMEOUT:
            self._start_search("the coordinator says nothing any more", now)
        elif self.role != "looking" or now < self._query_at:
            return
        elif not self._unanswered or not self._asked_all:
            self._start_query_round(now, some=now < self._wait_until)

    # --- looking for a leader ------------------------------------------------------------------

    def _start_search(self, why: str, now: float) -> None:
        self._log_transition(now, why)
        self.role = "looking"
        self._wait_until = now + self._rank_delay if self.leader else now + STANDALONE_GRACE
        self._candidate, self._query_backoff = ("", now), SELDOM
        self._start_query_round(now, some=True)

    def _start_query_round(self, now: float, *, some: bool = False) -> None:
        """Ask all; or first ``some``.

        When a swarm starts, or its leader is slow, all PCs look: if each of many asks each other
        one, they are busy with that alone.
        """
        self._answers.clear()
        if some and len(self._other_peers) > PROBE_FANOUT:
            self._query_peers(self._next_probe_targets(FEW), now)
            self._asked_all = False
            if now < self._wait_until:
                self._query_at = min(now + self._query_backoff, self._wait_until)
                self._query_backoff *= 2
        else:
            self._query_all(now)

    def _query_all(self, now: float) -> None:
        self._query_peers(self._other_peers, now)
        self._asked_all = True

    def _query_peers(self, peers: Iterable[str], now: float) -> None:
        self._query_at = now + QUERY_INTERVAL
        # First the leader that it knew: if that one answers, nobody else need be asked.
        known = [self.leader] if self.leader in self._other_peers else []
        self._unanswered = {*known, *peers}
        self._actions += [QueryLeaderAction(peer) for peer in dict.fromkeys((*known, *peers))]

    def _next_probe_targets(self, count: int) -> list[str]:
        """A few others, in turn."""
        others, some = self._other_peers, []
        for _ in range(min(count, len(others))):
            self._probe_index = (self._probe_index + 1) % len(others)
            some.append(others[self._probe_index])
        return some

    def _query_named_leader(self, view: LeaderView) -> None:
        """A peer names the leader that it hears: ask that one."""
        known = view.leader in self._answers or view.leader in self._unanswered
        if view.hears_leader and view.leader in self._other_peers and not known:
            self._unanswered.add(view.leader)
            self._actions.append(QueryLeaderAction(view.leader))

    def is_awaiting(self, peer: str) -> bool:
        """Whether an answer of that peer still counts, which was to be asked."""
        return self.role == "leading" or peer in self._unanswered

    def _evaluate_answers(self, now: float) -> None:
        """Do what follows from the answers, if enough have come."""
        if self.role == "leading" and self._rival and not self._unanswered:
            self._resolve_rival(now)
        if self.role not in ("looking", "following"):
            return
        leaders = {peer: view for peer, view in self._answers.items() if view.is_leader}
        found = max(leaders, key=lambda peer: leaders[peer].term, default="")
        if found and self._is_preferable(found, leaders[found]):
            self._follow_leader(found, leaders[found], now)
        elif self.role == "looking" and not found and not self._unanswered:
            if self._asked_all:
                self._elect_leader(now)
            elif now >= self._wait_until:
                self._start_query_round(now)

    def _is_preferable(self, leader: str, view: LeaderView) -> bool:
        """Whether to turn to a leader: none below our term, and no other one while ours is heard.

        Leaders settle between themselves which of two goes on.
        """
        if self.role == "looking":
            return view.term >= self.term
        return view.term > self.term and leader == self.leader

    def _follow_leader(self, leader: str, view: LeaderView, now: float) -> None:
        self._log_transition(now, f"turns to {leader}, which leads in term {view.term}")
        self.role, self.term, self.leader, self._heard_at = "following", view.term, leader, now
        self._answers.clear()
        self._unanswered.clear()
        self._actions.append(
            FollowLeaderAction(leader, view.term, view.coordinator_key, view.addresses)
        )

    def _elect_leader(self, now: float) -> None:
        """Everybody was asked, and nobody that can be reached leads: whose turn is it?"""
        if (
            now < max(self._wait_until, self._resumed_at)
            or now - self._timer_at > SUSPEND_THRESHOLD
        ):
            return  # the old one may still start; or nothing is known of anybody yet
        if any(view.hears_leader for view in self._answers.values()):
            return  # it lives where we can't reach it
        turn = self._pick_successor(now)
        if turn == self._own_id:
            newest = max([self.term, *(view.term for view in self._answers.values())])
            ours = self.leader == self._own_id and newest == self.term
            self._start_leading(self.term if ours else next_term(newest, self._own_id), now)
        elif turn != self._candidate[0]:
            self._candidate = (turn, now)
        elif turn and now - self._candidate[1] > CLAIM_TIMEOUT:
            self._unfit_until[turn] = now + RESTART_GRACE

    def _pick_successor(self, now: float) -> str:
        """Who has the newest replica, and of those the first in the order; empty if nobody may."""
        held = {peer: view.replica for peer, view in self._answers.items() if view.can_lead}
        held[self._own_id] = self._replica
        can_lead = [
            peer
            for peer in self._order
            if peer in held
            and not self._is_unfit(peer, now)
            and (held[peer] != NO_REPLICA or peer == self._own_id == self.leader)
        ]
        return max(can_lead, key=held.__getitem__, default="")  # the first of equal ones

    def _is_unfit(self, peer: str, now: float) -> bool:
        return now < self._unfit_until.get(peer, now)

    def _start_leading(self, term: int, now: float) -> None:
        lost = self.leader if self.leader != self._own_id else ""
        self._log_transition(now, f"is to lead in term {term}")
        self.role, self._pending_term, self._rival = "starting", (term, now), ""
        self._actions.append(StartCoordinatorAction(term, lost))

    # --- leading -------------------------------------------------------------------------------

    def _probe_peers(self, now: float) -> None:
        """Ask a few, in turn: one that can't be reached now may lead another part later."""
        self._query_at = now + PROBE_INTERVAL
        self._actions += [
            QueryLeaderAction(peer) for peer in self._next_probe_targets(PROBE_FANOUT)
        ]

    def _check_for_rival(self, peer: str, view: LeaderView, now: float) -> None:
        """A peer says whom it follows; see whether it is of another part of the swarm."""
        if view.is_leader and view.term > self.term:
            if not self._rival:
                self._log_transition(now, f"{peer} leads in term {view.term}")
                self._rival = peer
                self._query_all(now)
        elif not view.is_leader and not view.hears_leader and view.term > self.term:
            self._raise_term(view.term, now)  # so that it may follow
        elif view.hears_leader and view.leader in self._other_peers and not self._rival:
            self._actions.append(QueryLeaderAction(view.leader))

    def _resolve_rival(self, now: float) -> None:
        """All have answered who can: the leader that more of them follow goes on."""
        rival, self._rival = self._rival, ""
        view = self._answers.get(rival)
        if view is None or not view.is_leader or view.term <= self.term:
            return
        followed = [one.leader for one in self._answers.values() if one.hears_leader]
        ours, theirs = followed.count(self._own_id), followed.count(rival)
        first = self._order.index(self._own_id) < self._order.index(rival)
        if (ours, first) > (theirs, not first):
            self._raise_term(view.term, now)
            return
        self._log_transition(now, f"steps down: {theirs} follow {rival}, {ours} follow this peer")
        self._own_coordinator = None
        self._actions.append(StepDownAction())
        self._follow_leader(rival, view, now)

    def _raise_term(self, above: int, now: float) -> None:
        """Go on leading in a term above another one."""
        if now - self._raised_at >= RAISE_INTERVAL:
            self._raised_at, self.term = now, next_term(above, self._own_id)
            self._log_transition(now, f"goes on in term {self.term}")
            self._actions.append(RaiseTermAction(self.term))

    # --- small things --------------------------------------------------------------------------

    def _log_transition(self, now: float, text: str) -> None:
        self._story.append(f"{now:.1f} {text}")
