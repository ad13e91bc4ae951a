"""Leader election: exact actions, then random networks with crashes, freezes and partitions."""

import math

import pytest

from molink.swarm.election.events import (
    ConnectionLostEvent,
    CoordinatorFailedEvent,
    CoordinatorHeardEvent,
    CoordinatorStartedEvent,
    ElectionAction,
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
from molink.swarm.election.leader_election import (
    CLAIM_TIMEOUT,
    DOUBT_LEAD,
    LEADER_TIMEOUT,
    PROBE_INTERVAL,
    QUERY_INTERVAL,
    RESTART_GRACE,
    STANDALONE_GRACE,
    STARTUP_TIMEOUT,
    LeaderElection,
)
from molink.swarm.election.terms import first_term, next_term, round_of
from molink.util.timeouts import TIMEOUTS
from molink.wire.messages.election import LeaderView, Lease
from tests.swarm.election.network import KEY, Postman

ORDER = ("a", "b", "c")


def peer(me: str = "b", *, term: int = 0, leader: str = "a", now: float = 9.9) -> LeaderElection:
    """A follower in a swarm founded by ``a``."""
    one = LeaderElection(
        me, now, membership=MembershipChangedEvent(ORDER, (0, 5)), term=term, leader=leader
    )
    one.handle(CoordinatorHeardEvent(term, leader), now)
    return one


def test_ineligible_peer_never_leads() -> None:
    """A further device of a PC always stays a candidate or follower."""
    one = LeaderElection(
        "b", 0.0, membership=MembershipChangedEvent(ORDER, (0, 5)), leader="a", can_lead=False
    )
    assert not one.build_view(0.0).can_lead
    now = 0.0
    for _ in range(100):
        now += 1.0
        decisions = one.handle(ElectionTimePassedEvent(), now)
        decisions += [each for peer in "ac" for each in one.handle(PeerTimedOutEvent(peer), now)]
        assert not any(isinstance(each, StartCoordinatorAction) for each in decisions)


def view(
    leader: str = "a",
    term: int = 0,
    *,
    leads: bool = False,
    hears: bool = False,
    fit: bool = True,
    replica: tuple[int, int] = (0, 5),
) -> LeaderView:
    return LeaderView(
        term=term,
        leader=leader,
        is_leader=leads,
        hears_leader=hears,
        can_lead=fit,
        replica=replica,
        coordinator_key=KEY if leads else "",
        addresses=("h:1",) if leads else (),
        lease=Lease(term=term, leader=leader, clock=0, signature=b"") if hears else None,
    )


def leading(me: str = "a") -> LeaderElection:
    one = LeaderElection(me, 0.0, membership=MembershipChangedEvent(ORDER, (0, 5)), leader=me)
    one.handle(ElectionTimePassedEvent(), 0.0)
    one.handle(PeerTimedOutEvent("b"), 0.1)
    one.handle(PeerTimedOutEvent("c"), 0.1)
    one.handle(PeerTimedOutEvent("a"), 0.1)
    one.handle(CoordinatorStartedEvent(0, KEY, ("h:1",)), 0.2)
    assert one.role == "leader"
    return one


def asking(one: LeaderElection, others: str, since: float, until: float) -> None:
    """Let query rounds time out; the last one's answers are still missing."""
    for step in range(int((until - since) / QUERY_INTERVAL) + 1):
        for other in others:
            one.handle(PeerTimedOutEvent(other), since + step * QUERY_INTERVAL)
        one.handle(ElectionTimePassedEvent(), since + step * QUERY_INTERVAL)


def test_lost_connection_queries_everyone_and_the_next_in_line_leads() -> None:
    one = peer("b")
    assert one.handle(ConnectionLostEvent(), 10.0) == [
        QueryLeaderAction("a"),
        QueryLeaderAction("c"),
    ]
    assert one.handle(PeerTimedOutEvent("a"), 10.2) == []
    term = next_term(0, "b")
    assert one.handle(PeerAnsweredEvent("c", view()), 10.2) == [
        StartCoordinatorAction(term, lost_leader="a")
    ]
    assert one.handle(CoordinatorStartedEvent(term, KEY, ("h:2",)), 10.7) == [
        FollowLeaderAction("b", term, KEY, ("h:2",)),
        QueryLeaderAction("a"),
        QueryLeaderAction("c"),
    ]
    assert one.build_view(10.8).is_leader


def test_large_swarm_queries_few_first_and_follows_the_named_leader() -> None:
    """If each of fifty starting PCs queried all others, they would have time for nothing else."""
    one = LeaderElection(
        "b", 0.0, membership=MembershipChangedEvent(tuple("abcdefghij"), (0, 5)), leader="a"
    )
    first = one.handle(ElectionTimePassedEvent(), 0.0)
    assert first == [QueryLeaderAction("a"), QueryLeaderAction("c")]
    assert one.handle(PeerTimedOutEvent("a"), 0.1) == []
    last = "c"
    term = next_term(0, "j")
    assert one.handle(PeerAnsweredEvent(last, view("j", term, hears=True)), 0.2) == [
        QueryLeaderAction("j")
    ]
    assert one.handle(PeerAnsweredEvent(last, view("j", term, hears=True)), 0.2) == []
    assert one.is_awaiting("j")
    assert not one.is_awaiting(last)
    found = view("j", term, leads=True)
    assert one.handle(PeerAnsweredEvent("j", found), 0.3) == [
        FollowLeaderAction("j", term, KEY, ("h:1",))
    ]
    assert not one.is_awaiting("a")


def test_large_swarm_backs_off_until_the_leader_had_time_to_start() -> None:
    """Fifty candidates must not overload the PC that starts the coordinator."""
    one = LeaderElection(
        "b", 0.0, membership=MembershipChangedEvent(tuple("abcdefghij"), (0, 5)), leader="a"
    )
    asked = {}
    for step in range(int(RESTART_GRACE / 0.25)):
        now = step * 0.25
        decisions = one.handle(ElectionTimePassedEvent(), now)
        if decisions:
            asked[now] = len(decisions)
        for ask in decisions:
            assert isinstance(ask, QueryLeaderAction)
            more = one.handle(PeerTimedOutEvent(ask.peer), now)
            assert more == []
    assert asked == {0.0: 2, 1.0: 2, 3.0: 2, 7.0: 2}
    assert len(one.handle(ElectionTimePassedEvent(), RESTART_GRACE)) == 9, "all other peers"


@pytest.mark.parametrize("silent", [True, False])
def test_large_swarm_queries_everyone_if_the_few_know_no_leader(silent: bool) -> None:
    one = LeaderElection(
        "b", 9.9, membership=MembershipChangedEvent(tuple("abcdefghij"), (0, 5)), leader="a"
    )
    one.handle(CoordinatorHeardEvent(0, "a"), 9.9)
    *rest, last = one.handle(ConnectionLostEvent(), 10.0)
    if silent:  # all of them have answered, so it doesn't wait
        for ask in rest:
            assert isinstance(ask, QueryLeaderAction)
            assert one.handle(PeerTimedOutEvent(ask.peer), 10.1) == []
        assert isinstance(last, QueryLeaderAction)
        asked = one.handle(PeerTimedOutEvent(last.peer), 10.1)
    else:
        assert one.handle(ElectionTimePassedEvent(), 10.0 + QUERY_INTERVAL / 2) == []
        asked = one.handle(ElectionTimePassedEvent(), 10.0 + QUERY_INTERVAL)
    assert set(asked) == {QueryLeaderAction(other) for other in "acdefghij"}
    asking(one, "cdefghij", 10.7, 10.7)
    assert StartCoordinatorAction(next_term(0, "b"), lost_leader="a") in one.handle(
        PeerTimedOutEvent("a"), 11.0
    )


@pytest.mark.parametrize(
    ("me", "later"), [("b", 0.0), ("e", 0.0), ("f", QUERY_INTERVAL), ("j", 2 * QUERY_INTERVAL)]
)
def test_peers_far_down_the_order_query_everyone_later(me: str, later: float) -> None:
    """Otherwise a slow coordinator would make each of fifty PCs query all others."""
    one = LeaderElection(
        me, 9.9, membership=MembershipChangedEvent(tuple("abcdefghij"), (0, 5)), leader="a"
    )
    one.handle(CoordinatorHeardEvent(0, "a"), 9.9)
    asked = {10.0: one.handle(ConnectionLostEvent(), 10.0)}
    for step in range(1, 8):
        now = 10.0 + step * QUERY_INTERVAL / 2
        asked[now] = one.handle(ElectionTimePassedEvent(), now)
    assert min(now for now, asks in asked.items() if len(asks) > 2) == 10.0 + max(
        QUERY_INTERVAL, later
    )


def test_silence_beyond_the_timeout_is_a_loss() -> None:
    one = peer("b", now=0.0)
    for step in range(8):
        assert one.handle(ElectionTimePassedEvent(), step * 0.5) == []
        one.handle(CoordinatorHeardEvent(0, "a"), step * 0.5)
    doubted = 3.5 + LEADER_TIMEOUT - DOUBT_LEAD
    now = 3.5
    while now <= 3.5 + LEADER_TIMEOUT:
        asked = one.handle(ElectionTimePassedEvent(), now)
        assert asked == [QueryLeaderAction("a")] * (doubted < now <= doubted + 0.5), "asked once"
        now += 0.5
    assert one.handle(ElectionTimePassedEvent(), now) == [
        QueryLeaderAction("a"),
        QueryLeaderAction("c"),
    ]


def test_leader_heard_without_gaps_is_lost_soon() -> None:
    """Its query is overdue then, so the election follows at once."""
    one = peer("b", now=0.0)
    now = 0.0
    while now < 20.0:
        now += 0.5
        one.handle(CoordinatorHeardEvent(0, "a"), now)
        assert one.handle(ElectionTimePassedEvent(), now) == []
    heard, asked = now, math.inf
    while one.role != "starting":
        now += 0.25
        if now >= asked + 1.0:
            one.handle(PeerTimedOutEvent("a"), now)
        for action in one.handle(ElectionTimePassedEvent(), now):
            if action == QueryLeaderAction("a"):
                asked = min(asked, now)
            elif action == QueryLeaderAction("c"):
                assert now >= heard + TIMEOUTS.shortest
                one.handle(PeerAnsweredEvent("c", view()), now)
    assert heard + TIMEOUTS.shortest < now <= heard + TIMEOUTS.shortest + 0.75
    assert not one.build_view(now).is_leader


def test_leader_heard_with_gaps_keeps_its_time() -> None:
    """It may also be slow to answer."""
    one = peer("b", now=0.0)
    for step in range(1, 20):
        one.handle(CoordinatorHeardEvent(0, "a"), step * 1.0)
        one.handle(ElectionTimePassedEvent(), step * 1.0)
    now = 19.0 + LEADER_TIMEOUT
    assert one.build_view(now).hears_leader
    assert not one.build_view(now + 0.1).hears_leader
    for late in (2.0, 1.0, 0.5):
        one.handle(ElectionTimePassedEvent(), now - late)
    one.handle(PeerTimedOutEvent("a"), now)
    assert one.handle(ElectionTimePassedEvent(), now + 0.25)
    one.handle(PeerAnsweredEvent("c", view()), now + 0.3)
    assert one.role == "candidate"
    one.handle(PeerAnsweredEvent("a", view(leads=True)), now + 1.0)
    assert one.role == "follower"


def test_pause_of_this_pc_is_no_silence_of_its_leader() -> None:
    one = peer("b", now=0.0)
    for step in range(1, 80):
        if step % 2:
            one.handle(CoordinatorHeardEvent(0, "a"), step * 0.25)
        one.handle(ElectionTimePassedEvent(), step * 0.25)
    resumed = 79 * 0.25 + TIMEOUTS.shortest
    assert one.handle(ElectionTimePassedEvent(), resumed) == []
    assert one.handle(ElectionTimePassedEvent(), resumed + 0.25) == []
    assert one.role == "follower"


def test_leader_that_is_followed_again_has_time_to_connect() -> None:
    one = peer("b", now=0.0)
    for step in range(1, 40):
        one.handle(CoordinatorHeardEvent(0, "a"), step * 0.5)
        one.handle(ElectionTimePassedEvent(), step * 0.5)
    one.handle(ConnectionLostEvent(), 20.0)
    one.handle(PeerAnsweredEvent("a", view(leads=True)), 20.1)
    assert one.build_view(20.0 + LEADER_TIMEOUT).hears_leader
    assert not one.build_view(20.2 + LEADER_TIMEOUT).hears_leader


def test_doubted_leader_is_asked_once_per_silence() -> None:
    one = peer("b", now=0.0)
    for heard in (0.5, 3.25):
        one.handle(CoordinatorHeardEvent(0, "a"), heard)
        asked = []
        for step in range(1, 11):
            if one.handle(ElectionTimePassedEvent(), heard + step * 0.25):
                asked.append(heard + step * 0.25)
        assert asked == [heard + LEADER_TIMEOUT - DOUBT_LEAD + 0.25]
        assert one.is_awaiting("a")


def test_gaps_of_an_earlier_leader_are_forgotten() -> None:
    one = peer("c", now=0.0)
    for step in range(1, 11):
        one.handle(CoordinatorHeardEvent(0, "a"), step * 1.0)
        one.handle(ElectionTimePassedEvent(), step * 1.0)
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("a"), 10.1)
    term = next_term(0, "b")
    one.handle(PeerAnsweredEvent("b", view("b", term, leads=True)), 10.1)
    for step in range(21, 40):
        one.handle(CoordinatorHeardEvent(term, "b"), step * 0.5)
    assert one.build_view(19.5 + TIMEOUTS.shortest).hears_leader
    assert not one.build_view(19.6 + TIMEOUTS.shortest).hears_leader


