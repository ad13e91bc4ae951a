import pytest

from molink.swarm.controller.backoff import MAX_DELAY
from molink.swarm.controller.events import (
    MemberRemovedEvent,
    PeerDisconnectedEvent,
    PeerReportedEvent,
    PeerStoppedEvent,
    TimePassedEvent,
)
from molink.swarm.controller.registry import (
    MAX_READ_LAG,
    PEER_TIMEOUT,
)
from molink.wire.messages.instructions import (
    Assign,
    PeerRemoved,
)
from tests.support.fake_fleet import FakeFleet, Kit, by_peer
from tests.support.pipeline_messages import form_successor, route


def test_failed_worker_restarts_the_pipeline(running: FakeFleet) -> None:
    running.failed("b", 1, epoch=1)
    assert by_peer(running.pop_messages()) == by_peer([(p, route(1)) for p in "abc"])
    assert running.reconciler.reason == "stage 2 on B: oops"
    running.wait(0.5, *"abc")
    sent = running.pop_messages()
    # The first failure is free: same stages, and running ones only change epoch.
    assert {(p, m.layers, m.epoch) for p, m in sent if isinstance(m, Assign)} == {
        ("a", (0, 2), 2),
        ("b", (2, 4), 2),
        ("c", (4, 6), 2),
    }


def test_crash_loop_backs_off(running: FakeFleet) -> None:
    for name, memory in zip("abc", (3, 5, 3), strict=True):
        running.report(name, memory=memory * 10**9)  # without `b` there is no placement
    gaps = []
    for _ in range(9):
        formation = running.reconciler.formation
        running.failed("b", formation.stage_of("b"), formation.record.epoch)
        since = running.now
        while running.reconciler.formation is None:
            running.wait(0.25, *"abc")
            assert running.now - since < MAX_DELAY + 10
        gaps.append(round(running.now - since))
    assert gaps[0] == 0, "a short exclusion is waited for"
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_DELAY
    assert "excluded for" in " ".join(running.fleet.story)


