"""What a hostile member can't do to an election, even with all peers that it invites."""

import random
from collections.abc import Iterable

import pytest

from molink.swarm.election.events import (
    ConnectionLostEvent,
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
    StartCoordinatorAction,
    StepDownAction,
)
from molink.swarm.election.leader_election import (
    CLAIM_TIMEOUT,
    ELECTION_BOUND,
    LEADER_TIMEOUT,
    QUERY_INTERVAL,
    LeaderElection,
)
from molink.swarm.election.leases import LEASE_SLACK, LeaseIssuer
from molink.swarm.election.term_budget import FREE_ROUNDS, LEADER_SHARE, ROUND_INTERVAL
from molink.swarm.election.terms import MAX_ROUND, next_term, round_of
from molink.wire.messages.election import LeaderView, Lease
from tests.swarm.election.network import KEY, Postman

#: The leader, honest members, and the peers that the hostile member invited.
ORDER = ("a", "b", "c", "m", "m1", "m2", "m3", "m4", "m5")
PLANTED = tuple(peer for peer in ORDER if peer.startswith("m"))
BRANCHES = dict.fromkeys(PLANTED, "m")
HIGH = MAX_ROUND << 16


def seed_of(text: str) -> str:
    """A reproducible seed."""
    return text.encode().hex().ljust(40, "0")[:40]


def membership(order: Iterable[str] = ORDER) -> MembershipChangedEvent:
    return MembershipChangedEvent(tuple(order), (0, 5), BRANCHES)


def view(
    leader: str,
    term: int = 0,
    *,
    leads: bool = False,
    lease: Lease | None = None,
    hears: bool = False,
    replica: tuple[int, int] = (0, 5),
) -> LeaderView:
    return LeaderView(
        term=term,
        leader=leader,
        is_leader=leads,
        hears_leader=hears or lease is not None,
        can_lead=True,
        replica=replica,
        coordinator_key=KEY if leads else "",
        addresses=("h:1",) if leads else (),
        lease=lease,
    )


def invented(leader: str, term: int = 0) -> Lease:
    return Lease(term=term, leader=leader, clock=0, signature=b"s" * 64)


def leading(order: Iterable[str] = ORDER) -> tuple[LeaderElection, LeaseIssuer]:
    """A leader ``a`` that receives its own coordinator's heartbeats."""
    one = LeaderElection("a", 0.0, membership=membership(order), leader="a")
    one.handle(ElectionTimePassedEvent(), 0.0)
    for other in order:
        one.handle(PeerTimedOutEvent(other), 0.1)
    one.handle(CoordinatorStartedEvent(0, KEY, ("h:1",)), 0.2)
    for other in order:
        one.handle(PeerTimedOutEvent(other), 0.3)
    issuer = LeaseIssuer("a", seed_of("run"), 0.2)
    one.handle(CoordinatorHeardEvent(0, "a", issuer.issue_lease(0, 1.0), issuer.verify_key), 1.0)
    assert one.role == "leader"
    return one, issuer


def following(me: str = "b", order: Iterable[str] = ORDER) -> tuple[LeaderElection, LeaseIssuer]:
    """A follower of ``a`` at 10 s."""
    one = LeaderElection(me, 0.0, membership=membership(order), leader="a")
    issuer = LeaseIssuer("a", seed_of("run"), 0.0)
    beat = CoordinatorHeardEvent(0, "a", issuer.issue_lease(0, 9.9), issuer.verify_key)
    one.handle(ElectionTimePassedEvent(), 9.9)
    one.handle(beat, 9.9)
    one.handle(ElectionTimePassedEvent(), 10.0)
    assert one.role == "follower"
    return one, issuer


def answer(
    one: LeaderElection, views: dict[str, LeaderView], now: float, order: Iterable[str] = ORDER
) -> list[ElectionAction]:
    """All other peers answer, or time out."""
    actions: list[ElectionAction] = []
    for other in order:
        known = views.get(other)
        event = PeerTimedOutEvent(other) if known is None else PeerAnsweredEvent(other, known)
        actions += one.handle(event, now)
    return actions


# --- votes ----------------------------------------------------------------------------------------