def test_leader_that_cannot_lead_is_left_at_once() -> None:
    """For example if its disk is full and its coordinator has ended."""
    one = peer("b")
    assert one.handle(PeerAnsweredEvent("a", view(fit=False)), 10.0) == [
        QueryLeaderAction("a"),
        QueryLeaderAction("c"),
    ]
    one.handle(PeerAnsweredEvent("a", view(fit=False)), 10.1)
    assert one.handle(PeerAnsweredEvent("c", view()), 10.1) == [
        StartCoordinatorAction(next_term(0, "b"), lost_leader="a")
    ]
    other = peer("b")
    assert other.handle(PeerAnsweredEvent("c", view(fit=False)), 10.0) == [], "no word of others"


def test_last_leader_leads_again_before_others_in_the_order() -> None:
    """When a whole swarm starts, the others wait for it; it must not wait for them."""
    one = LeaderElection(
        "b", 0.0, membership=MembershipChangedEvent(ORDER, (1 << 16, 5)), term=1 << 16, leader="b"
    )
    one.handle(ElectionTimePassedEvent(), 0.0)
    waiting = view("b", 1 << 16, replica=(1 << 16, 5))
    assert one.handle(PeerAnsweredEvent("a", waiting), 0.1) == []
    assert one.handle(PeerAnsweredEvent("c", waiting), 0.1) == [StartCoordinatorAction(1 << 16)]


