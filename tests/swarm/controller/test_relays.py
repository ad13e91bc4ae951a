import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.swarm.controller.events import ConnectionTriedEvent, SendMessageAction
from molink.swarm.controller.relay_exclusions import FIRST_EXCLUSION, MAX_EXCLUSION
from molink.swarm.controller.relays import (
    CHECK_INTERVAL,
    MAX_RELAYS,
    MOVE_TIMEOUT,
    OPEN_TIMEOUT,
    TRIAL_TIMEOUT,
    LivePeersChangedEvent,
    RelayAction,
    RelayEvent,
    RelayOfferedEvent,
    RelayOpenedEvent,
    RelayPlanner,
    RouteTriedEvent,
)
from molink.wire.messages.relay import (
    MAX_OF_PEER,
    CloseRelay,
    OpenRelay,
    RelayedRoute,
    RelayOpened,
)


class Swarm:
    """PCs that report, and the planner's actions."""

    def __init__(self, *names: str) -> None:
        numbers = itertools.count(1)
        self.relays = RelayPlanner(lambda: next(numbers).to_bytes(6, "big") + bytes(64))
        self.now = 0.0
        for name in names:
            self.offer(name)

    def offer(self, name: str, relays: bool = True, meets: str = "") -> list[RelayAction]:
        return self._handle(RelayOfferedEvent(name, (f"{name}.lan",), relays, meets))

    def live(self, *names: str) -> list[RelayAction]:
        return self._handle(LivePeersChangedEvent(set(names)))

    def wait(self, seconds: float) -> list[RelayAction]:
        """Let time pass while all PCs stay connected."""
        self.now += seconds
        return self.live(*self.relays._peers)

    def _handle(self, event: RelayEvent) -> list[RelayAction]:
        found = self.relays.handle(event, self.now)
        self.relays.validate()
        return found

    def tried(
        self,
        by: str,
        to: str,
        ok: bool,
        latency: float | None = None,
        relayed: bool = False,
        failed: int = 0,
        punched: bool = False,
        trial: int = 0,
    ) -> list[RelayAction]:
        tried = ConnectionTriedEvent(by, to, ok, latency)
        return self._handle(RouteTriedEvent(tried, relayed, punched, failed, trial))

    def open_all(self) -> list[RelayAction]:
        """Open all relays that were requested."""
        relays = (*self.relays._relays.values(), *self.relays._trials.values())
        return [action for one in relays for action in self.opened(one.relay_peer, one.id)]

    def measure_all(self, latency: float | None) -> list[RelayAction]:
        """Report all trials."""
        trials = list(self.relays._trials.items())
        found = [
            self.tried(*pair, latency is not None, latency, relayed=True, trial=one.id)
            for pair, one in trials
        ]
        return [action for actions in found for action in actions]

    def opened(self, peer: str, id: int, port: int = 5479) -> list[RelayAction]:
        return self._handle(RelayOpenedEvent(peer, RelayOpened(id=id, port=port)))


def apart(latency: float = 0.01) -> tuple[Swarm, list[RelayAction]]:
    """``a`` and ``b`` cannot reach each other; both reach ``hub``."""
    swarm = Swarm("a", "b", "hub")
    for one in "ab":
        swarm.tried(one, "hub", True, latency)
    return swarm, swarm.tried("a", "b", False)


def test_relay_is_opened_then_both_ends_are_told() -> None:
    swarm, decisions = apart()
    secret = bytes(32)
    order = OpenRelay(id=1, secret=secret, ends=("a.lan", "b.lan"))
    assert decisions == [SendMessageAction("hub", order)]
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}
    told = {
        "id": 1,
        "secret": secret,
        "end_secret": secret,
        "addresses": ("hub.lan",),
        "port": 5479,
    }
    assert swarm.opened("hub", 1) == [
        SendMessageAction("b", RelayedRoute(peer="a", role="waits", **told)),
        SendMessageAction("a", RelayedRoute(peer="b", role="dials", **told)),
    ]
    # Repeated, or from another peer, it changes nothing.
    assert swarm.opened("hub", 1) == swarm.opened("b", 1) == swarm.opened("hub", 9) == []
    assert swarm.tried("a", "b", False) == []


