import msgspec
import pytest

from molink.facts.profile import Profile
from molink.swarm.controller.events import (
    ConnectionTriedEvent,
    PeerReportedEvent,
)
from molink.swarm.controller.planner import (
    REVIEW_INTERVAL,
    find_askers,
)
from molink.swarm.controller.registry import (
    Registry,
)
from molink.swarm.placement.read_rates import SLOWDOWN_HOLD, SLOWDOWN_TTL
from molink.wire.messages.instructions import (
    Assign,
)
from tests.support import fake_fleet
from tests.support.fake_fleet import GB, FakeFleet, Kit, member


def test_endpoints_count_by_their_requests() -> None:
    registry = Registry("s", map(member, "abc"))
    for name, changes in {"a": {"requests": 5}, "b": {}, "c": {"api_address": ""}}.items():
        said = msgspec.structs.replace(fake_fleet.report(name), **changes)
        registry.record_report(name, said, True, 0.0)
    assert find_askers(registry) == {"a": 6.0, "b": 1.0}


def test_serving_ring_stays_until_another_is_worth_it(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b", "c", min_peers=3)
    fake.serve(min_stages=2)
    for name, memory in (("a", 8), ("b", 8), ("c", 8)):
        fake.report(name, memory=memory * GB)
    fake.wait(1.25, *"abc")
    fake.obey()
    assert fake.reconciler.formation.peers == ("a", "b")

    def link(one: str, other: str, latency: float) -> None:
        fake.handle_event(ConnectionTriedEvent(one, other, succeeded=True, latency=latency))
        fake.handle_event(ConnectionTriedEvent(other, one, succeeded=True, latency=latency))

    # 0.7 s of reading and 40 ms of links; with c it would be 38 ms.
    link("a", "b", 0.020)
    link("a", "c", 0.019)
    link("b", "c", 0.300)
    fake.wait(2 * REVIEW_INTERVAL, *"abc")
    assert fake.reconciler.formation.record.epoch == 1
    assert fake.reconciler.migration is None
    link("a", "b", 0.5)
    fake.wait(REVIEW_INTERVAL / 2, *"abc")
    assert fake.reconciler.formation.peers == ("a", "b")  # not at once: it may be temporary
    fake.wait(REVIEW_INTERVAL, *"abc")
    fake.obey()
    fake.wait(2.5, *"abc")
    fake.obey()
    assert set(fake.reconciler.formation.peers) == {"a", "c"}


def report_slowdown(fake: FakeFleet, peer: str, slowdown: float) -> None:
    """A stage reports that its steps take ``slowdown`` times as long."""
    old = fake.reconciler.registry.sessions[peer].report
    workers = tuple(msgspec.structs.replace(one, slowdown=slowdown) for one in old.workers)
    fake.handle_event(PeerReportedEvent(peer, msgspec.structs.replace(old, workers=workers)))


@pytest.fixture
def pair(kit: Kit) -> FakeFleet:
    """A and B serve; C, an equal peer, is a spare."""
    fake = kit.FakeFleet("a", "b", "c", min_peers=3)
    fake.serve(min_stages=2)
    for name in "abc":
        fake.report(name, memory=8 * GB)
    fake.wait(1.25, *"abc")
    fake.obey()
    assert fake.reconciler.formation.peers == ("a", "b")
    return fake


def test_lasting_slowdown_moves_the_stage(pair: FakeFleet) -> None:
    report_slowdown(pair, "a", 1.0)
    report_slowdown(pair, "b", 4.0)
    pair.wait(SLOWDOWN_HOLD - 1, *"abc")
    assert pair.reconciler.migration is None, "it may be temporary"
    pair.wait(REVIEW_INTERVAL + 2, *"abc")
    pair.obey()
    pair.wait(2.5, *"abc")
    pair.obey()
    assert set(pair.reconciler.formation.peers) == {"a", "c"}
    epoch = pair.reconciler.formation.record.epoch
    pair.wait(SLOWDOWN_TTL + 2 * REVIEW_INTERVAL, *"abc")
    assert pair.reconciler.formation.record.epoch == epoch, "B has recovered but is no better"


def test_link_review_does_not_delay_slowdown_review(
    pair: FakeFleet,
) -> None:
    report_slowdown(pair, "a", 1.0)
    pair.wait(2 * REVIEW_INTERVAL, *"abc")
    report_slowdown(pair, "b", 4.0)
    pair.wait(SLOWDOWN_HOLD - 5, *"abc")
    pair.handle_event(ConnectionTriedEvent("b", "c", succeeded=True, latency=0.005))
    pair.wait(3, *"abc")
    assert pair.reconciler.migration is None
    pair.wait(4, *"abc")
    assert set(pair.reconciler.migration.peers) == {"a", "c"}


def test_intermittent_slowdown_changes_nothing(pair: FakeFleet) -> None:
    report_slowdown(pair, "a", 1.0)
    for _ in range(6):
        report_slowdown(pair, "b", 4.0)
        pair.wait(SLOWDOWN_HOLD / 2, *"abc")
        report_slowdown(pair, "b", 1.0)
        pair.wait(SLOWDOWN_HOLD / 2, *"abc")
    assert pair.reconciler.formation.record.epoch == 1
    assert pair.reconciler.migration is None


@pytest.fixture
def unlike(kit: Kit) -> FakeFleet:
    """Two equal devices, of which B's stage was three times as slow when it was measured."""
    fake = kit.FakeFleet("a", "b")
    fake.serve(min_stages=2)
    for name in "ab":
        fake.report(name, memory=100 * GB)
    fake.wait(1.25, *"ab")
    for peer, message in fake.pop_messages():
        if isinstance(message, Assign):
            slow = Profile(decode=((1, 0.9 if peer == "b" else 0.3),))
            fake.loaded(message, peer, profile=slow)
    fake.obey()
    return fake


def shares(fake: FakeFleet) -> dict[str, int]:
    stages = fake.reconciler.formation.record.stages
    return {one.peer: one.layers[1] - one.layers[0] for one in stages}


def test_one_measurement_makes_no_shares(unlike: FakeFleet) -> None:
    before = shares(unlike)
    assert before == {"a": 3, "b": 3}
    unlike.wait(3 * REVIEW_INTERVAL, *"ab")
    unlike.join("c")
    unlike.wait(2.5, *"abc")
    assert (shares(unlike), unlike.reconciler.migration) == (before, None), "C is as fast as B"
    report_slowdown(unlike, "a", 1.0)
    report_slowdown(unlike, "b", 1 / 3)
    unlike.wait(5 * REVIEW_INTERVAL, *"abc")
    assert (shares(unlike), unlike.reconciler.formation.record.epoch) == (before, 1)


def test_a_peer_that_is_slower_again_and_again_gets_a_smaller_share_once(
    unlike: FakeFleet,
) -> None:
    report_slowdown(unlike, "a", 1.0)
    report_slowdown(unlike, "b", 1.0)
    unlike.wait(SLOWDOWN_HOLD - 1, *"ab")
    assert unlike.reconciler.migration is None
    unlike.wait(4, *"ab")
    unlike.obey()
    unlike.wait(2.5, *"ab")
    unlike.obey()
    after = shares(unlike)
    assert after["a"] > after["b"]
    epoch = unlike.reconciler.formation.record.epoch
    for slowdown in (1.0, 0.8, 1.3, 0.0, 1.1) * 4:
        for peer in "ab":
            report_slowdown(unlike, peer, slowdown)
        unlike.wait(REVIEW_INTERVAL / 2, *"ab")
    assert (shares(unlike), unlike.reconciler.formation.record.epoch) == (after, epoch)