def test_next_in_line_is_not_blamed_for_the_time_of_a_false_leader() -> None:
    """It could not lead while it followed a PC that only claimed to lead, as this peer did."""
    order = ("b", "a", "c", "d")
    one = LeaderElection("c", 9.0, membership=MembershipChangedEvent(order, (0, 5)), leader="d")
    one.handle(CoordinatorHeardEvent(0, "d"), 9.0)
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("d"), 10.0)
    one.handle(PeerAnsweredEvent("b", view("d")), 10.1)
    one.handle(PeerAnsweredEvent("a", view("d")), 10.1)
    one.handle(ElectionTimePassedEvent(), 10.6)
    term = next_term(0, "a")
    one.handle(PeerTimedOutEvent("d"), 10.7)
    one.handle(PeerAnsweredEvent("b", view("a", term, hears=True)), 10.7)
    one.handle(PeerAnsweredEvent("a", view("a", term, leads=True)), 10.7)
    assert one.leader == "a"
    for step in range(1, 40):
        one.handle(ElectionTimePassedEvent(), 10.7 + step * 0.1)
    assert one.role == "candidate"
    one.handle(PeerTimedOutEvent("d"), 14.6)
    one.handle(PeerTimedOutEvent("a"), 14.7)
    one.handle(PeerAnsweredEvent("b", view("a", term)), 14.7)
    found = view("b", next_term(term, "b"), leads=True)
    assert FollowLeaderAction("b", found.term, KEY, ("h:1",)) in one.handle(
        PeerAnsweredEvent("b", found), 15.0
    )


