"""Leader election: which peer's coordinator to follow, and when to run one here.

Every peer holds a replica of the coordinator's state and runs one election. A *term* numbers the
reign of one leader, as in raft: terms only rise, and no two leaders share one, since the low bits
are the leader's own. The high bits of an epoch are the term in which it was made, so messages of a
deposed leader are recognisably old.

A swarm of two PCs has no majority, so this is not raft. Guaranteed instead: of peers that reach
each other one leads and the others follow; each part of a partitioned swarm has a leader; when
parts meet, the leader with more followers continues under a higher term, and the other steps down.
A peer testifies only about itself: that it leads, and whom it follows.

Sans-IO: events and ``now`` (monotonic seconds) in, actions out.
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
from molink.swarm.election.terms import MAX_ROUND, next_term, round_of
from molink.util.timeouts import TIMEOUTS
from molink.wire.messages.election import LeaderView

# All times are in seconds.

#: A coordinator that has been silent for longer is lost.
LEADER_TIMEOUT = TIMEOUTS.leader
#: The same until a daemon has heard any coordinator, for the one that it started itself: first it
#: measures its device and reads its model's files.
STARTUP_TIMEOUT = 120.0
#: Between two query rounds without a leader.
QUERY_INTERVAL = 0.5
#: Between two probes of a leader for other parts of its swarm, and the peers that each one queries.
PROBE_INTERVAL = 2.0
PROBE_FANOUT = 4
#: A peer of more than ``PROBE_FANOUT`` others first queries one of them besides the last leader,
#: after this time, then twice as long each time, until the leader has had its time to start.
FIRST_FANOUT = 1
FIRST_BACKOFF = 1.0
#: Longest delay before a peer far down the order queries everyone.
MAX_RANK_DELAY = 3.0
#: For the next peer in line to start leading.
CLAIM_TIMEOUT = 5.0
#: After its own start a peer gives the last leader this time to start too.
RESTART_GRACE = 10.0
#: The same in a running swarm, for a coordinator without a daemon, which cannot be queried.
STANDALONE_GRACE = 10.0
#: Rounds by which a term named by a single peer may exceed ours.
MAX_TERM_ADVANCE = 64
#: Shortest time between two raises of a leader's term.
RAISE_INTERVAL = 1.0
#: A gap between timer events that means this process (or PC) was suspended.
SUSPEND_THRESHOLD = 2.0
#: After a suspension answers are awaited for this long before this peer leads: expired timeouts say
#: nothing about the others, whose messages may wait in its sockets.
RESUME_GRACE = 1.0

#: Version of a missing replica. A peer without a replica leads only a swarm that it founds.
NO_REPLICA = (0, 0)

#: ``candidate``: without a leader. ``starting``: its coordinator is about to run.
Role = Literal["candidate", "follower", "starting", "leader", "stopped"]


class LeaderElection:
    """One peer's part in the election."""

    def __init__(
        self,
        own_id: str,
        now: float,
        *,
        membership: MembershipChangedEvent,
        term: int = 0,
        leader: str = "",
        can_lead: bool = True,
    ) -> None:
        """Start as a candidate; ``term`` and ``leader`` are the last ones known."""
        self._own_id = own_id
        self._order = membership.order
        #: Version of the replica that this peer holds.
        self._replica = membership.replica
        self.term = term
        #: The present or last leader; empty for a coordinator without a daemon.
        self.leader = leader
        self.role: Role = "candidate"
        self._heard_at = self._timer_at = now
        #: When the next query round is due, and the pause before the one after it.
        self._query_at = now
        self._query_backoff = FIRST_BACKOFF
        #: Until then nobody replaces an unreachable leader.
        self._wait_until = now if leader == own_id else now + RESTART_GRACE + self._rank_delay
        #: The same after a suspension.
        self._resumed_at = now
        self._answers: dict[str, LeaderView] = {}
        self._unanswered: set[str] = set()
        #: A leader of a higher term; a query round counts its followers.
        self._rival = ""
        #: The peer next in line to lead, and since when.
        self._candidate: tuple[str, float] = ("", now)
        #: Peers that failed to lead when in line, and until when they are skipped.
        self._unfit_until: dict[str, float] = {} if can_lead else {own_id: math.inf}
        self._raised_at = now - RAISE_INTERVAL
        self._probe_index = 0
        #: Whether this round queries everyone; only then may this peer lead.
        self._asked_all = False
        #: The term in which this peer is about to lead, and since when.
        self._pending_term = (term, now)
        self._own_coordinator: CoordinatorStartedEvent | None = None
        self._has_heard_leader = False
        self._transitions: deque[str] = deque(maxlen=64)
        self._actions: list[ElectionAction] = []

    def build_view(self, now: float) -> LeaderView:
        """The answer to a query: whom this peer follows."""
        own = self._own_coordinator if self.role == "leader" else None
        return LeaderView(
            term=self.term,
            leader=self._own_id if self.role == "starting" else self.leader,
            is_leader=own is not None,
            hears_leader=self._has_leader(now),
            can_lead=self.role != "stopped" and not self._is_unfit(self._own_id, now),
            replica=self._replica,
            coordinator_key=own.coordinator_key if own is not None else "",
            addresses=own.addresses if own is not None else (),
        )

    def _has_leader(self, now: float) -> bool:
        """Whether this peer hears a coordinator, or is about to run one."""
        if self.role == "starting":
            return now - self._pending_term[1] <= CLAIM_TIMEOUT
        return self.role == "follower" and now - self._heard_at <= LEADER_TIMEOUT

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return tuple(self._transitions)

    @property
    def _other_peers(self) -> tuple[str, ...]:
        return tuple(peer for peer in self._order if peer != self._own_id)

    @property
    def _rank_delay(self) -> float:
        """Delay before querying everyone; the first few in the order don't wait.

        They are the likely leaders, and a new leader announces itself.
        """
        before = [peer for peer in self._order if peer != self.leader]
        rank = before.index(self._own_id) if self._own_id in before else len(before)
        return min(rank // PROBE_FANOUT * QUERY_INTERVAL, MAX_RANK_DELAY)

    # --- events --------------------------------------------------------------------------------

    def handle(self, event: ElectionEvent, now: float) -> list[ElectionAction]:
        """Handle an event; returns the actions that follow, in order."""
        if self.role == "stopped":
            return []
        match event:
            case CoordinatorHeardEvent():
                self._on_coordinator_heard(event, now)
            case ConnectionLostEvent():
                if self.role == "follower":
                    self._start_search("lost the connection to the coordinator", now)
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
                self._log_transition(now, "stopped")
                self.role = "stopped"
            case ElectionTimePassedEvent():
                self._on_timer(now)
        self._evaluate_answers(now)
        actions, self._actions = self._actions, []
        return actions

    def _on_coordinator_heard(self, event: CoordinatorHeardEvent, now: float) -> None:
        if event.term < self.term:
            return  # a deposed leader
        self._heard_at, self._has_heard_leader = now, True
        if self.role in ("leader", "starting"):
            return
        if self.role == "candidate":
            leader = event.leader or "the coordinator"
            self._log_transition(now, f"hears {leader} in term {event.term}")
            self.role = "follower"
        self.term, self.leader = event.term, event.leader

    def _on_membership_changed(self, event: MembershipChangedEvent) -> None:
        self._order, self._replica = event.order, event.replica
        self._unanswered &= set(event.order)
        for removed in self._answers.keys() - set(event.order):
            del self._answers[removed]

    def _on_peer_answered(self, peer: str, view: LeaderView, now: float) -> None:
        self._unanswered.discard(peer)
        if peer not in self._other_peers:
            return
        if round_of(view.term) > min(round_of(self.term) + MAX_TERM_ADVANCE, MAX_ROUND):
            self._log_transition(now, f"ignores implausible term {view.term} of {peer}")
            return
        self._answers[peer] = view
        if self.role == "leader":
            self._check_for_rival(peer, view, now)
        elif self.role == "candidate" and not self._asked_all:
            self._query_named_leader(view)

    def _on_coordinator_started(self, event: CoordinatorStartedEvent, now: float) -> None:
        if self.role not in ("starting", "leader"):
            return
        self.term = max(self.term, self._pending_term[0], event.term)
        self._log_transition(now, f"leads in term {self.term}")
        self.role, self.leader = "leader", self._own_id
        self._own_coordinator, self._heard_at = event, now
        self._actions.append(
            FollowLeaderAction(self._own_id, self.term, event.coordinator_key, event.addresses)
        )
        self._query_all(now)  # a query announces the new leader

    def _on_coordinator_failed(self, now: float) -> None:
        if self.role == "leader":
            self._actions.append(StepDownAction())
        self._own_coordinator = None
        self._unfit_until[self._own_id] = now + RESTART_GRACE
        self._start_search("can't run the coordinator", now)

    def _on_timer(self, now: float) -> None:
        suspended = now - self._timer_at > SUSPEND_THRESHOLD
        self._timer_at = now
        silence = now - self._heard_at
        if suspended:
            # No message could arrive meanwhile, and another peer may lead by now.
            self._heard_at, self._resumed_at, self._candidate = now, now + RESUME_GRACE, ("", now)
            self._start_query_round(now)
        elif self.role == "leader":
            if silence > (2 * LEADER_TIMEOUT if self._has_heard_leader else STARTUP_TIMEOUT):
                self._log_transition(now, "restarts its silent coordinator")
                self._heard_at = now
                self._actions.append(StartCoordinatorAction(self.term))
            if now >= self._query_at:
                self._probe_peers(now)
        elif self.role == "follower" and silence > LEADER_TIMEOUT:
            self._start_search("no longer hears the coordinator", now)
        elif self.role != "candidate" or now < self._query_at:
            return
        elif not self._unanswered or not self._asked_all:
            self._start_query_round(now, partial=now < self._wait_until)

    # --- candidate -----------------------------------------------------------------------------

    def _start_search(self, reason: str, now: float) -> None:
        self._log_transition(now, reason)
        self.role = "candidate"
        self._wait_until = now + self._rank_delay if self.leader else now + STANDALONE_GRACE
        self._candidate, self._query_backoff = ("", now), FIRST_BACKOFF
        self._start_query_round(now, partial=True)

    def _start_query_round(self, now: float, *, partial: bool = False) -> None:
        """Query everyone, or first a few.

        When a swarm starts, or its leader is slow, all peers are candidates; queries of each to
        each would keep a large swarm busy with nothing else.
        """
        self._answers.clear()
        if partial and len(self._other_peers) > PROBE_FANOUT:
            self._query_peers(self._next_probe_targets(FIRST_FANOUT), now)
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
        # The last leader first: if it answers, nobody else is needed.
        last = [self.leader] if self.leader in self._other_peers else []
        self._unanswered = {*last, *peers}
        self._actions += [QueryLeaderAction(peer) for peer in dict.fromkeys((*last, *peers))]

    def _next_probe_targets(self, count: int) -> list[str]:
        """The next ``count`` other peers, round robin."""
        others, targets = self._other_peers, []
        for _ in range(min(count, len(others))):
            self._probe_index = (self._probe_index + 1) % len(others)
            targets.append(others[self._probe_index])
        return targets

    def _query_named_leader(self, view: LeaderView) -> None:
        """Query the leader that a peer hears."""
        known = view.leader in self._answers or view.leader in self._unanswered
        if view.hears_leader and view.leader in self._other_peers and not known:
            self._unanswered.add(view.leader)
            self._actions.append(QueryLeaderAction(view.leader))

    def is_awaiting(self, peer: str) -> bool:
        """Whether an answer of a queried peer still matters."""
        return self.role == "leader" or peer in self._unanswered

    def _evaluate_answers(self, now: float) -> None:
        """Act on the answers, if enough have arrived."""
        if self.role == "leader" and self._rival and not self._unanswered:
            self._resolve_rival(now)
        if self.role not in ("candidate", "follower"):
            return
        leaders = {peer: view for peer, view in self._answers.items() if view.is_leader}
        found = max(leaders, key=lambda peer: leaders[peer].term, default="")
        if found and self._is_preferable(found, leaders[found]):
            self._follow_leader(found, leaders[found], now)
        elif self.role == "candidate" and not found and not self._unanswered:
            if self._asked_all:
                self._elect_leader(now)
            elif now >= self._wait_until:
                self._start_query_round(now)

    def _is_preferable(self, leader: str, view: LeaderView) -> bool:
        """Whether to follow a leader: never one of a lower term, nor another one than ours.

        Two leaders settle between themselves which one steps down.
        """
        if self.role == "candidate":
            return view.term >= self.term
        return view.term > self.term and leader == self.leader

    def _follow_leader(self, leader: str, view: LeaderView, now: float) -> None:
        self._log_transition(now, f"follows {leader}, which leads in term {view.term}")
        self.role, self.term, self.leader, self._heard_at = "follower", view.term, leader, now
        self._answers.clear()
        self._unanswered.clear()
        self._actions.append(
            FollowLeaderAction(leader, view.term, view.coordinator_key, view.addresses)
        )

    def _elect_leader(self, now: float) -> None:
        """Everyone was queried and no reachable peer leads: lead, or wait for the next in line."""
        suspended = now - self._timer_at > SUSPEND_THRESHOLD
        if suspended or now < max(self._wait_until, self._resumed_at):
            return  # the last leader may still start
        if any(view.hears_leader for view in self._answers.values()):
            return  # the leader runs, but out of our reach
        successor = self._pick_successor(now)
        if successor == self._own_id:
            newest = max([self.term, *(view.term for view in self._answers.values())])
            ours = self.leader == self._own_id and newest == self.term
            self._start_leading(self.term if ours else next_term(newest, self._own_id), now)
        elif successor != self._candidate[0]:
            self._candidate = (successor, now)
        elif successor and now - self._candidate[1] > CLAIM_TIMEOUT:
            self._unfit_until[successor] = now + RESTART_GRACE

    def _pick_successor(self, now: float) -> str:
        """The first peer in the order that holds the newest replica; empty if none may lead."""
        held = {peer: view.replica for peer, view in self._answers.items() if view.can_lead}
        held[self._own_id] = self._replica
        eligible = [
            peer
            for peer in self._order
            if peer in held
            and not self._is_unfit(peer, now)
            and (held[peer] != NO_REPLICA or peer == self._own_id == self.leader)
        ]
        return max(eligible, key=held.__getitem__, default="")

    def _is_unfit(self, peer: str, now: float) -> bool:
        return now < self._unfit_until.get(peer, now)

    def _start_leading(self, term: int, now: float) -> None:
        lost = self.leader if self.leader != self._own_id else ""
        self._log_transition(now, f"starts to lead in term {term}")
        self.role, self._pending_term, self._rival = "starting", (term, now), ""
        self._actions.append(StartCoordinatorAction(term, lost))

    # --- leader --------------------------------------------------------------------------------

    def _probe_peers(self, now: float) -> None:
        """Query a few peers in turn: an unreachable one may lead another part by now."""
        self._query_at = now + PROBE_INTERVAL
        targets = self._next_probe_targets(PROBE_FANOUT)
        self._actions += [QueryLeaderAction(peer) for peer in targets]

    def _check_for_rival(self, peer: str, view: LeaderView, now: float) -> None:
        """Check whether an answer comes from another part of the swarm."""
        if view.is_leader and view.term > self.term:
            if not self._rival:
                self._log_transition(now, f"{peer} leads in term {view.term}")
                self._rival = peer
                self._query_all(now)
        elif not view.is_leader and not view.hears_leader and view.term > self.term:
            self._raise_term(view.term, now)  # so that the peer can follow
        elif view.hears_leader and view.leader in self._other_peers and not self._rival:
            self._actions.append(QueryLeaderAction(view.leader))

    def _resolve_rival(self, now: float) -> None:
        """All reachable peers have answered: the leader with more followers continues."""
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
        """Continue to lead in a term above another one."""
        if now - self._raised_at >= RAISE_INTERVAL:
            self._raised_at, self.term = now, next_term(above, self._own_id)
            self._log_transition(now, f"raises its term to {self.term}")
            self._actions.append(RaiseTermAction(self.term))

    def _log_transition(self, now: float, text: str) -> None:
        self._transitions.append(f"{now:.1f} {text}")
