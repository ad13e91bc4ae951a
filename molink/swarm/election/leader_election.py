"""Leader election: decides which peer's coordinator to follow, and when to run one.

Every peer holds a replica of the coordinator's state and runs one election. As in raft, a *term*
belongs to one leader: terms only rise, and no two leaders share one, since the low bits identify
the leader. The high bits of an epoch are the term in which it was created, so messages of a deposed
leader are recognisably old.

A swarm of two PCs has no majority, so this is not raft. The guarantees are: among peers that reach
each other one leads and the others follow; each part of a partitioned swarm has a leader; when
parts meet, the leader with more followers continues under a higher term, and the other steps down.

A member may lie. So followers count by branch, without the branch of the leader itself; hearing a
leader counts only with its lease; a peer's claims raise the term only within a budget; and they can
only delay an election, by at most :data:`ELECTION_BOUND`.

Sans-IO: it takes events and ``now`` (monotonic seconds), and returns actions.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
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
    ReportMisbehaviourAction,
    ResignedEvent,
    StartCoordinatorAction,
    StepDownAction,
)
from molink.swarm.election.leases import LeaseChecker
from molink.swarm.election.term_budget import LEADER_SHARE, TermBudget
from molink.swarm.election.terms import next_term
from molink.swarm.running_time import MAX_STEP
from molink.util.timeouts import TIMEOUTS, SilenceLimit
from molink.wire.messages.election import LeaderView, Lease

# All times are in seconds.

#: Maximum silence of a coordinator before it counts as lost; usually the limit is shorter
#: (:class:`SilenceLimit`).
LEADER_TIMEOUT = TIMEOUTS.leader
#: A follower queries a leader's PC this long before the silence limit, so that the answer, for
#: which a query waits 1 s, is overdue at the limit.
DOUBT_LEAD = 0.75
#: The silence limit for a daemon's own coordinator until it has heard any: before that, the daemon
#: measures its device and reads its model's files.
STARTUP_TIMEOUT = 120.0
#: Interval between two query rounds without a leader.
QUERY_INTERVAL = 0.5
#: Interval between two probes of a leader for other parts of its swarm, and peers queried per
#: probe.
PROBE_INTERVAL = 2.0
PROBE_FANOUT = 4
#: With more than ``PROBE_FANOUT`` other peers, a peer first queries only one of them besides the
#: last leader, after this time, which then doubles each time, until the leader has had time to
#: start.
FIRST_FANOUT = 1
FIRST_BACKOFF = 1.0
#: Maximum delay before a peer far down the order queries everyone.
MAX_RANK_DELAY = 3.0
#: Time for the next peer in line, with all others of its branch, to start leading; also the time
#: for which unproven claims that somebody leads count.
CLAIM_TIMEOUT = 4.0
#: Time after its own start that a peer gives the last leader to start, too.
RESTART_GRACE = 10.0
#: The same in a running swarm, for a coordinator without a daemon, which can't be queried.
STANDALONE_GRACE = 10.0
#: Maximum time by which one lying branch delays an election after the leader was lost, or last
#: proved alive: the branch is next in line, then claims to lead and is silent; the rest is for
#: query rounds.
ELECTION_BOUND = CLAIM_TIMEOUT + LEADER_TIMEOUT + 3.0
#: Maximum time for which a branch that fails to lead is skipped; it doubles from RESTART_GRACE.
MAX_UNFIT_TIME = 640.0
#: Minimum time between two raises of a leader's term.
RAISE_INTERVAL = 1.0
#: Gap between timer events which means that this process (or PC) was suspended.
SUSPEND_THRESHOLD = 2.0
#: After a suspension, time to wait for answers before this peer leads: expired timeouts say nothing
#: about the others, whose messages may be waiting in its sockets.
RESUME_GRACE = 1.0

#: Version of a missing replica. A peer without a replica may lead only a swarm that it founds.
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
        rest: float = 0.0,
    ) -> None:
        """Start as a candidate; ``term`` and ``leader`` are the last ones known.

        ``rest`` is the number of seconds since this PC last heard of its swarm.
        """
        self._own_id = own_id
        self._order = membership.order
        self._branches: Mapping[str, str] = membership.branches
        #: Version of the replica that this peer holds.
        self._replica = membership.replica
        self.term = term
        self._budget = TermBudget(now, rest)
        #: The current or last leader; empty for a coordinator without a daemon.
        self.leader = leader
        #: The last leader whose coordinator this peer has heard.
        self._heard_leader = leader
        self._leases = LeaseChecker()
        #: Maximum silence of the leader.
        self._silence = SilenceLimit(LEADER_TIMEOUT)
        #: Whether the last leader did not answer the last query.
        self._is_leader_mute = False
        #: Peers that just proved that they hear the leader, with their leases.
        self._proofs: dict[str, Lease] = {}
        self.role: Role = "candidate"
        self._heard_at = self._timer_at = now
        #: When a coordinator was last heard; the decision to follow one doesn't count.
        self._beat_at = now
        #: When the next query or round is due, and the pause before the following round.
        self._query_at = now
        self._query_backoff = FIRST_BACKOFF
        #: Time until which nobody replaces an unreachable leader.
        self._wait_until = now if leader == own_id else now + RESTART_GRACE + self._rank_delay
        #: The same time, after a suspension.
        self._resumed_at = now
        self._answers: dict[str, LeaderView] = {}
        self._unanswered: set[str] = set()
        #: A leader of a higher term, whose followers a query round counts.
        self._rival = ""
        #: The members at the time when each peer was last in this part, and when this peer began to
        #: lead.
        self._met: dict[str, tuple[str, ...]] = {}
        self._first_order = membership.order
        #: Time since which there is neither a leader nor a proof that it lives.
        self._leaderless_since = now
        #: The peer next in line to lead, and the time since which its branch has been next.
        self._successor = ""
        self._next_since: dict[str, float] = {}
        #: Branches (and this peer) that failed to lead: the time until which they are skipped, and
        #: how often.
        self._unfit_until: dict[str, float] = {} if can_lead else {own_id: math.inf}
        self._failures: dict[str, int] = {}
        #: Times at which leaders named by others were queried.
        self._named_at: dict[str, float] = {}
        self._raised_at = now - RAISE_INTERVAL
        self._led_since = now
        self._probe_index = 0
        #: Whether this round queries everyone; otherwise this peer may not lead.
        self._asked_all = False
        #: The term in which this peer is about to lead, and the time since which it is.
        self._pending_term = (term, now)
        self._own_coordinator: CoordinatorStartedEvent | None = None
        self._has_heard_leader = False
        self._transitions: deque[str] = deque(maxlen=64)
        self._actions: list[ElectionAction] = []

    def build_view(self, now: float) -> LeaderView:
        """Build the answer to a query: the leader that this peer follows."""
        own = self._own_coordinator if self.role == "leader" else None
        hears_leader = self._has_leader(now)
        is_heard = hears_leader and self.role == "follower" and self._leases.leader == self.leader
        return LeaderView(
            term=self.term,
            leader=self._own_id if self.role == "starting" else self.leader,
            is_leader=own is not None,
            hears_leader=hears_leader,
            can_lead=self.role != "stopped" and not self._is_unfit(self._own_id, now),
            replica=self._replica,
            coordinator_key=own.coordinator_key if own is not None else "",
            addresses=own.addresses if own is not None else (),
            lease=self._leases.lease if is_heard else None,
        )

    def obeys(self, term: int, leader: str) -> bool:
        """Whether to follow a coordinator whose heartbeat was handled."""
        if self.role in ("follower", "candidate"):
            return self.role == "follower" and (term, leader) == (self.term, self.leader)
        # A peer that is about to lead may still be connected to the last leader.
        return term >= self.term and (leader == self._own_id or self.role == "stopped")

    def _has_leader(self, now: float) -> bool:
        """Whether this peer hears a coordinator, or is about to run one."""
        if self.role == "starting":
            return now - self._pending_term[1] <= CLAIM_TIMEOUT
        return self.role == "follower" and now - self._heard_at <= self._silence.seconds

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return tuple(self._transitions)

    @property
    def _other_peers(self) -> tuple[str, ...]:
        return tuple(peer for peer in self._order if peer != self._own_id)

    @property
    def _rank_delay(self) -> float:
        """Return the delay before querying everyone; the first few in the order don't wait.

        They are the likely leaders, and a new leader announces itself.
        """
        before = [peer for peer in self._order if peer != self.leader]
        rank = before.index(self._own_id) if self._own_id in before else len(before)
        return min(rank // PROBE_FANOUT * QUERY_INTERVAL, MAX_RANK_DELAY)

    # --- events --------------------------------------------------------------------------------

    def handle(self, event: ElectionEvent, now: float) -> list[ElectionAction]:
        """Handle an event; return the resulting actions, in order."""
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
                self._is_leader_mute |= peer == self.leader
                self._unanswered.discard(peer)
                self._drop_answer(peer)
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
        if self.role in ("follower", "candidate"):
            if self.leader in self._other_peers and event.leader != self.leader:
                return  # its coordinator names another one
            # A PC that has just joined believes the coordinator of its invitation.
            if self.leader and not self._admits_term(event.leader, event.term, now):
                return
        if event.leader != self._heard_leader:
            self._silence = SilenceLimit(LEADER_TIMEOUT)
        self._silence.on_heard(now)
        self._is_leader_mute = False
        self._heard_at = self._beat_at = now
        self._has_heard_leader = True
        if event.lease is not None and event.lease.leader == event.leader:
            self._leases.on_heartbeat(event.leader, event.lease, event.verify_key, now)
        if self.role in ("leader", "starting"):
            return
        if self.role == "candidate":
            leader = event.leader or "the coordinator"
            self._log_transition(now, f"hears {leader} in term {event.term}")
            self.role = "follower"
        self._adopt_term(event.leader, event.term)
        self.leader = self._heard_leader = event.leader
        self._query_at = now
        self._met[event.leader] = self._order
        self._failures.pop(self._branch_of(event.leader), None)

    def _on_membership_changed(self, event: MembershipChangedEvent) -> None:
        for removed in set(self._order) - set(event.order):
            self._unanswered.discard(removed)
            self._drop_answer(removed)
            self._leases.drop_peer(removed)
            self._named_at.pop(removed, None)
            self._met.pop(removed, None)
        self._order, self._replica, self._branches = event.order, event.replica, event.branches

    def _on_peer_answered(self, peer: str, view: LeaderView, now: float) -> None:
        self._unanswered.discard(peer)
        if peer not in self._other_peers:
            return
        if peer == self.leader:
            self._is_leader_mute = False
            if self.role == "follower" and not (view.is_leader or view.can_lead):
                self._start_search("hears that its leader can't lead", now)
        if not self._admits_term(peer, view.term, now):
            self._log_transition(now, f"ignores implausible term {view.term} of {peer}")
            self._drop_answer(peer)
            return
        self._answers[peer] = view
        if view.leader == self.leader:
            self._met[peer] = self._order
        if self.role == "leader":
            self._check_for_rival(peer, view, now)
        elif self.role == "candidate":
            self._check_proof(peer, view, now)
            if not self._asked_all:
                self._query_named_leader(view)

    def _drop_answer(self, peer: str) -> None:
        self._answers.pop(peer, None)
        self._proofs.pop(peer, None)

    def _branch_of(self, peer: str) -> str:
        return self._branches.get(peer, peer)

    def _admits_term(self, peer: str, term: int, now: float, share: float = 1.0) -> bool:
        """Whether a peer's claim may raise the term that far; reports a peer that keeps exceeding
        it.
        """
        branch = self._branch_of(peer)
        if self._budget.allows_term(branch, term, self.term, now, share):
            return True
        if self._budget.refuse_term(branch, term):
            reason = f"it names term {term}, far after {self.term}"
            self._actions.append(ReportMisbehaviourAction(peer, reason))
        return False

    def _adopt_term(self, peer: str, term: int) -> None:
        self._budget.spend_rounds(self._branch_of(peer), term, self.term)
        self.term = term

    def _on_coordinator_started(self, event: CoordinatorStartedEvent, now: float) -> None:
        if self.role not in ("starting", "leader"):
            return
        self.term = max(self.term, self._pending_term[0], event.term)
        self._log_transition(now, f"leads in term {self.term}")
        if self.role != "leader":
            self._led_since = now
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
        if not self._asked_all:
            self._query_all(now)  # a query tells the others

    def _on_timer(self, now: float) -> None:
        pause = now - self._timer_at
        self._timer_at = now
        if pause > MAX_STEP:
            # Messages that the leader sent meanwhile may be unread.
            self._heard_at = min(self._heard_at + pause, now)
        silence = now - self._heard_at
        if pause > SUSPEND_THRESHOLD:
            # No message could arrive meanwhile, and another peer may already lead.
            self._heard_at = self._beat_at = now
            self._resumed_at = now + RESUME_GRACE
            self._restart_clocks(now)
            self._start_query_round(now)
        elif self.role == "leader":
            if silence > (2 * LEADER_TIMEOUT if self._has_heard_leader else STARTUP_TIMEOUT):
                self._log_transition(now, "restarts its silent coordinator")
                self._heard_at = now
                self._actions.append(StartCoordinatorAction(self.term))
            if now >= self._query_at:
                self._probe_peers(now)
        elif self.role == "follower" and silence > self._silence.seconds:
            self._start_search("no longer hears the coordinator", now)
        elif self.role == "follower" and silence > self._silence.seconds - DOUBT_LEAD:
            self._query_doubted_leader(now)
        elif self.role != "candidate" or now < self._query_at:
            return
        elif not self._unanswered or not self._asked_all:
            self._start_query_round(now, partial=now < self._wait_until)

    def _query_doubted_leader(self, now: float) -> None:
        """Query the leader, once per silence, and nobody else yet."""
        if self.leader in self._other_peers and now >= self._query_at:
            self._query_at = now + LEADER_TIMEOUT
            self._actions.append(QueryLeaderAction(self.leader))

    # --- candidate -----------------------------------------------------------------------------

    def _start_search(self, reason: str, now: float) -> None:
        self._log_transition(now, reason)
        unheard = self.leader != self._heard_leader or now - self._beat_at > ELECTION_BOUND
        if self.role == "follower" and unheard:
            self._mark_unfit(self.leader, now)  # it claims to lead, and isn't heard
            # Meanwhile nobody else could be asked to lead.
            self._next_since.clear()
        else:
            self._wait_until = now + self._rank_delay if self.leader else now + STANDALONE_GRACE
            self._query_backoff = FIRST_BACKOFF
            self._restart_clocks(now)
        self.role = "candidate"
        self._proofs.clear()
        self._start_query_round(now, partial=True)

    def _restart_clocks(self, now: float) -> None:
        """Let other peers' claims delay the election for a while, from now on."""
        self._leaderless_since, self._successor = now, ""
        self._next_since.clear()

    def _start_query_round(self, now: float, *, partial: bool = False) -> None:
        """Query everyone, or first only a few.

        When a swarm starts, or its leader is slow, all peers are candidates; if each queried all
        others, a large swarm would do nothing else. Proofs count until their peers answer again,
        since a liar may answer first.
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
        # The last leader comes first: if it answers, nobody else is needed.
        last = [self.leader] if self.leader in self._other_peers else []
        self._unanswered = {*last, *peers}
        is_regular = self._silence.seconds < LEADER_TIMEOUT
        if self._is_leader_mute and is_regular and len(self._unanswered) > 1:
            self._unanswered.discard(self.leader)  # it is queried again, but not awaited
        self._actions += [QueryLeaderAction(peer) for peer in dict.fromkeys((*last, *peers))]

    def _next_probe_targets(self, count: int) -> list[str]:
        """Return the next ``count`` other peers, round robin."""
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
        return self.role == "leader" or peer in self._unanswered or peer == self.leader

    def _check_proof(self, peer: str, view: LeaderView, now: float) -> None:
        """Check whether a peer proves that it hears the last leader."""
        self._proofs.pop(peer, None)
        if not view.hears_leader or view.lease is None or view.leader != self.leader:
            return
        if self._leases.check_lease(peer, view.lease, self.term, now):
            self._proofs[peer] = view.lease

    def _evaluate_answers(self, now: float) -> None:
        """Act on the answers if enough have arrived."""
        if self.role == "leader" and self._rival and not self._unanswered:
            self._resolve_rival(now)
        if self.role != "candidate":
            return
        claims = {
            peer: view
            for peer, view in self._answers.items()
            if view.is_leader and view.term >= self.term
        }
        found = self._choose_claim(claims, now)
        if found:
            self._follow_leader(found, claims[found], now)
        elif not self._unanswered:
            if self._asked_all:
                self._elect_leader(now)
            elif claims or now >= self._wait_until:
                self._start_query_round(now)

    def _choose_claim(self, claims: Mapping[str, LeaderView], now: float) -> str:
        """Choose the leader to follow among those that claim to lead; empty if there is none."""
        returns = self.leader in claims and self.leader == self._heard_leader
        if returns and not self._is_unfit(self.leader, now):
            return self.leader
        if not claims:
            return ""
        if not self._unanswered:
            votes = {peer: self._count_votes(peer, now) for peer in claims}
            best = max(claims, key=lambda peer: (votes[peer], claims[peer].term))
            if votes[best]:
                return best
        if self._is_leader_proven(now):
            return ""
        # Nobody follows it yet. It was next in line when the last leader did not answer.
        successor = self._successor
        if self._asked_all and not self._unanswered:
            successor = self._pick_successor(now)
        since = self._next_since.get(self._branch_of(successor), now)
        return successor if successor in claims and now - since <= CLAIM_TIMEOUT else ""

    def _count_votes(
        self, leader: str, now: float, electorate: Collection[str] | None = None
    ) -> int:
        """Count branches, other than its own, with a peer that follows ``leader``.

        Only peers in ``electorate`` count, if there is one.
        """
        own = self._branch_of(leader)
        voters = {peer for peer in self._answers if self._branch_of(peer) != own}
        if electorate is not None:
            voters &= set(electorate)
        return len({self._branch_of(peer) for peer in voters if self._votes_for(leader, peer, now)})

    def _votes_for(self, leader: str, peer: str, now: float) -> bool:
        """Whether a peer follows ``leader``, with a lease if this peer can check it."""
        view = self._answers[peer]
        if not view.hears_leader or view.leader != leader or view.lease is None:
            return False
        if self._leases.leader != leader or peer in self._proofs:
            return True
        return self._leases.check_lease(peer, view.lease, 0, now)

    def _follow_leader(self, leader: str, view: LeaderView, now: float) -> None:
        self._log_transition(now, f"follows {leader}, which leads in term {view.term}")
        self._adopt_term(leader, view.term)
        self.role, self.leader, self._heard_at = "follower", leader, now
        self._silence.restart()
        self._is_leader_mute = False
        self._answers.clear()
        self._proofs.clear()
        self._unanswered.clear()
        self._actions.append(
            FollowLeaderAction(leader, view.term, view.coordinator_key, view.addresses)
        )

    def _elect_leader(self, now: float) -> None:
        """Lead, or wait for the next in line, since everyone was queried and no reachable peer
        leads.
        """
        suspended = now - self._timer_at > SUSPEND_THRESHOLD
        if suspended or now < max(self._wait_until, self._resumed_at):
            return  # the last leader may still start
        lived_at = max(map(self._leases.find_time, self._proofs.values()), default=-math.inf)
        if lived_at > self._leaderless_since:
            self._restart_clocks(lived_at)
        self._successor = successor = self._pick_successor(now)
        since = self._next_since.setdefault(self._branch_of(successor), now)
        if self._is_leader_proven(now) or self._is_leader_named(now):
            return  # the leader runs, but is out of reach
        if successor == self._own_id:
            self._start_leading(self._choose_term(now), now)
        elif successor and now - since > CLAIM_TIMEOUT:
            self._mark_unfit(successor, now)

    def _choose_term(self, now: float) -> int:
        """Choose a term to lead in: above all terms that others know, within their budgets."""
        known = {
            view.term: peer
            for peer, view in self._answers.items()
            if view.term > self.term and self._admits_term(peer, view.term, now, LEADER_SHARE)
        }
        if known:
            newest = max(known)
            self._budget.spend_rounds(self._branch_of(known[newest]), newest, self.term)
            return next_term(newest, self._own_id)
        if self.leader == self._own_id:
            return self.term  # it resumes
        return next_term(self.term, self._own_id)

    def _is_leader_proven(self, now: float) -> bool:
        """Whether another peer hears the last leader."""
        return any(self._leases.is_fresh(lease, now) for lease in self._proofs.values())

    def _is_leader_named(self, now: float) -> bool:
        """Whether others claim that somebody leads, which this peer can't check yet."""
        if now - self._leaderless_since >= CLAIM_TIMEOUT:
            return False
        return any(
            not self._is_unfit(peer, now)
            if view.is_leader
            else view.hears_leader and view.leader != self._leases.leader
            for peer, view in self._answers.items()
        )

    def _pick_successor(self, now: float) -> str:
        """Return the first peer in the order that holds the newest replica; empty if none may lead.

        The last leader comes before all others, which wait for it when a swarm starts.
        """
        held = {
            peer: view.replica
            for peer, view in self._answers.items()
            if view.can_lead and not (view.hears_leader and view.leader != peer)
        }
        held[self._own_id] = self._replica
        eligible = [
            peer
            for peer in sorted(self._order, key=lambda peer: peer != self.leader)
            if peer in held
            and not self._is_unfit(peer, now)
            and (held[peer] != NO_REPLICA or peer == self._own_id == self.leader)
        ]
        return max(eligible, key=held.__getitem__, default="")

    def _is_unfit(self, peer: str, now: float) -> bool:
        key = peer if peer == self._own_id else self._branch_of(peer)
        return now < self._unfit_until.get(key, now)

    def _mark_unfit(self, peer: str, now: float) -> None:
        """Skip the branch of a peer that did not lead in time, longer each time."""
        branch = self._branch_of(peer)
        failures = self._failures[branch] = self._failures.get(branch, 0) + 1
        seconds = min(RESTART_GRACE * 2.0 ** min(failures - 1, 16), MAX_UNFIT_TIME)
        self._unfit_until[branch] = now + seconds
        self._next_since.pop(branch, None)
        if self._branch_of(self._successor) == branch:
            self._successor = ""

    def _start_leading(self, term: int, now: float) -> None:
        lost = self.leader if self.leader != self._own_id else ""
        self._log_transition(now, f"starts to lead in term {term}")
        self._first_order = self._order
        self.role, self._pending_term, self._rival = "starting", (term, now), ""
        self._actions.append(StartCoordinatorAction(term, lost))

    # --- leader --------------------------------------------------------------------------------

    def _probe_peers(self, now: float) -> None:
        """Query a few peers in turn, since an unreachable peer may lead another part."""
        self._query_at = now + PROBE_INTERVAL
        targets = self._next_probe_targets(PROBE_FANOUT)
        self._actions += [QueryLeaderAction(peer) for peer in targets]

    def _check_for_rival(self, peer: str, view: LeaderView, now: float) -> None:
        """Check whether an answer comes from another part of the swarm."""
        if view.is_leader and view.term > self.term:
            if not self._rival and not self._is_unfit(peer, now):
                self._log_transition(now, f"{peer} leads in term {view.term}")
                self._rival = peer
                self._query_all(now)
        elif not view.is_leader and not view.hears_leader and view.term > self.term:
            self._raise_term(peer, view.term, now)  # so that the peer can follow
        elif view.hears_leader and view.leader in self._other_peers and not self._rival:
            if now - self._named_at.get(view.leader, -math.inf) < QUERY_INTERVAL:
                return
            self._named_at[view.leader] = now
            self._actions.append(QueryLeaderAction(view.leader))

    def _resolve_rival(self, now: float) -> None:
        """Decide, after all reachable peers have answered: the leader with more followers
        continues.
        """
        rival, self._rival = self._rival, ""
        view = self._answers.get(rival)
        if view is None or not view.is_leader or view.term <= self.term:
            return
        # Each part may have admitted PCs that the other doesn't know. Both leaders must count the
        # same peers; otherwise each may find that it has more.
        common = self._met.get(rival, self._first_order)
        ours = self._count_votes(self._own_id, now, common)
        theirs = self._count_votes(rival, now, common)
        first = self._order.index(self._own_id) < self._order.index(rival)
        if ours == theirs and now - self._led_since < CLAIM_TIMEOUT:
            return  # nobody had time to follow; a later probe meets the rival again
        if (ours, first) > (theirs, not first):
            self._raise_term(rival, view.term, now)
            return
        self._log_transition(now, f"steps down: {theirs} follow {rival}, {ours} follow this peer")
        self._own_coordinator = None
        self._actions.append(StepDownAction())
        self._follow_leader(rival, view, now)

    def _raise_term(self, peer: str, above: int, now: float) -> None:
        """Continue to lead in a term above the one that ``peer`` knows."""
        term = next_term(above, self._own_id)
        if now - self._raised_at < RAISE_INTERVAL:
            return
        if self._admits_term(peer, term, now, LEADER_SHARE):
            self._raised_at = now
            self._adopt_term(peer, term)
            self._log_transition(now, f"raises its term to {self.term}")
            self._actions.append(RaiseTermAction(self.term))

    def _log_transition(self, now: float, text: str) -> None:
        self._transitions.append(f"{now:.1f} {text}")