def test_later_peer_waits_for_an_earlier_one() -> None:
    one = peer("c")
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("a"), 10.1)
    assert one.handle(PeerAnsweredEvent("b", view()), 10.1) == []
    found = view("b", next_term(0, "b"), leads=True)
    assert one.handle(PeerAnsweredEvent("b", found), 10.9) == [
        FollowLeaderAction("b", found.term, KEY, ("h:1",))
    ]
    assert one.handle(CoordinatorHeardEvent(found.term, "b"), 11.0) == []
    assert (one.role, one.leader, one.term) == ("follower", "b", found.term)


def test_newer_replica_outranks_the_order() -> None:
    one = peer("c")
    one.handle(MembershipChangedEvent(ORDER, (0, 6)), 9.0)
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("a"), 10.1)
    assert one.handle(PeerAnsweredEvent("b", view()), 10.1) == [
        StartCoordinatorAction(next_term(0, "c"), lost_leader="a")
    ]


def test_peer_that_does_not_lead_in_time_is_skipped() -> None:
    one = peer("c")
    one.handle(ConnectionLostEvent(), 10.0)
    now, decisions = 10.0, []
    while now < 10.0 + CLAIM_TIMEOUT + 4 * QUERY_INTERVAL and not decisions:
        one.handle(PeerTimedOutEvent("a"), now)
        decisions = one.handle(PeerAnsweredEvent("b", view()), now)
        one.handle(ElectionTimePassedEvent(), now)
        now += QUERY_INTERVAL
    assert decisions == [StartCoordinatorAction(next_term(0, "c"), lost_leader="a")]