def test_one_branch_has_no_vote_for_its_own_leader() -> None:
    """Even in a swarm of two PCs, whose leader has no other follower."""
    order = ("a", *PLANTED)
    one, _ = leading(order)
    term = next_term(0, "m")
    lies = {peer: view("m", term, lease=invented("m", term)) for peer in PLANTED}
    lies["m"] = view("m", term, leads=True)
    now, actions = 5.0, list[ElectionAction]()
    for _ in range(20):
        actions += answer(one, lies, now, order)
        now += 0.5
    assert StepDownAction() not in actions
    assert one.role == "leader"


def test_a_rivals_own_word_is_no_vote() -> None:
    order = ("a", "m")
    one, _ = leading(order)
    rival = view("m", next_term(0, "m"), leads=True, lease=invented("m"))
    assert answer(one, {"m": rival}, 5.0, order) == [QueryLeaderAction("m")]
    actions = answer(one, {"m": rival}, 5.1, order)
    assert list(map(type, actions)) == [RaiseTermAction]


def test_a_vote_for_the_leader_needs_its_lease() -> None:
    """``c`` really leads another part; votes for ``a`` count by the leases that ``a`` signed."""
    order = ("a", "b", "c", "d", "m")
    for proof, stays in ((True, True), (False, False)):
        one, issuer = leading(order)
        term = next_term(0, "c")
        lease = issuer.issue_lease(0, 4.9) if proof else invented("a")
        views = {
            "b": view("a", lease=lease),
            "c": view("c", term, leads=True),
            "d": view("c", term, lease=invented("c", term)),
        }
        answer(one, views, 5.0, order)
        answer(one, views, 5.1, order)
        assert (one.role == "leader") is stays


def test_a_follower_that_hears_its_leader_leaves_it_for_no_words() -> None:
    one, _ = following()
    for term in (next_term(0, "m"), 40 << 16, HIGH):
        lies = dict.fromkeys(PLANTED, view("m", term, lease=invented("m", term)))
        lies |= {"m": view("m", term, leads=True, replica=(term, 9))}
        lies |= {"a": view("m", term)}
        assert not [it for it in answer(one, lies, 10.0) if isinstance(it, FollowLeaderAction)]
    assert (one.role, one.leader, one.term) == ("follower", "a", 0)


def test_a_candidate_returns_to_its_last_leader() -> None:
    """Regardless of what others claim meanwhile."""
    one, _ = following()
    one.handle(ConnectionLostEvent(), 10.0)
    one.handle(ElectionTimePassedEvent(), 10.5)
    term = next_term(0, "m")
    lies = dict.fromkeys(PLANTED, view("m", term, lease=invented("m", term)))
    lies["m"] = view("m", term, leads=True, replica=(term, 9))
    for peer, lie in lies.items():
        assert one.handle(PeerAnsweredEvent(peer, lie), 10.6) == []
    found = one.handle(PeerAnsweredEvent("a", view("a", leads=True)), 10.7)
    assert found == [FollowLeaderAction("a", 0, KEY, ("h:1",))]


def test_an_early_false_claim_is_not_followed() -> None:
    """``m`` is next in line, and may answer first in each query round."""
    order = ("a", "m", "b", "c")
    one, issuer = following("c", order)
    one.handle(ConnectionLostEvent(), 11.0)
    claim = view("m", next_term(0, "m"), leads=True)
    for now in (11.1, 11.7, 12.3):
        one.handle(ElectionTimePassedEvent(), now)
        assert one.handle(PeerAnsweredEvent("m", view("a") if now == 11.1 else claim), now) == []
        proof = view("a", lease=issuer.issue_lease(0, now))
        assert one.handle(PeerAnsweredEvent("b", proof), now) == []
        assert one.handle(PeerTimedOutEvent("a"), now) == []
    assert (one.role, one.leader) == ("candidate", "a")


def test_a_false_claim_is_skipped_for_longer_and_longer() -> None:
    """``m`` claims to lead with the newest state, but runs no coordinator."""
    order = ("a", "b", "m", "m1")
    one, _ = following("b", order)
    one.handle(ConnectionLostEvent(), 10.0)
    now, followed, led = 10.0, [], 0.0
    while now < 10.0 + 2 * ELECTION_BOUND and not led:
        now += 0.25
        actions = one.handle(ElectionTimePassedEvent(), now)
        lies = {
            peer: view(peer, next_term(0, peer), leads=True, replica=(9, 9)) for peer in ("m", "m1")
        }
        actions += answer(one, lies, now, order)
        followed += [it.leader for it in actions if isinstance(it, FollowLeaderAction)]
        led = now if any(isinstance(it, StartCoordinatorAction) for it in actions) else 0.0
    assert followed == ["m"], "neither of them again"
    assert 0.0 < led < 10.0 + ELECTION_BOUND


