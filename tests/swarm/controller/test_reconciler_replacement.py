import msgspec
import pytest

from molink.swarm.controller.events import (
    ConnectionTriedEvent,
    MemberRemovedEvent,
    PeerStoppedEvent,
)
from molink.wire.messages.instructions import (
    Notice,
    Prefetch,
    RouteRemoved,
    Unassign,
)
from tests.support.fake_fleet import FakeFleet, Kit, by_peer
from tests.support.pipeline_messages import address, assign, form_successor, prefetch, route


def test_new_peer_is_placed_by_migration(running: FakeFleet) -> None:
    running.join("d", stage="none")
    assert ("d", route(1, address("a"))) in running.pop_messages()
    running.wait(3, *"abcd")
    assert running.pop_messages() == []

    running.join("e")
    running.wait(1.25, *"abcde")
    sent = running.pop_messages()
    assert ("e", route(1, address("a"))) in sent
    # The old pipeline serves until the files are there: only `e` lacks some.
    assert [each for each in sent if isinstance(each[1], Prefetch)] == [("e", prefetch(1, (5, 6)))]
    for minute in range(1, 10):
        running.prefetched("e", 1, "fetching", done=minute * 10**7)
        running.wait(29, *"abcde")
    assert running.reconciler.formation.record.epoch == 1
    assert running.reconciler.is_ready
    running.pop_messages()
    running.prefetched("e", 1)
    sent = running.pop_messages()
    assert by_peer(sent) == by_peer(
        [
            ("a", assign(2, 0, 4, (0, 2), "p2")),
            ("b", assign(2, 1, 4, (2, 4), "p2")),
            ("c", assign(2, 2, 4, (4, 5), "p2")),
            ("e", assign(2, 3, 4, (5, 6), "p2")),
        ]
    )
    for peer, message in sent:
        running.loaded(message, peer)
    form = running.pop_messages()
    assert {(p, m.pipeline, m.epoch) for p, m in form} == {(p, "p2", 2) for p in "abce"}
    assert running.reconciler.formation.record.epoch == 1  # it keeps serving
    assert len(running.committed) == 2
    for stage, peer in enumerate("abce"):
        running.ready(peer, stage, 2, "p2")
    context = 70 * 16
    there = msgspec.structs.replace(route(2, address("a"), "p2"), max_model_len=context)
    assert by_peer(running.pop_messages()) == by_peer([(p, there) for p in "abcde"])
    assert running.committed[-1].id == "p2"
    assert running.committed[-1].formed
    running.show_workers()
    running.wait(0.75, *"abcde")
    assert (
        running.pop_messages() == []
    )  # old streams continue until all peers know the new pipeline
    running.wait(0.5, *"abcde")
    assert by_peer(running.pop_messages()) == by_peer(
        [
            *[(p, RouteRemoved(pipeline="p1")) for p in "abcde"],
            *[(p, Unassign(pipeline="p1")) for p in "abc"],
        ]
    )
    running.wait(5, *"abcde")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready


def test_failed_load_of_successor_keeps_serving(running: FakeFleet) -> None:
    form_successor(running)
    running.failed("d", 3, 2, "p2")
    assert by_peer(running.pop_messages()) == by_peer(
        [(p, Unassign(pipeline="p2")) for p in "abcd"]
    )
    running.wait(5, *"abcd")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready
    assert "excluded for" in running.reconciler.explain_exclusion("d")
    running.wait(8, *"abcd")  # it has recovered
    running.obey()
    running.wait(1.25, *"abcd")
    assert running.reconciler.pipeline == "p3"
    assert running.reconciler.is_ready


def test_unlinked_successor_keeps_serving(running: FakeFleet) -> None:
    for peer, order in form_successor(running):
        running.loaded(order, peer)
    running.failed("c", 2, 2, "p2", next_lost=True)
    assert ("d", Unassign(pipeline="p2")) in running.pop_messages()
    running.wait(5, *"abcd")
    assert running.reconciler.formation.record.id == "p1"
    assert running.reconciler.is_ready


@pytest.mark.parametrize("how", ["no room", "less KV"])
def test_pipeline_is_replaced_in_place_without_room_for_two(running: FakeFleet, how: str) -> None:
    orders = form_successor(running)
    if how == "no room":
        running.failed("b", 1, 2, "p2", out_of_memory=True)
    else:
        for peer, order in orders:
            running.loaded(order, peer, blocks=79)  # of 80 blocks
    assert running.reconciler.successor is None
    assert running.reconciler.formation.record.id == "p1"
    assert running.reconciler.formation.record.epoch == 3
    assert running.reconciler.formation.peers == ("a", "b", "c", "d")
    running.obey()
    assert running.reconciler.is_ready
    assert running.reconciler.explain_exclusion("b") == ""


def test_successor_continues_when_serving_pipeline_breaks(running: FakeFleet) -> None:
    orders = form_successor(running)
    running.loaded(orders[0][1], "a")
    running.failed("b", 1, 1)
    sent = running.pop_messages()
    assert ("a", RouteRemoved(pipeline="p1")) in sent
    assert ("b", Unassign(pipeline="p1")) in sent
    last = {peer: messages[-1] for peer, messages in by_peer(sent).items()}
    assert last == dict.fromkeys("abcd", route(2, pipeline="p2"))
    assert running.committed[-1].id == "p2"
    running.obey(orders[1:])
    assert running.reconciler.is_ready
    assert running.reconciler.formation.record.epoch == 2