def test_no_takeover_while_a_reachable_peer_hears_the_leader() -> None:
    one = peer("b")
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("a"), 10.1)
    assert one.handle(PeerAnsweredEvent("c", view(hears=True)), 10.1) == []
    assert one.role == "candidate"


def test_restarted_leader_stays_leader() -> None:
    one = peer("b")
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("c"), 10.1)
    assert one.handle(PeerAnsweredEvent("a", view(leads=True)), 10.1) == [
        FollowLeaderAction("a", 0, KEY, ("h:1",))
    ]


def test_standalone_coordinator_gets_time_to_restart() -> None:
    one = peer("b", leader="")
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("a"), 10.1)
    assert one.handle(PeerAnsweredEvent("c", view("")), 10.1) == []
    asking(one, "ac", 10.25, 10.0 + STANDALONE_GRACE - 0.1)
    one.handle(PeerTimedOutEvent("a"), 10.0 + STANDALONE_GRACE - 0.1)
    assert one.handle(PeerAnsweredEvent("c", view("")), 10.0 + STANDALONE_GRACE - 0.1) == []
    assert one.handle(PeerAnsweredEvent("c", view("")), 10.0 + STANDALONE_GRACE) == [
        StartCoordinatorAction(next_term(0, "b"))
    ]


def test_started_peer_waits_for_the_last_leader() -> None:
    one = LeaderElection("b", 0.0, membership=MembershipChangedEvent(ORDER, (0, 5)), leader="a")
    assert one.handle(ElectionTimePassedEvent(), 0.0) == [
        QueryLeaderAction("a"),
        QueryLeaderAction("c"),
    ]
    one.handle(PeerTimedOutEvent("c"), 0.1)
    assert one.handle(PeerTimedOutEvent("a"), 0.1) == []
    asking(one, "ac", 0.5, RESTART_GRACE - 0.1)
    assert one.handle(PeerTimedOutEvent("a"), RESTART_GRACE) == []
    assert one.handle(PeerTimedOutEvent("c"), RESTART_GRACE) == [
        StartCoordinatorAction(next_term(0, "b"), lost_leader="a")
    ]


def test_last_leader_resumes_at_once_in_its_term() -> None:
    one = LeaderElection("a", 0.0, membership=MembershipChangedEvent(ORDER, (0, 5)), leader="a")
    one.handle(ElectionTimePassedEvent(), 0.0)
    one.handle(PeerTimedOutEvent("b"), 0.1)
    assert one.handle(PeerTimedOutEvent("c"), 0.1) == [StartCoordinatorAction(0)]