def test_a_leader_that_only_claims_to_lead_is_replaced() -> None:
    """Its daemon answers, but its coordinator is silent."""
    one, _ = following("b", ("a", "b", "c"))
    now, led = 10.0, 0.0
    while now < 10.0 + 3 * ELECTION_BOUND and not led:
        now += 0.25
        actions = one.handle(ElectionTimePassedEvent(), now)
        if one.role == "candidate":
            told = {"a": view("a", leads=True), "c": view("a", hears=True)}
            actions += answer(one, told, now, ("a", "b", "c"))
        led = now if any(isinstance(it, StartCoordinatorAction) for it in actions) else 0.0
    assert 0.0 < led < 10.0 + ELECTION_BOUND + 3 * LEADER_TIMEOUT


# --- leases ---------------------------------------------------------------------------------------


def elect(one: LeaderElection, lies: Iterable[tuple[float, Lease | None]], until: float) -> float:
    """Time at which a candidate starts to lead, though ``m`` always claims to hear the leader.

    ``lies``: the leases that it shows, and since when; 0.0 if the candidate never leads.
    """
    one.handle(ConnectionLostEvent(), 10.0)
    now = 10.0
    while now < until:
        now += 0.25
        shown = [lease for at, lease in lies if at <= now]
        lie = view("a", lease=shown[-1], hears=True) if shown else view("a", hears=True)
        actions = one.handle(ElectionTimePassedEvent(), now)
        actions += answer(one, dict.fromkeys(PLANTED, lie), now)
        if any(isinstance(action, StartCoordinatorAction) for action in actions):
            return now
    return 0.0


def test_hearing_a_leader_counts_only_with_its_lease() -> None:
    """The leader died at 10 s."""
    one, issuer = following()
    assert 10.0 < elect(one, [], 30.0) <= 11.0, "no lease"
    one, issuer = following()
    assert 10.0 < elect(one, [(10.0, issuer.issue_lease(0, 2.0))], 30.0) <= 11.0, "a stale one"
    one, issuer = following()
    forged = LeaseIssuer("a", seed_of("another run"), 0.0)
    lies = [(at, forged.issue_lease(0, at)) for at in range(10, 30)]
    assert 10.0 < elect(one, lies, 30.0) <= 11.0, "forged ones"
    one, issuer = following()
    last = issuer.issue_lease(0, 10.0)
    altered = Lease(term=0, leader="a", clock=last.clock + 2000, signature=last.signature)
    assert 10.0 < elect(one, [(10.0, altered)], 30.0) <= 11.0, "an altered clock"
    one, issuer = following()
    until = 10.0 + LEADER_TIMEOUT + LEASE_SLACK
    led = elect(one, [(10.0, issuer.issue_lease(0, 10.0))], 30.0)
    assert until < led <= until + 3 * QUERY_INTERVAL, "the last one, again and again"


def test_naming_another_leader_delays_an_election_only_for_a_while() -> None:
    one, _ = following()
    one.handle(ConnectionLostEvent(), 10.0)
    now = 10.0
    while one.role == "candidate" and now < 40.0:
        now += 0.25
        one.handle(ElectionTimePassedEvent(), now)
        lies = {peer: view("c", lease=invented("c", 1 << 16)) for peer in PLANTED}
        answer(one, lies, now)
    assert 10.0 + CLAIM_TIMEOUT <= now <= 10.0 + ELECTION_BOUND


def test_a_candidate_waits_while_others_hear_the_leader() -> None:
    """No message of the leader reaches this PC, but the others pass its leases on."""
    one, issuer = following()
    leases = [(float(at), issuer.issue_lease(0, at - 0.5)) for at in range(10, 60)]
    assert 60.0 <= elect(one, leases, 70.0) <= 60.0 + ELECTION_BOUND
    assert one.role == "starting"


def test_checks_of_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = 0

    def count(*_: object) -> bool:
        nonlocal checked
        checked += 1
        return False

    monkeypatch.setattr("molink.swarm.election.leases.is_signed_by", count)
    one, issuer = following()
    one.handle(ConnectionLostEvent(), 10.0)
    lie = view("a", lease=issuer.issue_lease(0, 10.0))
    for _ in range(1000):
        one.handle(PeerAnsweredEvent("m", lie), 10.1)
    assert checked <= 16