def test_peer_that_can_be_dialled_back_relays_itself() -> None:
    swarm = Swarm("a", "b", "hub")
    for one in "ab":
        swarm.tried(one, "hub", True, 0.0001)
    swarm.tried("b", "a", True, 0.5)
    (told,) = swarm.tried("a", "b", False)
    assert isinstance(told, SendMessageAction)
    assert told.peer == "a"


def test_a_lost_relay_of_an_earlier_leader_is_replaced() -> None:
    swarm = Swarm("a", "b", "hub")
    for one in "ab":
        swarm.tried(one, "hub", True, 0.01)
    assert swarm.tried("a", "b", True, 0.02, relayed=True) == []
    (told,) = swarm.tried("a", "b", False, relayed=True)
    assert isinstance(told, SendMessageAction)
    assert isinstance(told.message, OpenRelay)


@pytest.mark.parametrize("returning", ["a", "b", "hub"])
def test_a_peer_that_comes_back_learns_that_its_relay_has_ended(returning: str) -> None:
    swarm, _ = apart()
    swarm.opened("hub", 1)
    others = sorted({"a", "b", "hub"} - {returning})
    closed = SendMessageAction(returning, CloseRelay(id=1))
    assert closed not in swarm.live(*others)
    assert closed in swarm.offer(returning)
    assert closed not in swarm.offer(returning)


def far_hub() -> Swarm:
    """``a`` and ``b`` use a far hub, whose path they have measured; ``near`` is much nearer."""
    swarm, _ = apart(latency=0.1)
    swarm.opened("hub", 1)
    swarm.tried("a", "b", True, 0.2, relayed=True)
    swarm.offer("near")
    for one in "ab":
        swarm.tried(one, "near", True, 0.02)
    return swarm


def test_a_much_nearer_relay_is_tried_beside_the_used_one() -> None:
    swarm = far_hub()
    swarm.offer("same")
    for one in "ab":
        swarm.tried(one, "same", True, 0.09)
    assert swarm.wait(CHECK_INTERVAL - 1) == []
    order = OpenRelay(id=2, secret=bytes(32), ends=("a.lan", "b.lan"))
    assert swarm.wait(1) == [SendMessageAction("near", order)]
    told = swarm.opened("near", 2)
    assert [one.message.beside for one in told] == [1, 1]
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}
    # The ends have measured it. Connections move, and then the former relay is closed.
    close = CloseRelay(id=1)
    assert swarm.tried("a", "b", True, 0.04, relayed=True, trial=2) == [
        SendMessageAction("a", close),
        SendMessageAction("b", close),
    ]
    assert swarm.relays.relay_peers == {("a", "b"): "near"}
    assert swarm.wait(MOVE_TIMEOUT - 1) == []
    assert swarm.wait(1) == [SendMessageAction("hub", close)]
    # It stays: the others are no better.
    for _ in range(100):
        assert swarm.wait(CHECK_INTERVAL) == []


@pytest.mark.parametrize("measured", [None, 0.2, 0.15])
def test_a_relay_that_seems_nearer_must_prove_it(measured: float | None) -> None:
    """It isn't used, and tried less and less often."""
    swarm, trials = far_hub(), []
    for _ in range(4 * 360):
        for action in swarm.wait(10.0):
            assert isinstance(action, SendMessageAction)
            if isinstance(action.message, OpenRelay):
                trials.append(swarm.now)
                id = action.message.id
                swarm.opened("near", id)
                swarm.tried("a", "b", measured is not None, measured, relayed=True, trial=id)
        assert swarm.relays.relay_peers == {("a", "b"): "hub"}
    pauses = [after - before for before, after in itertools.pairwise(trials)]
    assert pauses[0] >= FIRST_EXCLUSION
    assert all(after >= before for before, after in itertools.pairwise(pauses))
    assert len(trials) <= 11