def test_last_leader_follows_its_successor() -> None:
    one = LeaderElection("a", 0.0, membership=MembershipChangedEvent(ORDER, (0, 5)), leader="a")
    one.handle(ElectionTimePassedEvent(), 0.0)
    found = view("b", next_term(0, "b"), leads=True, replica=(1, 1))
    assert one.handle(PeerAnsweredEvent("b", found), 0.1) == []
    assert one.handle(PeerTimedOutEvent("c"), 0.1) == [
        FollowLeaderAction("b", found.term, KEY, ("h:1",))
    ]


def test_older_term_is_not_followed() -> None:
    one = peer("b", term=next_term(0, "a"))
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("c"), 10.1)
    assert one.handle(PeerAnsweredEvent("a", view(leads=True)), 10.1) == []
    assert one.handle(CoordinatorHeardEvent(0, "a"), 10.2) == []
    assert one.role == "candidate"


def test_leader_raises_its_term_for_a_peer_that_knows_a_higher_one() -> None:
    one = leading("a")
    known = next_term(next_term(0, "c"), "c")
    assert one.handle(PeerAnsweredEvent("c", view("c", known)), 5.0) == [
        RaiseTermAction(next_term(known, "a"))
    ]
    assert round_of(one.term) == 3


def test_a_peer_that_is_about_to_lead_obeys_only_itself() -> None:
    """The previous leader may return in a later term than the one that starts here."""
    one = peer("b")
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("a"), 10.1)
    one.handle(PeerTimedOutEvent("c"), 10.1)
    assert one.role == "starting"
    later = 9 << 16
    one.handle(CoordinatorHeardEvent(later, "a"), 10.2)
    assert not one.obeys(later, "a")
    assert one.obeys(next_term(0, "b"), "b")


def test_implausible_term_is_ignored() -> None:
    one = leading("a")
    far = 5000 << 16
    (told,) = one.handle(PeerAnsweredEvent("c", view("c", far, leads=True)), 5.0)
    assert isinstance(told, ReportMisbehaviourAction)
    assert told.peer == "c"
    assert one.handle(PeerAnsweredEvent("c", view("c", far)), 5.0) == [], "the same one again"
    assert one.term == 0


def test_leader_with_more_followers_wins() -> None:
    one = leading("a")
    rival = view("c", next_term(0, "c"), leads=True)
    assert one.handle(PeerAnsweredEvent("c", rival), 5.0) == [
        QueryLeaderAction("b"),
        QueryLeaderAction("c"),
    ]
    one.handle(PeerAnsweredEvent("c", rival), 5.1)
    followed = view("a", hears=True)
    assert one.handle(PeerAnsweredEvent("b", followed), 5.1) == [
        RaiseTermAction(next_term(rival.term, "a"))
    ]

    one = leading("a")
    one.handle(PeerAnsweredEvent("c", rival), 5.0)
    one.handle(PeerAnsweredEvent("c", rival), 5.1)
    decisions = one.handle(PeerAnsweredEvent("b", view("c", rival.term, hears=True)), 5.1)
    assert decisions == [StepDownAction(), FollowLeaderAction("c", rival.term, KEY, ("h:1",))]


def test_answers_of_removed_members_do_not_count() -> None:
    # With no followers left on either side, the first in the order wins.
    term = next_term(0, "a")
    one = leading("b")
    one.handle(PeerAnsweredEvent("c", view("b", 0, hears=True)), 0.5)
    one.handle(MembershipChangedEvent(("a", "b"), (0, 6)), 5.0)
    one.handle(PeerAnsweredEvent("a", view("a", term, leads=True)), 10.0)
    assert StepDownAction() in one.handle(PeerAnsweredEvent("a", view("a", term, leads=True)), 10.1)


def test_leader_without_followers_unseats_nobody() -> None:
    """A leader's own vote does not count."""
    one = leading("a")
    rival = view("c", next_term(0, "c"), leads=True)
    one.handle(PeerAnsweredEvent("c", rival), 5.0)
    one.handle(PeerAnsweredEvent("c", rival), 5.1)
    one.handle(PeerTimedOutEvent("b"), 5.1)
    assert (one.role, round_of(one.term)) == ("leader", 2)