# --- terms ----------------------------------------------------------------------------------------


def test_words_burn_few_rounds_and_are_reported() -> None:
    one, _ = leading()
    now, reported = 5.0, 0
    for number in range(4 * 60 * 60):  # an hour
        peer = PLANTED[number % len(PLANTED)]
        lie = view(peer, min(one.term + (number % 20 << 16), HIGH))
        actions = one.handle(PeerAnsweredEvent(peer, lie), now)
        reported += sum(isinstance(action, ReportMisbehaviourAction) for action in actions)
        now += 0.25
    allowed = LEADER_SHARE * (FREE_ROUNDS + now / ROUND_INTERVAL)
    assert allowed / 2 <= round_of(one.term) <= allowed
    assert reported >= 16, "enough to be banned"


def test_a_follower_heeds_no_heartbeat_of_a_far_term() -> None:
    one, issuer = following("b")
    for term in (HIGH, HIGH - (1 << 16), (FREE_ROUNDS + 100) << 16):
        beat = CoordinatorHeardEvent(term, "a", issuer.issue_lease(term, 10.0), issuer.verify_key)
        (told,) = one.handle(beat, 10.0) or [None]
        assert not one.obeys(term, "a")
        assert isinstance(told, ReportMisbehaviourAction) is (term == HIGH)
    assert (one.term, one.leader) == (0, "a")
    now = 10.0
    for _ in range(10_000):
        now += 0.5
        term = one.term + (1 << 16)
        one.handle(CoordinatorHeardEvent(term, "a"), now)
    assert round_of(one.term) <= FREE_ROUNDS + now / ROUND_INTERVAL


def test_a_coordinator_names_only_its_own_peer() -> None:
    one, _ = following("b")
    one.handle(CoordinatorHeardEvent(1 << 16, "c"), 10.0)
    assert not one.obeys(1 << 16, "c")
    assert one.leader == "a"