def test_a_relay_that_is_near_only_when_tried_is_used_ever_less() -> None:
    """Its share of the time falls, and the pair changes its relay a few times only."""
    swarm, used, changes = far_hub(), 0, 0
    before = "hub"
    for _ in range(8 * 360):
        actions = swarm.wait(10.0)
        while actions:
            action = actions.pop()
            if isinstance(action.message, OpenRelay):
                through, id = action.peer, action.message.id
                swarm.opened(through, id)
                latency = 0.04 if through == "near" else 0.2
                actions += swarm.tried("a", "b", True, latency, relayed=True, trial=id)
        now = swarm.relays.relay_peers["a", "b"]
        changes, before = changes + (now != before), now
        used += now == "near"
        swarm.tried("a", "b", True, 2.0 if now == "near" else 0.2, relayed=True)
    assert 0 < used < 0.05 * 8 * 360
    # 30 s, 1, 2, 4, 8, 16 and 32 minutes, then hours; there and back.
    assert changes <= 2 * (8 + 8)


def test_a_trial_that_never_ends_is_given_up() -> None:
    for answers in (True, False):
        swarm = far_hub()
        swarm.wait(CHECK_INTERVAL)
        if answers:
            swarm.opened("near", 2)
        closed = swarm.wait(TRIAL_TIMEOUT + 1)
        assert closed[:3] == [
            SendMessageAction(one, CloseRelay(id=2)) for one in ("a", "b", "near")
        ]
        # A late answer changes nothing.
        assert swarm.opened("near", 2) == []
        assert swarm.tried("a", "b", True, 0.04, relayed=True, trial=2) == []
        assert swarm.relays.relay_peers == {("a", "b"): "hub"}


def test_a_relay_that_fails_during_a_trial_is_replaced_at_once() -> None:
    swarm = far_hub()
    swarm.wait(CHECK_INTERVAL)
    swarm.opened("near", 2)
    actions = swarm.live("a", "b", "near")
    assert SendMessageAction("a", CloseRelay(id=2)) in actions
    assert ConnectionTriedEvent("a", "b", succeeded=False) in actions
    assert swarm.relays.relay_peers == {("a", "b"): "near"}


def test_a_peer_that_can_be_dialled_is_the_last_relay() -> None:
    """Connections move to its own port; then no route is needed."""
    swarm, _ = apart(latency=0.0001)
    swarm.opened("hub", 1)
    order = OpenRelay(id=2, secret=bytes(32), ends=("a.lan", "b.lan"), is_end=True)
    assert swarm.tried("a", "b", True) == [SendMessageAction("b", order)]
    told = swarm.opened("b", 2)
    assert all(one.message.is_direct and one.message.beside == 1 for one in told)
    # It is no matter how fast it is.
    swarm.tried("a", "b", True, 0.5, relayed=True, trial=2)
    assert swarm.relays.relay_peers == {("a", "b"): "b"}
    swarm.wait(MOVE_TIMEOUT - 1)
    assert swarm.relays.relay_peers == {("a", "b"): "b"}
    close = CloseRelay(id=2)
    assert swarm.wait(1) == [
        SendMessageAction("hub", CloseRelay(id=1)),
        SendMessageAction("a", close),
        SendMessageAction("b", close),
    ]
    assert swarm.relays.relay_peers == {}


def test_a_peer_whose_port_lets_nobody_in_ends_the_route_as_well() -> None:
    swarm, _ = apart()
    swarm.opened("hub", 1)
    swarm.tried("a", "b", True)
    swarm.opened("b", 2)
    actions = swarm.tried("a", "b", False, relayed=True, trial=2)
    assert SendMessageAction("hub", CloseRelay(id=1)) in actions
    assert swarm.relays.relay_peers == {}