def test_leader_probes_a_few_and_everyone_after_a_suspension() -> None:
    one = leading("a")
    asked: list[ElectionAction] = []
    for step in range(1, 20):
        now = 0.2 + step * PROBE_INTERVAL / 4
        one.handle(CoordinatorHeardEvent(0, "a"), now)
        asked += one.handle(ElectionTimePassedEvent(), now)
    assert asked.count(QueryLeaderAction("b")) == asked.count(QueryLeaderAction("c")) == 5
    assert one.handle(ElectionTimePassedEvent(), 60.0) == [
        QueryLeaderAction("b"),
        QueryLeaderAction("c"),
    ]


def test_resumed_peer_queries_again_before_it_leads() -> None:
    """Timeouts during a suspension prove nothing; answers may wait in the sockets."""
    one = peer("b")
    one.handle(ConnectionLostEvent(), 10.0)
    assert one.role == "candidate"
    # Suspended: all queries time out first, then the timer fires.
    assert one.handle(PeerTimedOutEvent("a"), 40.0) == []
    assert one.handle(PeerTimedOutEvent("c"), 40.0) == []
    assert one.handle(ElectionTimePassedEvent(), 40.1) == [
        QueryLeaderAction("a"),
        QueryLeaderAction("c"),
    ]
    one.handle(PeerTimedOutEvent("a"), 40.1)  # late answers to the previous round
    assert one.handle(PeerTimedOutEvent("c"), 40.1) == []
    assert one.handle(ConnectionLostEvent(), 40.2) == []
    assert one.handle(ElectionTimePassedEvent(), 40.6) == [
        QueryLeaderAction("a"),
        QueryLeaderAction("c"),
    ]
    found = view("c", next_term(0, "c"), leads=True, replica=(1, 1))
    assert one.handle(PeerTimedOutEvent("a"), 40.7) == []
    assert one.handle(PeerAnsweredEvent("c", found), 40.7) == [
        FollowLeaderAction("c", found.term, KEY, ("h:1",))
    ]


def test_resumed_peer_leads_if_nobody_answers() -> None:
    one = peer("b")
    one.handle(ConnectionLostEvent(), 10.0)
    now, decisions = 40.0, one.handle(ElectionTimePassedEvent(), 40.0)
    while now < 42.0 and not any(isinstance(one, StartCoordinatorAction) for one in decisions):
        now += 0.25
        decisions = one.handle(ElectionTimePassedEvent(), now)
        for other in "ac":
            decisions += one.handle(PeerTimedOutEvent(other), now)
    assert decisions[-1] == StartCoordinatorAction(next_term(0, "b"), lost_leader="a")


def test_suspension_does_not_expire_a_claim() -> None:
    one = peer("c")
    one.handle(ConnectionLostEvent(), 10.0)
    for now in (10.1, 50.0, 50.1, 50.7, 51.3):
        one.handle(ElectionTimePassedEvent(), now)
        one.handle(PeerTimedOutEvent("a"), now)
        assert StartCoordinatorAction(next_term(0, "c"), lost_leader="a") not in one.handle(
            PeerAnsweredEvent("b", view()), now
        )


@pytest.mark.parametrize(("heard", "after"), [(True, 2 * LEADER_TIMEOUT), (False, STARTUP_TIMEOUT)])
def test_silent_own_coordinator_is_restarted(heard: bool, after: float) -> None:
    """A coordinator that was never heard has longer: this PC still measures its device."""
    one = leading("a")
    if heard:
        one.handle(CoordinatorHeardEvent(0, "a"), 0.2)
    found = []
    for n in range(2, 4 * 150):
        if StartCoordinatorAction(0) in one.handle(ElectionTimePassedEvent(), n * 0.25):
            found.append(n * 0.25)
    assert 0.2 + after < found[0] <= 0.2 + after + 0.25