@pytest.mark.parametrize("rounds", [1, 10, FREE_ROUNDS // 2 - 1])
def test_a_peer_of_a_higher_term_comes_back(rounds: int) -> None:
    """It led or followed in another part of the swarm."""
    one, _ = leading()
    known = next_term(rounds - 1 << 16, "c")
    assert one.handle(PeerAnsweredEvent("c", view("c", known)), 5.0) == [
        RaiseTermAction(next_term(known, "a"))
    ]


def test_a_pc_that_was_away_for_long_comes_back() -> None:
    """Meanwhile there were more elections than reports may raise the term by at once."""
    for rest, comes in ((0.0, False), (100 * ROUND_INTERVAL, True)):
        one = LeaderElection("b", 0.0, membership=membership(), leader="a", rest=rest)
        term = 150 << 16
        one.handle(CoordinatorHeardEvent(term, "a"), 1.0)
        assert one.obeys(term, "a") is comes
    newcomer = LeaderElection("b", 0.0, membership=membership())
    newcomer.handle(CoordinatorHeardEvent(term, "a"), 1.0)
    assert newcomer.obeys(term, "a"), "it believes the coordinator of its invitation"


def test_naming_leaders_causes_few_queries() -> None:
    one, _ = leading()
    asked = 0
    for _ in range(1000):
        asked += len(one.handle(PeerAnsweredEvent("m", view("c", lease=invented("c"))), 5.0))
    assert asked == 1


# --- a lying member in a random network -----------------------------------------------------------


class LyingNetwork(Postman):
    """Some members send anything to any peer once :attr:`lies` is set; they run no coordinator."""

    def __init__(self, seed: int) -> None:
        honest = 3 + seed % 3
        self.liars = tuple(f"p{n}" for n in range(honest, honest + 1 + seed % 4))
        self.lies = False
        self.issuers: dict[str, LeaseIssuer] = {}
        self.known: list[Lease] = []
        #: A cut in one direction: a PC's coordinator, and the peers that don't hear it.
        self.deaf: set[tuple[str, str]] = set()
        super().__init__(seed, honest + len(self.liars))
        self.dead |= set(self.liars)
        # They may have joined early, but the founder is honest.
        rest = [peer for peer in self.order if peer != "p0"]
        self.random.shuffle(rest)
        self.order = ("p0", *rest)
        self.peers = {me: self._start(me) for me in self.order}

    @property
    def membership(self) -> MembershipChangedEvent:
        return MembershipChangedEvent(self.order, (0, 1), dict.fromkeys(self.liars, "hostile"))

    @property
    def honest(self) -> list[str]:
        return [peer for peer in self.order if peer not in self.dead]

    def heartbeat(self, leader: str) -> CoordinatorHeardEvent:
        issuer = self.issuers.setdefault(leader, LeaseIssuer(leader, seed_of(leader), self.now))
        lease = issuer.issue_lease(self.runs[leader], self.now)
        self.known = [*self.known[-200:], lease]
        return CoordinatorHeardEvent(self.runs[leader], leader, lease, issuer.verify_key)

    def listen(self, who: str) -> None:
        leader = self.session.get(who)
        if leader in self.liars:
            return  # it connects and stays connected
        if leader is not None and (leader, who) not in self.deaf and round(self.now * 10) % 5 == 0:
            super().listen(who)

    def ask(self, who: str, other: str) -> None:
        if other in self.liars and self.lies:
            self.tell_later(self.random.uniform(0.05, 0.4), who, ("lie", other))
        else:
            super().ask(who, other)

    def tell(self, who: str, event: object) -> None:
        match event:
            case ("lie", str(other)):
                event = PeerAnsweredEvent(other, self.lie(other, who))
            case ElectionTimePassedEvent() if self.lies and self.random.random() < 0.5:
                liar = self.random.choice(self.liars)
                super().tell(who, PeerAnsweredEvent(liar, self.lie(liar, who)))
        super().tell(who, event)

    def lie(self, liar: str, to: str) -> LeaderView:
        chance = self.random
        term = self.peers[to].term
        leader = chance.choice((liar, liar, *self.order, self.peers[to].leader))
        own = self.known[-1].leader if self.known else ""
        lease = chance.choice((None, invented(leader, term), *self.known[-3:], *self.known[:1]))
        if chance.random() < 0.3 and lease is not None:
            leader, term = own, lease.term
        return LeaderView(
            term=chance.choice((0, term, term + chance.randrange(1 << 18), HIGH)),
            leader=leader,
            is_leader=chance.random() < 0.4,
            hears_leader=chance.random() < 0.7,
            can_lead=chance.random() < 0.8,
            replica=(chance.choice((0, 1, HIGH)), chance.randrange(9)),
            coordinator_key=KEY,
            addresses=("h:1",),
            lease=lease,
        )


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 400))]
)
def test_a_lying_branch_neither_unseats_a_leader_nor_stops_an_election(seed: int) -> None:
    network = LyingNetwork(seed)
    network.run(3.0)
    assert network.leaders() == {"p0"}
    network.lies = True
    deaf = network.random.choice([peer for peer in network.honest if peer != "p0"])
    if seed % 2:
        network.deaf.add(("p0", deaf))
    for _ in range(50):
        network.run(0.5)
        assert network.runs.keys() == {"p0"}, network.runs
        followers = set(network.honest) - ({deaf} if seed % 2 else set())
        assert {network.peers[peer].leader for peer in followers} == {"p0"}
    network.deaf.clear()
    network.kill("p0")
    # A coordinator takes half a second to start, and messages need some time.
    died = network.now
    while not network.runs and network.now < died + ELECTION_BOUND + 1.0:
        network.run(0.1)
    assert network.runs, f"nobody leads {ELECTION_BOUND} s after the leader's death"
    network.run(40.0)
    (leader,) = network.runs
    for _ in range(20):
        network.run(0.5)
        assert network.runs.keys() == {leader}
        assert {network.peers[peer].leader for peer in network.honest} == {leader}
    rounds = max(round_of(network.peers[peer].term) for peer in network.honest)
    assert rounds <= 10 + 2 * FREE_ROUNDS


def test_all_pcs_that_joined_by_one_invitation_still_elect() -> None:
    """Their votes for each other don't count, so the order of the members decides."""
    network = Postman(5, 5)
    chance = random.Random(7)
    same = MembershipChangedEvent(network.order, (0, 1), dict.fromkeys(network.order[1:], "one"))
    for peer in network.peers.values():
        peer.handle(same, 0.0)
    network.run(3.0)
    for _ in range(4):
        network.part = {peer: chance.randrange(2) for peer in network.order}
        network.run(20.0)
        network.part = dict.fromkeys(network.order, 0)
        network.run(30.0)
        assert len(network.leaders()) == 1