def test_loss_of_shared_peer_ends_both_pipelines(running: FakeFleet) -> None:
    form_successor(running)
    running.handle_event(PeerStoppedEvent("c"))
    assert running.reconciler.successor is None
    assert ("d", Unassign(pipeline="p2")) in running.pop_messages()
    running.wait(0.5, *"abd")
    running.obey()
    assert running.reconciler.formation.record.id == "p1"
    assert running.reconciler.formation.record.epoch == 3
    assert running.reconciler.formation.peers == ("a", "b", "d")


@pytest.mark.parametrize("how", ["silent", "left", "stuck", "wants no stage"])
def test_new_peer_lost_while_loading(running: FakeFleet, how: str) -> None:
    orders = form_successor(running)
    for peer, order in orders[:3]:
        running.loaded(order, peer)
    if how == "left":
        running.handle_event(MemberRemovedEvent("d", "left"))
    elif how == "silent":
        running.wait(4, *"abc")
    elif how == "stuck":
        running.wait(121, *"abcd")
    else:
        running.report("d", stage="none")
        running.wait(1.5, *"abcd")
    assert running.reconciler.successor is None
    assert ("a", Unassign(pipeline="p2")) in running.pop_messages()
    assert running.reconciler.is_ready
    assert running.reconciler.formation.record.epoch == 1


@pytest.mark.parametrize("when", ["at once", "while it loads"])
def test_unreachable_peer_gets_a_notice(running: FakeFleet, when: str) -> None:
    if when == "at once":
        running.join("d")
    else:
        form_successor(running)
    for source in "abc":
        running.handle_event(ConnectionTriedEvent(source, "d", succeeded=False))
    running.wait(2.5, *"abcd")
    sent = running.pop_messages()
    assert running.reconciler.successor is None
    assert running.reconciler.formation.record.epoch == 1
    assert running.reconciler.is_ready
    (text,) = {m.text for _, m in sent if isinstance(m, Notice)}
    assert [p for p, m in sent if isinstance(m, Notice)] == ["d"]
    assert text.startswith(
        "A can't connect to D at 10.0.0.100 port 5467; to open the ports, run on D: "
    )
    assert running.reconciler.explain_exclusion("d") == text
    running.wait(5, *"abcd")
    # One possible predecessor is enough; the ring has that order.
    running.handle_event(ConnectionTriedEvent("b", "d", succeeded=True))
    running.wait(2.5, *"abcd")
    running.obey()
    peers = running.reconciler.formation.peers
    assert sorted(peers) == ["a", "b", "c", "d"]
    assert peers[peers.index("d") - 1] == "b"
    assert running.reconciler.explain_exclusion("d") == ""


def test_extra_pc_stays_spare_if_a_link_costs_more(kit: Kit) -> None:
    fake = kit.FakeFleet("a")
    fake.serve(min_stages=1)
    fake.report("a")
    fake.wait(1.25, "a")
    fake.obey()
    fake.join("b")
    fake.wait(2.5, *"ab")
    fake.obey()
    assert fake.reconciler.formation.peers == ("a",)
    assert fake.reconciler.formation.record.epoch == 1
    assert fake.reconciler.explain_exclusion("b").startswith(
        "on standby: using it would not be faster"
    )
    assert not [m for _, m in fake.pop_messages() if isinstance(m, Notice)]


def test_serving_peer_survives_a_failed_attempt(running: FakeFleet) -> None:
    running.handle_event(ConnectionTriedEvent("a", "b", succeeded=False))
    running.handle_event(ConnectionTriedEvent("z", "a", succeeded=False))
    running.wait(5, *"abc")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready


def test_first_pc_serves_alone_if_second_is_unreachable(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    fake.report("a")
    fake.report("b")
    fake.handle_event(ConnectionTriedEvent("b", "a", succeeded=False))
    fake.handle_event(ConnectionTriedEvent("a", "b", succeeded=False))
    fake.wait(1.25, *"ab")
    assert fake.reconciler.formation.peers == ("a",)
    # A failed connection to a PC that is off doesn't count.
    fake.handle_event(PeerStoppedEvent("b"))
    fake.handle_event(ConnectionTriedEvent("a", "b", succeeded=False))
    fake.obey()
    fake.report("b", fresh=True)
    fake.wait(1.25, *"ab")
    fake.obey()
    assert fake.reconciler.formation.peers == ("a", "b")


def test_new_peer_is_blamed_for_a_failed_link(running: FakeFleet) -> None:
    for peer, order in form_successor(running):
        running.loaded(order, peer)
    running.failed("d", 3, 2, "p2", next_lost=True)  # it can't connect to `a`
    running.wait(3, *"abcd")
    assert running.reconciler.formation.peers == ("a", "b", "c")
    assert running.reconciler.is_ready
    assert "excluded for" in running.reconciler.explain_exclusion("d")


def test_join_during_loading_is_placed_afterwards(running: FakeFleet) -> None:
    orders = form_successor(running)
    running.join("e")
    running.wait(10, *"abcde")
    assert running.reconciler.successor.record.epoch == 2
    running.obey(orders)
    running.wait(2.5, *"abcde")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c", "d", "e")