def test_a_pc_that_can_be_dialled_back_replaces_a_third() -> None:
    swarm, _ = apart(latency=0.0001)
    swarm.opened("hub", 1)
    (order,) = swarm.tried("b", "a", True, 0.0001)
    assert isinstance(order, SendMessageAction)
    assert (order.peer, order.message.is_end) == ("a", True)
    swarm.opened("a", 2)
    swarm.tried("a", "b", True, 0.0001, relayed=True, trial=2)
    assert swarm.relays.relay_peers == {("a", "b"): "a"}


def test_a_drained_relay_hands_over() -> None:
    swarm, _ = apart()
    swarm.opened("hub", 1)
    swarm.offer("second")
    for one in "ab":
        swarm.tried(one, "second", True, 0.1)
    (order,) = swarm.offer("hub", relays=False)
    assert isinstance(order, SendMessageAction)
    assert order.peer == "second"
    swarm.opened("second", 2)
    swarm.tried("a", "b", True, 0.2, relayed=True, trial=2)
    assert swarm.relays.relay_peers == {("a", "b"): "second"}


def test_one_that_was_left_is_not_replaced() -> None:
    swarm, _ = apart(latency=0.1)
    swarm.opened("hub", 1)
    tried = ConnectionTriedEvent("a", "b", True, 0.05)
    swarm._handle(RouteTriedEvent(tried, is_relayed=True, is_punched=True))
    swarm.offer("near")
    swarm.wait(CHECK_INTERVAL + 1)
    for one in "ab":
        swarm.tried(one, "near", True, 0.01)
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}


def test_the_status_shows_who_has_left_the_relay() -> None:
    swarm, _ = apart()
    swarm.opened("hub", 1)
    for punched in (True, False):
        tried = ConnectionTriedEvent("a", "b", True, 0.01)
        swarm._handle(RouteTriedEvent(tried, is_relayed=True, is_punched=punched))
        assert swarm.relays.punched_pairs == ({("a", "b")} if punched else set())


PLACE = "meet.example:5464"


def test_the_rendezvous_relays_if_no_member_can() -> None:
    swarm = Swarm()
    for one in ("a", "b"):
        swarm.offer(one, meets=PLACE)
    told = {
        "id": 1,
        "secret": bytes(32),
        "end_secret": bytes(32),
        "addresses": (),
        "port": 0,
    }
    assert swarm.tried("a", "b", False) == [
        SendMessageAction("b", RelayedRoute(peer="a", role="waits", **told)),
        SendMessageAction("a", RelayedRoute(peer="b", role="dials", **told)),
    ]
    assert swarm.relays.relay_peers == {("a", "b"): PLACE}
    assert swarm.wait(OPEN_TIMEOUT + 1) == []
    # A peer that is no longer registered can't be reached there.
    closed = swarm.offer("b")
    assert SendMessageAction("a", CloseRelay(id=1)) in closed
    assert swarm.relays.relay_peers == {}


def test_a_member_is_better_than_the_rendezvous() -> None:
    swarm = Swarm("hub")
    for one in ("a", "b"):
        swarm.offer(one, meets=PLACE)
    swarm.tried("a", "b", False)
    for one in "ab":
        decisions = swarm.tried(one, "hub", True, 0.2)
    order = OpenRelay(id=2, secret=bytes(32), ends=("a.lan", "b.lan"))
    assert decisions == [SendMessageAction("hub", order)]
    swarm.opened("hub", 2)
    close = CloseRelay(id=1)
    assert swarm.tried("a", "b", True, 0.5, relayed=True, trial=2) == [
        SendMessageAction("a", close),
        SendMessageAction("b", close),
    ]
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}
    # The relay fails; from then on the rendezvous is used, even when the hub may be tried again.
    swarm.tried("a", "b", False, failed=2, relayed=True)
    assert swarm.relays.relay_peers == {("a", "b"): PLACE}
    swarm.wait(FIRST_EXCLUSION + 1)
    assert swarm.relays.relay_peers == {("a", "b"): PLACE}