def test_failed_start_passes_leadership_on() -> None:
    one = peer("b")
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(PeerTimedOutEvent("a"), 10.1)
    one.handle(PeerAnsweredEvent("c", view()), 10.1)
    assert one.handle(CoordinatorFailedEvent(), 10.5) == [
        QueryLeaderAction("a"),
        QueryLeaderAction("c"),
    ]
    one.handle(PeerTimedOutEvent("a"), 10.6)
    assert one.handle(PeerAnsweredEvent("c", view()), 10.6) == []
    assert not one.build_view(10.6).can_lead


def test_leader_whose_coordinator_exits_steps_down() -> None:
    """For example with a full disk, since another PC can store the state."""
    one = leading("a")
    assert one.handle(CoordinatorFailedEvent(), 5.0) == [
        StepDownAction(),
        QueryLeaderAction("b"),
        QueryLeaderAction("c"),
    ]
    assert (one.build_view(5.0).is_leader, one.build_view(5.0).can_lead) == (False, False)
    found = view("b", next_term(0, "b"), leads=True)
    assert one.handle(PeerTimedOutEvent("c"), 5.5) == []
    assert one.handle(PeerAnsweredEvent("b", found), 5.5) == [
        FollowLeaderAction("b", found.term, KEY, ("h:1",))
    ]


def test_leader_of_a_large_swarm_tells_everyone_that_it_cannot_lead() -> None:
    others = tuple("bcdefghij")
    one = LeaderElection(
        "a", 0.0, membership=MembershipChangedEvent(("a", *others), (0, 5)), leader="a"
    )
    one.handle(ElectionTimePassedEvent(), 0.0)
    asking(one, "bcdefghij", 0.1, 0.1)
    one.handle(CoordinatorStartedEvent(0, KEY, ("h:1",)), 0.2)
    actions = one.handle(CoordinatorFailedEvent(), 5.0)
    assert set(actions) == {StepDownAction(), *map(QueryLeaderAction, others)}


def test_resigned_peer_is_skipped() -> None:
    one = leading("a")
    one.handle(ResignedEvent(), 5.0)
    assert (one.build_view(5.0).is_leader, one.build_view(5.0).can_lead) == (False, False)
    assert one.handle(ElectionTimePassedEvent(), 9.0) == []


def test_views_of_strangers_are_ignored() -> None:
    one = peer("b")
    one.handle(ConnectionLostEvent(), 10.0)
    assert one.handle(PeerAnsweredEvent("x", view("x", 1 << 16, leads=True)), 10.1) == []


def test_leader_never_starts_in_another_peers_term() -> None:
    """A replica of another leader may arrive while the coordinator starts."""
    own = next_term(0, "b")
    assert first_term(own, 0, "b") == first_term(own, own, "b") == own
    later = next_term(own, "b")
    assert first_term(own, later, "b") == later  # it has led in that term before
    others = next_term(own, "a")
    assert first_term(own, others, "b") == next_term(others, "b")
    assert first_term(0, others, "") == others  # there is no other peer


# --- random networks -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_each_part_has_one_leader_and_a_healed_swarm_one(seed: int) -> None:
    network = Postman(seed, peers=2 + seed % 4 if seed % 5 else 6 + seed % 7)
    chance = network.random
    network.run(3.0)
    assert network.leaders() == {"p0"}
    for _ in range(3):
        who = chance.choice(network.order)
        match chance.randrange(4):
            case 0 if len(network.dead) + 1 < len(network.order):
                network.kill(who)
            case 1:
                network.frozen[who] = network.now + chance.uniform(1.0, 15.0)
            case 2:
                network.part = {one: chance.randrange(2) for one in network.order}
            case _:
                for one in sorted(network.dead):
                    network.restart(one)
        network.run(chance.uniform(0.5, 20.0))
    network.run(25.0)
    for part in (0, 1):
        live = [p for p in network.order if network.part[p] == part and p not in network.dead]
        followed = {network.peers[one].leader for one in live}
        assert len(followed) <= 1, (part, followed)
        assert followed <= set(live), (part, followed, live)
    network.part = dict.fromkeys(network.order, 0)
    for one in sorted(network.dead):
        network.restart(one)
    network.run(40.0)
    assert len(network.leaders()) == 1
    assert all(one.role in ("follower", "leader") for one in network.peers.values())
    (leader,) = network.leaders()
    assert network.runs.keys() == {leader}