def test_suspect_peer_does_not_change_a_working_pipeline(running: FakeFleet) -> None:
    fail_until_excluded(running, "b")
    running.obey()
    running.wait(50, *"abc")
    assert running.reconciler.is_ready
    assert running.reconciler.formation.peers == ("a", "c")
    assert "excluded for 8 s more after 4 failures" in running.reconciler.explain_exclusion("b")
    running.wait(12, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")


def test_second_failure_is_waited_for(running: FakeFleet) -> None:
    for epoch in (1, 2):
        running.failed("b", 1, epoch)
        running.wait(1.5, *"abc")
        assert running.reconciler.formation.record.epoch == epoch + 1
        assert running.reconciler.formation.peers == ("a", "b", "c")


def test_disconnected_peer_may_reconnect_at_once(running: FakeFleet) -> None:
    running.handle_event(PeerDisconnectedEvent("c"))
    running.wait(0.25, *"ab")
    running.report("c", *running.fleet.registry.sessions["c"].report.workers, fresh=True)
    running.wait(5, *"abc")
    assert running.reconciler.formation.record.epoch == 1
    running.handle_event(PeerDisconnectedEvent("c"))
    running.handle_event(PeerDisconnectedEvent("z"))
    running.wait(0.25, *"ab")
    assert running.reconciler.is_ready
    running.wait(0.25, *"ab")
    assert running.reconciler.reason == "C disconnected"


def test_events_tell_people_what_happened(running: FakeFleet) -> None:
    running.join("e")
    running.wait(1.25, *"abce")
    running.prefetched("e", 1)
    running.obey()
    running.handle_event(PeerStoppedEvent("c"))
    events = [line.partition(" ")[2] for line in running.fleet.context.events]
    assert events[: events.index("A has loaded its layers")] == [
        "toy was requested",
        "A is online",
        "B is online",
        "C is online",
        "loading layers of toy: A 1-2, B 3-4, C 5-6",
    ]
    assert events[events.index("toy is ready: A 1-2, B 3-4, C 5-6") + 1 :] == [
        "E joined the swarm",
        "E is online",
        "layers of toy will move; waiting for files of E",
        "loading layers of toy: A 1-2, B 3-4, C 5, E 6",
        *(f"{name} has loaded its layers" for name in "ABCE"),
        "layers of toy moved: A 1-2, B 3-4, C 5, E 6",
        "C is offline: molink was stopped there",
        "toy is not ready: C shut down",
    ]


@pytest.mark.parametrize("first", ["neighbour", "connection"])
def test_neighbours_report_and_disconnect_mean_loss(running: FakeFleet, first: str) -> None:
    if first == "connection":
        running.handle_event(PeerDisconnectedEvent("c"))
    running.failed("b", 1, epoch=1, next_lost=True)
    running.handle_event(PeerDisconnectedEvent("c"))
    assert not running.fleet.registry.is_live("c")
    running.wait(0.5, *"ab")
    assert running.reconciler.formation.peers == ("a", "b")


def test_recovered_pc_is_used_within_seconds(running: FakeFleet) -> None:
    running.failed("c", 2, epoch=1)
    running.wait(6, *"ab")  # it fails first, and is offline later
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b")
    running.report("c", fresh=True)
    running.wait(12, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")


def fail_until_excluded(running: FakeFleet, peer: str) -> None:
    while peer in running.reconciler.formation.peers:
        formation = running.reconciler.formation
        running.failed(peer, formation.stage_of(peer), formation.record.epoch)
        running.wait(2.5, *"abc")


def test_reason_names_excluded_peers(running: FakeFleet) -> None:
    running.report("a", memory=4 * 10**9)
    running.report("b", memory=4 * 10**9)
    running.handle_event(MemberRemovedEvent("c", "left"))
    running.wait(0.5, *"ab")
    for _ in range(3):
        formation = running.reconciler.formation
        running.failed("b", formation.stage_of("b"), formation.record.epoch)
        while running.reconciler.formation is None:
            running.wait(0.25, *"ab")
    running.failed("b", 1, running.reconciler.formation.record.epoch)
    running.wait(0.5, *"ab")
    assert running.reconciler.reason.startswith(
        "toy needs 6.0 GB, the swarm offers 3.8 GB on 1 peer: room for 3 of 6 layers; add a peer, "
        "allow more memory or serve a smaller model; B is excluded for 4 s more after 4 failures, "
        "the last: stage 2 on B: oops"
    )


def test_lost_next_stage_is_blamed(running: FakeFleet) -> None:
    for epoch in (1, 2, 3, 4):
        stage = running.reconciler.formation.stage_of("a")
        running.failed("a", stage, epoch, next_lost=True)
        running.wait(2.5, *"abc")
    assert running.reconciler.formation.peers == ("a", "c")


def test_doubted_peer_is_placed_after_its_report(running: FakeFleet) -> None:
    running.failed("b", 1, epoch=1, next_lost=True)  # `c`, for an unknown reason
    running.wait(0.5, *"ab")
    assert running.reconciler.formation is None
    running.report("c", *running.fleet.registry.sessions["c"].report.workers)
    running.wait(0.5, *"abc")
    assert running.reconciler.formation.peers == ("a", "b", "c")


def test_wait_for_doubted_peer_is_bounded(running: FakeFleet) -> None:
    running.failed("b", 1, epoch=1, next_lost=True)
    running.wait(1.25, *"ab")
    assert running.reconciler.formation.peers == ("a", "b")


def test_blocked_previous_stage_is_blamed(running: FakeFleet) -> None:
    for epoch in (1, 2, 3, 4):
        peers = running.reconciler.formation.peers
        stage = (peers.index("b") + 1) % len(peers)
        running.failed(peers[stage], stage, epoch, previous_blocked=True)
        assert "it had to cut off B" in running.reconciler.reason
        running.wait(2.5, *"abc")
    assert running.reconciler.formation.peers == ("a", "c")


def test_silent_peer_is_replaced(running: FakeFleet) -> None:
    running.wait(3.25, *"ab")
    assert not running.reconciler.is_ready
    assert by_peer(running.pop_messages()) == by_peer([(p, route(1)) for p in "ab"])
    running.wait(0.5, *"ab")
    batch = running.pop_messages()
    assert {(p, m.layers) for p, m in batch if isinstance(m, Assign)} == {
        ("a", (0, 3)),
        ("b", (3, 6)),
    }
    running.obey(batch)
    # If it returns with its old worker, the worker is kept.
    running.report("c", fresh=True)
    running.wait(1.25, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")
    assert running.reconciler.is_ready


def test_simultaneous_losses_are_handled_together(running: FakeFleet) -> None:
    form_successor(running)
    running.pop_messages()
    running.wait(5, "a", "d")
    told = {peer for peer, _ in running.pop_messages()}
    assert told <= {"a", "d"}
    assert running.reconciler.formation.peers == ("a", "d")


def test_clean_shutdown_is_no_failure(running: FakeFleet) -> None:
    fail_until_excluded(running, "c")
    running.obey()
    assert "excluded for" in running.reconciler.explain_exclusion("c")
    running.handle_event(PeerStoppedEvent("c"))
    assert not running.fleet.registry.is_live("c")
    running.wait(1.25, *"ab")
    running.obey()
    assert running.reconciler.is_ready
    assert running.reconciler.formation.peers == ("a", "b")
    running.report("c", fresh=True)
    running.wait(1.25, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")
    assert running.reconciler.explain_exclusion("c") == ""


@pytest.mark.parametrize("how", ["silent", "restarted", "at once"])
def test_killed_pc_is_no_failure(running: FakeFleet, how: str) -> None:
    running.failed("b", 1, epoch=1, next_lost=True)  # before `c` counts as silent
    if how != "at once":
        running.wait(7 if how == "silent" else 2, *"ab")
        running.obey()
        assert running.reconciler.formation.peers == ("a", "b")
    running.report("c", fresh=True, pid=2)
    assert running.reconciler.explain_exclusion("c") == ""
    running.wait(1.25, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")


def test_stale_peer_is_not_placed(running: FakeFleet) -> None:
    running.wait(2, *"ab")
    assert running.reconciler.is_ready
    running.failed("b", 1, epoch=1, next_lost=True)
    running.wait(0.5, *"ab")
    assert running.reconciler.formation.peers == ("a", "b")


def test_a_short_silence_changes_nothing(running: FakeFleet) -> None:
    running.wait(2.5, *"ab")
    running.report("c", *running.fleet.registry.sessions["c"].report.workers)
    running.wait(2, *"abc")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready


def test_own_standstill_is_no_silence(running: FakeFleet) -> None:
    running.now += 60
    running.handle_event(TimePassedEvent())
    assert running.pop_messages() == []
    running.wait(6)
    assert running.pop_messages() == []
    assert not running.fleet.registry.sessions


def test_unread_messages_are_no_silence(running: FakeFleet) -> None:
    """The coordinator's PC is busy, so the coordinator reads late."""
    for quarter in range(1, 32):
        running.now += 0.25
        running.handle_event(TimePassedEvent(read_lag=quarter / 4))
    assert running.pop_messages() == []
    assert running.reconciler.is_ready
    running.now += 0.25
    running.handle_event(TimePassedEvent())
    assert not running.fleet.registry.sessions, "all was read, and none had sent anything"


def test_read_lag_is_bounded(running: FakeFleet) -> None:
    for quarter in range(1, 4 * round(MAX_READ_LAG + PEER_TIMEOUT) + 4):
        running.now += 0.25
        running.handle_event(TimePassedEvent(read_lag=quarter / 4))
    assert not running.fleet.registry.sessions


def test_reconnect_time_excludes_own_standstill(running: FakeFleet) -> None:
    running.handle_event(PeerDisconnectedEvent("b"))
    running.now += 60
    # Queued messages are read before the next timer.
    workers = {name: one.report.workers for name, one in running.fleet.registry.sessions.items()}
    running.report("a", *workers["a"])
    running.report("b", *workers["b"], fresh=True)
    running.wait(3, *"abc")
    assert running.reconciler.formation.record.epoch == 1


def test_deadlines_exclude_own_standstill(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    for name in "ab":
        fake.report(name, fresh=True)
    fake.serve()
    fake.wait(2, *"ab")
    fake.now += 600
    fake.handle_event(TimePassedEvent())
    assert fake.reconciler.formation.record.epoch == 1
    assert fake.reconciler.formation.state == "loading"


def test_peer_leaves(running: FakeFleet) -> None:
    running.handle_event(MemberRemovedEvent("b", "left"))
    assert by_peer(running.pop_messages()) == by_peer(
        [
            ("a", PeerRemoved(peer="b")),
            ("c", PeerRemoved(peer="b")),
            ("a", route(1)),
            ("c", route(1)),
        ]
    )
    running.handle_event(PeerReportedEvent("b", running.fleet.registry.sessions["a"].report))
    assert running.pop_messages() == []
    running.wait(0.5, *"ac")
    assert running.reconciler.formation.peers == ("a", "c")