def test_connections_that_have_left_the_rendezvous_stay() -> None:
    swarm = Swarm("hub")
    for one in ("a", "b"):
        swarm.offer(one, meets=PLACE)
    swarm.tried("a", "b", False)
    swarm.tried("a", "b", True, 0.1, relayed=True, punched=True)
    for one in "ab":
        assert swarm.tried(one, "hub", True, 0.2) == []
    assert swarm.relays.relay_peers == {("a", "b"): PLACE}


def test_a_rendezvous_relays_for_all_pairs() -> None:
    swarm, names = Swarm(), "abcdefg"
    for one in names:
        swarm.offer(one, meets=PLACE)
    pairs = list(itertools.permutations(names, 2))
    for pair in pairs:
        swarm.tried(*pair, False)
    assert len(pairs) > MAX_OF_PEER
    assert swarm.relays.relay_peers == dict.fromkeys(pairs, PLACE)


def test_a_rendezvous_that_passes_nothing_on_is_replaced() -> None:
    swarm = Swarm("hub")
    for one in ("a", "b"):
        swarm.offer(one, meets=PLACE)
        swarm.tried(one, "hub", True)
    swarm.offer("hub", relays=False)
    swarm.tried("a", "b", False)
    assert swarm.relays.relay_peers == {("a", "b"): PLACE}
    for _ in range(2):
        swarm.tried("a", "b", False, relayed=True)
    assert swarm.relays.relay_peers == {}
    swarm.offer("hub")
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}


def test_two_rendezvous_are_no_meeting_point() -> None:
    swarm = Swarm()
    swarm.offer("a", meets=PLACE)
    swarm.offer("b", meets="other.example:5464")
    assert swarm.tried("a", "b", False) == []
    swarm.offer("c")
    assert swarm.tried("a", "c", False) == []


def test_nearest_relay_is_chosen() -> None:
    swarm = Swarm("a", "b", "far", "near", "unreached")
    for one, away in (("far", 0.05), ("near", 0.01)):
        swarm.tried("a", one, True, away)
        swarm.tried("b", one, True, away)
    swarm.tried("a", "unreached", True, 0.001)
    swarm.tried("a", "b", False)
    assert swarm.relays.relay_peers == {("a", "b"): "near"}


def test_unwilling_peers_do_not_relay() -> None:
    swarm = Swarm("a", "b")
    swarm.offer("hub", relays=False)
    for one in "ab":
        swarm.tried(one, "hub", True)
    assert swarm.tried("a", "b", False) == []
    assert swarm.offer("hub") != []


def test_a_drained_relay_closes_if_there_is_no_other() -> None:
    swarm, _ = apart()
    swarm.opened("hub", 1)
    close = CloseRelay(id=1)
    assert swarm.offer("hub", relays=False) == [
        SendMessageAction("a", close),
        SendMessageAction("b", close),
        SendMessageAction("hub", close),
        ConnectionTriedEvent("a", "b", succeeded=False),
    ]
    assert swarm.relays.relay_peers == {}


def test_lost_relay_is_replaced() -> None:
    swarm, _ = apart()
    decisions = swarm.live("a", "b")
    assert decisions == [
        SendMessageAction("a", CloseRelay(id=1)),
        SendMessageAction("b", CloseRelay(id=1)),
        ConnectionTriedEvent("a", "b", succeeded=False),
    ]
    assert swarm.relays.relay_peers == {}
    swarm.relays.validate()


