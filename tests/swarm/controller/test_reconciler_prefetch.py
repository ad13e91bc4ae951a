from collections.abc import Callable

import msgspec
import pytest

from molink.swarm.artifacts.transfer import MIN_RATE, STALL_TIMEOUT, stage_bytes
from molink.swarm.controller.events import (
    MemberRemovedEvent,
)
from molink.wire.messages.instructions import (
    Assign,
    Prefetch,
)
from tests.support.fake_fleet import FakeFleet, Kit
from tests.support.pipeline_messages import join_and_prefetch, prefetch


def test_prefetch_is_resent_until_reports_show_it(running: FakeFleet) -> None:
    asked = join_and_prefetch(running)
    assert asked == [("d", prefetch(1, (5, 6)))]
    running.wait(3.25, *"abcd")
    assert running.pop_messages() == asked
    running.prefetched("d", 1, "fetching")
    running.wait(10, *"abcd")
    assert running.pop_messages() == []
    running.report("d", fresh=True)  # its daemon restarted
    assert asked[0] in running.pop_messages()
    running.prefetched("d", 0)  # a report of another migration
    assert running.reconciler.formation.record.epoch == 1
    running.prefetched("d", 1)
    assert running.reconciler.successor.record.epoch == 2


def test_failed_prefetch_keeps_serving(running: FakeFleet) -> None:
    join_and_prefetch(running)
    running.prefetched("d", 1, "failed", "the disk is full")
    assert running.reconciler.migration is None
    assert "D can't fetch its files: the disk is full" in " ".join(running.fleet.story)
    running.wait(5, *"abcd")
    assert running.pop_messages() == []
    assert running.reconciler.formation.record.epoch == 1
    running.join("e")  # the others join without it
    running.wait(1.25, *"abcde")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c", "e")


def test_serving_peer_with_failed_prefetch_keeps_its_stage(running: FakeFleet) -> None:
    running.report("b", *running.fleet.registry.sessions["b"].report.workers, stage="none")
    running.wait(1.25, *"abc")
    assert [p for p, m in running.pop_messages() if isinstance(m, Prefetch)] == ["a", "c"]
    running.prefetched("c", 1, "failed")
    running.wait(59, *"abc")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready
    running.wait(2, *"abc")
    assert [p for p, m in running.pop_messages() if isinstance(m, Prefetch)] == ["a", "c"]


@pytest.mark.parametrize("how", ["left", "silent"])
def test_new_peer_lost_while_fetching(running: FakeFleet, how: str) -> None:
    join_and_prefetch(running)
    if how == "left":
        running.handle_event(MemberRemovedEvent("d", "left"))
    running.wait(8, *"abc")
    assert running.reconciler.migration is None
    assert running.reconciler.is_ready
    assert running.reconciler.formation.record.epoch == 1


def test_loss_does_not_wait_for_prefetch(running: FakeFleet) -> None:
    join_and_prefetch(running)
    running.failed("b", 1, epoch=1)
    running.wait(0.5, *"abcd")
    assert running.reconciler.formation.record.epoch == 2
    assert running.reconciler.formation.peers == ("a", "b", "c", "d")
    assert running.reconciler.migration is None


def fetch_until_failure(fake: FakeFleet, kit: Kit, claim: Callable[[float], int]) -> float:
    """`c` fetches and reports ``claim(seconds)`` bytes; returns when the others continue."""
    small = msgspec.structs.replace(kit.facts, layer_bytes=10**7)
    fake.serve(facts=small)
    for name in "abc":
        fake.report(name)
    fake.wait(1.5, *"abc")
    orders = {peer: m for peer, m in fake.pop_messages() if isinstance(m, Assign)}
    started = fake.now
    fake.loaded(orders["a"], "a")
    fake.loaded(orders["b"], "b")
    most = stage_bytes(small, orders["c"].layers) / MIN_RATE
    while fake.reconciler.formation is not None:
        assert fake.now - started < 2 * most, "for ever"
        done = claim(fake.now - started)
        fake.report("c", kit.worker("fetching", 1, 2, orders["c"].layers, done=done))
        fake.wait(0.25, *"abc") if done < 10**6 else fake.wait(15, *"abc")
    return fake.now - started


@pytest.mark.parametrize(
    "claim",
    [
        lambda _: 0,
        lambda seconds: round(1000 * seconds),
        lambda seconds: round(1e12 + seconds * 1e9),
        lambda seconds: int(seconds) % 2 * 10**5,
    ],
    ids=["nothing", "too little", "more than there is", "up and down"],
)
def test_stalled_fetch_excludes_the_peer(kit: Kit, claim: Callable[[float], int]) -> None:
    fake = kit.FakeFleet("a", "b", "c", min_peers=3)
    assert fetch_until_failure(fake, kit, claim) <= 62
    assert "C made too little progress fetching its stage" in " ".join(fake.fleet.story)
    fake.wait(0.5, "a", "b")
    assert fake.reconciler.formation.peers == ("a", "b")
    fake.obey()
    assert fake.reconciler.is_ready
    fake.wait(100, *"abc")
    assert fake.reconciler.formation.peers == ("a", "b")


def test_transfer_time_is_bounded_by_its_bytes(kit: Kit) -> None:
    """Reporting exactly the minimum rate ends too."""
    fake = kit.FakeFleet("a", "b", "c", min_peers=3)
    most = 1.5 * 2 * 10**7 + (1 << 20)
    taken = fetch_until_failure(fake, kit, lambda s: round(2 * MIN_RATE * s) + 10**6)
    assert taken <= most / MIN_RATE / 2 + STALL_TIMEOUT + 30


def test_stalled_prefetch_is_given_up(running: FakeFleet) -> None:
    join_and_prefetch(running)
    running.prefetched("d", 1, "fetching")
    running.wait(31, *"abcd")
    assert running.reconciler.migration is None
    assert "D can't fetch its files: the transfer is too slow" in " ".join(running.fleet.story)
    assert running.reconciler.is_ready
