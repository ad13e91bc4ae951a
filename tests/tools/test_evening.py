"""The changing evening in virtual time: who is placed when, and that nothing is lost."""

from molink.bench.planned_requests import PlannedRequest
from molink.sim.profiles import LinkProfile
from molink.sim.swarm_plan import ModelDescription
from tools.evening.simulated import DEVICES, MODEL, by_minute, fixed, mean
from tools.evening.story import AWAY, DURATION, HOT, PEERS, Event, Leave, PaceChange, Return, story
from tools.evening.swarm import Choice, Evening

TOKENS = 40


def evening(choice: Choice, events: list[Event], until: float) -> Evening:
    plan = [PlannedRequest(index, 1.0 + 5.0 * index, 64, TOKENS) for index in range(int(until / 5))]
    found = Evening(
        ModelDescription.from_profile(MODEL),
        DEVICES,
        LinkProfile(1000.0, 5.0),
        choice,
        plan,
        events,
    )
    found.run(until + 100.0)
    assert not found.trouble
    assert [sample.output_tokens for sample in found.clients.collect_samples(0.0)] == [
        TOKENS
    ] * len(plan)
    return found


def peers(found: Evening) -> list[set[str]]:
    return [{peer for peer, _ in layout} for _, layout in found.log]


def test_the_story_is_in_order_and_can_be_shortened() -> None:
    events, shorter = story(), story(0.1)
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert 0 < events[0].at < events[-1].at < DURATION
    assert [event.at * 0.1 for event in events] == [event.at for event in shorter]
    assert {event.peer for event in events} == set(range(PEERS))


def test_who_leaves_is_done_without_and_taken_back() -> None:
    events: list[Event] = [Leave(12.0, AWAY), Return(30.0, AWAY)]
    for follows in (True, False):
        found = evening(Choice("", micro_batches=2, chunk=64, follows=follows), events, 60.0)
        before, without, after = peers(found)
        assert before == after == {f"pc{HOT}", f"pc{AWAY}"}
        assert f"pc{AWAY}" not in without


def layers_of_the_hot_pc(found: Evening) -> list[int]:
    return [
        last - first
        for _, layout in found.log
        for peer, (first, last) in layout
        if peer == f"pc{HOT}"
    ]


def test_only_who_follows_gives_a_pc_that_stays_hot_fewer_layers() -> None:
    events: list[Event] = [PaceChange(5.0, HOT, 4.0)]
    kept = evening(Choice("", follows=False), events, 30.0)
    assert len(kept.log) == 1
    found = evening(Choice(""), events, 140.0)
    before, after = layers_of_the_hot_pc(found)
    assert after < before
    # A pace has to stay for a minute.
    assert found.log[-1][0] > 60.0


def test_a_gap_counts_for_the_minute_in_which_it_ends() -> None:
    rows = [{"seconds": [1.0, 0.0], "counts": [4, 0]}, {"seconds": [1.0, 3.0], "counts": [0, 2]}]
    assert by_minute(rows) == [0.5, 1.5]
    assert mean(rows) == 5.0 / 6
    assert len({choice.name for choice in fixed()}) == 27