def test_relay_closes_when_it_is_not_needed() -> None:
    swarm, _ = apart()
    assert swarm.live("a", "hub") == [
        SendMessageAction("a", CloseRelay(id=1)),
        SendMessageAction("hub", CloseRelay(id=1)),
    ]
    swarm, _ = apart()
    decisions = swarm.tried("a", "b", True)
    assert {one.peer for one in decisions if isinstance(one, SendMessageAction)} == {
        "a",
        "b",
        "hub",
    }
    assert not any(isinstance(one, ConnectionTriedEvent) for one in decisions)
    assert swarm.relays.relay_peers == {}


def test_failed_relay_is_not_retried() -> None:
    swarm, _ = apart()
    swarm.opened("hub", 1)
    assert swarm.tried("a", "b", False, relayed=True) == []
    assert swarm.tried("a", "b", True, 0.02, relayed=True) == []
    assert swarm.tried("a", "b", False, relayed=True) == []
    decisions = swarm.tried("a", "b", False, relayed=True)
    assert SendMessageAction("hub", CloseRelay(id=1)) in decisions
    assert swarm.relays.relay_peers == {}
    # Its absence meanwhile changes nothing.
    swarm.live("a", "b")
    swarm.offer("hub")
    swarm.tried("a", "hub", True)
    swarm.tried("b", "hub", True)
    assert swarm.relays.relay_peers == {}
    swarm.wait(FIRST_EXCLUSION)
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}


def with_liar() -> Swarm:
    """``a`` and ``b`` cannot reach each other; the liar is the nearest relay."""
    swarm = Swarm("a", "b", "hub", "liar")
    for one in "ab":
        swarm.tried(one, "hub", True, 0.05)
        swarm.tried(one, "liar", True, 0.0001)
    swarm.tried("a", "b", False)
    assert swarm.relays.relay_peers == {("a", "b"): "liar"}
    return swarm


def test_relay_that_passes_no_data_is_replaced_at_once() -> None:
    swarm = with_liar()
    swarm.opened("liar", 1)
    swarm.tried("a", "b", True, 0.0002, relayed=True)
    # Reports on other relays don't count.
    assert swarm.tried("a", "b", False, relayed=True, failed=9) == []
    assert swarm.tried("b", "a", False, relayed=True, failed=1) == []
    decisions = swarm.tried("a", "b", False, relayed=True, failed=1)
    assert ConnectionTriedEvent("a", "b", succeeded=False) in decisions
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}


def test_only_relay_stays_if_its_probes_pass() -> None:
    swarm, _ = apart()
    swarm.opened("hub", 1)
    assert swarm.tried("a", "b", False, relayed=True, failed=1) == []
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}


def test_relay_that_never_opens_is_replaced() -> None:
    swarm = with_liar()
    swarm.wait(OPEN_TIMEOUT)
    assert swarm.relays.relay_peers == {("a", "b"): "liar"}
    swarm.wait(0.25)
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}
    swarm.opened("hub", 2)
    swarm.wait(2 * OPEN_TIMEOUT)
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}


def test_liar_is_chosen_ever_less() -> None:
    """Although the other relay fails repeatedly, and the liar leaves and returns."""
    swarm, chosen = with_liar(), 0
    for number in range(1, 8 * 3600):
        swarm.wait(1.0)
        if number % 100 == 0:
            swarm.live("a", "b", "hub")
            swarm.offer("liar")
            swarm.tried("a", "liar", True, 0.0001)
            swarm.tried("b", "liar", True, 0.0001)
        for pair, relay in list(swarm.relays._relays.items()):
            chosen += relay.relay_peer == "liar"
            swarm.opened(relay.relay_peer, relay.id)
            swarm.tried(*pair, True, relayed=True)
            swarm.tried(*pair, False, relayed=True, failed=relay.id)
            swarm.tried(*pair, False, relayed=True)
            swarm.tried(*pair, False, relayed=True)
    # 30 s, 1, 2, 4, 8, 16 and 32 minutes, then hours.
    assert 8 <= chosen <= 8 + 8, chosen
    swarm.wait(3 * MAX_EXCLUSION)
    swarm.wait(MAX_EXCLUSION)
    assert len(swarm.relays._exclusions) <= 1


def test_relay_without_a_free_port_is_given_up() -> None:
    swarm, _ = apart()
    assert SendMessageAction("hub", CloseRelay(id=1)) in swarm.opened("hub", 1, port=0)
    assert swarm.relays.relay_peers == {}


def test_relayed_route_does_not_count_as_direct() -> None:
    """Otherwise the next relay might be unreachable."""
    swarm, _ = apart()
    swarm.tried("a", "b", True, 0.02, relayed=True)
    assert swarm.relays.relay_peers == {("a", "b"): "hub"}
    swarm.offer("c")
    swarm.tried("c", "b", True)
    swarm.tried("a", "c", False)
    assert ("a", "c") not in swarm.relays.relay_peers


def test_number_of_relays_is_bounded() -> None:
    names = [f"p{number:02}" for number in range(20)]
    swarm = Swarm(*names, "hub")
    for one in names:
        swarm.tried(one, "hub", True)
    for by in names:
        for to in names:
            if by != to:
                swarm.tried(by, to, False)
    assert len(swarm.relays.relay_peers) == MAX_OF_PEER
    for number in range(9):
        swarm.offer(f"hub{number}")
        for one in names:
            swarm.tried(one, f"hub{number}", True)
    assert len(swarm.relays.relay_peers) == MAX_RELAYS


def test_unknown_peers_are_ignored() -> None:
    swarm = Swarm("a")
    assert swarm.tried("a", "nobody", False) == swarm.tried("nobody", "a", False) == []


_NAMES = st.sampled_from("abcde")
_EVENTS = st.one_of(
    st.tuples(st.just("offer"), _NAMES, st.booleans(), st.sampled_from(["", PLACE])),
    st.tuples(st.just("try"), _NAMES, _NAMES, st.booleans(), st.booleans()),
    st.tuples(st.just("live"), st.sets(_NAMES)),
    st.tuples(st.just("open"), _NAMES, st.integers(1, 20), st.sampled_from([0, 5479])),
    st.tuples(st.just("wait"), st.sampled_from([1.0, OPEN_TIMEOUT + 1, CHECK_INTERVAL])),
    st.tuples(st.just("open all")),
    st.tuples(st.just("measure all"), st.sampled_from([None, 0.001, 0.1])),
)


@settings(max_examples=50)
@given(st.lists(_EVENTS, max_size=40))
def test_invariants_hold_for_any_events(events: list[tuple]) -> None:
    """Bounds hold, and every live peer that was told of a relay is told when it ends."""
    swarm = Swarm()
    open_at: dict[tuple[str, int], bool] = {}
    present: set[str] = set()
    for event in events:
        match event:
            case ("offer", name, relays, place):
                present.add(name)
                out = swarm.offer(name, relays, place)
            case ("try", by, to, ok, relayed):
                out = [] if by == to else swarm.tried(by, to, ok, relayed=relayed)
            case ("live", names):
                present &= names
                out = swarm.live(*names)
            case ("open", name, id, port):
                out = swarm.opened(name, id, port)
            case ("wait", seconds):
                out = swarm.wait(seconds)
            case ("open all",):
                out = swarm.open_all()
            case ("measure all", latency):
                out = swarm.measure_all(latency)
        swarm.relays.validate()
        for decision in out:
            if isinstance(decision, SendMessageAction):
                assert decision.peer in present
                known = (decision.peer, decision.message.id)
                open_at[known] = not isinstance(decision.message, CloseRelay)
    relays = swarm.relays
    running = len(relays._relays) + len(relays._trials) + len(relays._replaced)
    there = {id for (name, id), is_open in open_at.items() if is_open and name in present}
    assert len(there) <= running
