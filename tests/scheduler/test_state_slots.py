"""Snapshots of recurrent states: exact decisions of a scheduler, with the test as its stages."""

import pytest

from molink.scheduler.batch import MicroBatch
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.request_state import PendingRelease
from molink.scheduler.state_slots import StateSlots
from molink.wire.messages.data_plane import Admit, SamplerOutput, SamplingParams, StateCopy
from tests.scheduler.test_kv_cache_manager import PROMPT, Player, group
from tests.support.request_states import make_state

ANSWER = 50


def admit(batch: MicroBatch) -> Admit:
    """The only admission of a micro-batch."""
    (found,) = (each.body for each in batch.controls if isinstance(each.body, Admit))
    return found


def start(slots: int = 4, **changes: int) -> Player:
    return Player.of(state_slots=slots, **{"min_snapshot_rows": 16, **changes})


def serve_start(player: Player, key: str, tokens: tuple[int, ...], salt: bytes = b"") -> int:
    """Serve a request to its end; returns the position of its first computed row."""
    return group(player.serve(key, tokens, 1, salt=salt)).start


def test_the_next_turn_continues_a_released_state() -> None:
    player = start(min_snapshot_rows=100)
    player.serve("turn 1", PROMPT, 3)
    # The last token of the answer was never computed.
    turn = (*PROMPT, *[ANSWER] * 3, 1, 2, 3)
    player.submit("turn 2", turn, 1)
    batch = player.next()
    assert (admit(batch).state_slot, admit(batch).copy_from_state) == (1, 0)
    assert (group(batch).start, group(batch).copy_from_block) == (42, 2)
    player.finish(batch)
    player.drain()
    assert player.told[-1].cached_tokens == 42
    assert serve_start(player, "another turn 2", (*turn[:43], 7, 8, 9)) == 42


def test_a_branch_is_kept_where_blocks_are_whole() -> None:
    player = start(min_snapshot_rows=32)
    player.serve("a", PROMPT[:20], 30)
    shared = (*PROMPT[:20], *[ANSWER] * 20)
    player.submit("b", (*shared, 2, 3), 1)
    first = player.next()
    assert (group(first).start, group(first).count) == (0, 32)
    assert first.volumes[0].header.state_copies == (StateCopy(1, 32, 2),)
    rest = player.next()
    assert (group(rest).start, rest.volumes[0].header.state_copies) == (32, ())
    player.finish(first)
    player.finish(rest)
    player.drain()
    batch = player.serve("c", (*shared, 4, 5), 1)
    assert (group(batch).start, admit(batch).copy_from_state) == (32, 2)


def test_the_end_of_a_long_prompt_is_kept() -> None:
    player = start(min_snapshot_rows=32)
    assert player.serve("a", PROMPT, 20).volumes[0].header.state_copies == (StateCopy(0, 32, 1),)
    assert serve_start(player, "without the beginning of the answer", (*PROMPT[:36], 1, 2)) == 32
    assert serve_start(player, "again", PROMPT) == 32


def test_few_rows_are_not_worth_a_chunk() -> None:
    player = start(min_snapshot_rows=33)
    for key in "abc":
        batch = player.serve(key, (*PROMPT, ord(key)), 1)
        assert (group(batch).count, batch.volumes[0].header.state_copies) == (41, ())


def test_states_are_kept_apart_by_salt() -> None:
    player = start()
    assert [serve_start(player, key, PROMPT, salt) for key, salt in (("a", b"1"), ("b", b"2"))] == [
        0,
        0,
    ]
    assert serve_start(player, "c", (*PROMPT, 1), b"1") == 40


def test_a_snapshot_is_held_while_a_request_copies_it() -> None:
    """A snapshot's slot is reused only after the copy has been made at all stages."""
    player = start(slots=2)
    player.serve("a", PROMPT, 1)
    player.submit("b", (*PROMPT, 1), 8)
    player.submit("c", (9, 9, 9), 8)
    copying = player.next()
    assert [admit(copying).state_slot, admit(copying).copy_from_state] == [1, 0]
    assert player.next() is None
    player.finish(copying)
    batch = player.next()
    assert (admit(batch).state_slot, admit(batch).copy_from_state) == (0, -1)
    player.finish(batch)
    player.drain()


def test_one_slot_is_the_requests() -> None:
    player = start(slots=1)
    assert [serve_start(player, key, (*PROMPT, ord(key))) for key in "abc"] == [0, 0, 0]


def test_two_requests_continue_the_same_state() -> None:
    player = start()
    player.serve("a", PROMPT, 1)
    for key in "bc":
        player.submit(key, (*PROMPT, ord(key)), 1)
    batch = player.next()
    copied = [each.body.copy_from_state for each in batch.controls if isinstance(each.body, Admit)]
    assert copied == [0, 0]
    player.finish(batch)
    player.drain()


def test_rows_in_flight_leave_no_state() -> None:
    player = start(min_snapshot_rows=100)
    player.submit("a", PROMPT, 8)
    player.finish(player.next())
    batch = player.next()
    player.scheduler.cancel_request("peer", "a", 0.0)
    release = player.next()
    player.finish(batch)
    player.finish(release)
    assert serve_start(player, "b", (*PROMPT, ANSWER, 1)) == 0


def test_a_copy_in_flight_is_no_snapshot() -> None:
    """The stages may have dropped its rows, while another request computed the same tokens' KV."""
    player = start(min_snapshot_rows=32)
    player.serve("a", PROMPT[:20], 30)
    shared = (*PROMPT[:20], *[ANSWER] * 20)
    player.submit("b", (*shared, 2, 3), 1)
    batch = player.next()
    assert batch.volumes[0].header.state_copies
    player.scheduler.cancel_request("peer", "b", 0.0)
    release = player.next()
    player.finish(batch)
    player.finish(release)
    assert serve_start(player, "c", (*shared, 4, 5)) == 0


def test_a_request_without_rows_leaves_no_state() -> None:
    cache = KVCacheManager(SchedulerConfig(8, 4, 1, state_slots=2))
    state = make_state("peer", "a", PROMPT[:8], 8, 1, SamplingParams())
    found = cache.find_prefix(state)
    state.start_admission(0, cache.allocate_table(found, 2) or [], found)
    state.state_slot = cache.allocate_state_slot(found)
    cache.release_request(1, PendingRelease(state))
    cache.reclaim_released(1)
    assert cache.states.allocator.num_free == 2


def test_the_state_of_a_cancelled_request_is_kept_between_rows() -> None:
    player = start()
    player.submit("a", PROMPT, 8)
    for _ in range(3):
        player.finish(player.next())
    player.scheduler.cancel_request("peer", "a", 0.0)
    player.finish(player.next())
    assert serve_start(player, "b", (*PROMPT, ANSWER, ANSWER, 1)) >= 40


def test_no_other_request_continues_a_state_that_failed() -> None:
    player = start()
    player.serve("a", PROMPT, 1)
    player.submit("b", (*PROMPT, 1), 1)
    batch = player.next()
    (volume,) = batch.volumes
    failed = SamplerOutput(volume.header.seq, (), (volume.header.slices[0].request,))
    (emission,) = player.scheduler.on_sampled(failed, {}, 0.0)
    assert emission.message.reason == "failed"
    player.drain()
    assert serve_start(player, "c", (*PROMPT, 1)) == 0


def test_evicted_blocks_take_their_states_along() -> None:
    player = start(blocks=4)
    player.serve("a", PROMPT, 1)
    player.serve("b", PROMPT[::-1], 1)
    # Only the first block of "a" is left.
    assert serve_start(player, "a again", (*PROMPT, 1)) == 0


@pytest.mark.parametrize("slots", [2, 3])
def test_the_state_unused_for_longest_goes_first(slots: int) -> None:
    player = start(slots=slots, min_snapshot_rows=100)
    player.serve("a", PROMPT, 1)
    player.serve("b", PROMPT[::-1], 1)
    assert serve_start(player, "a 2", (*PROMPT, 1)) == 40
    assert serve_start(player, "b 2", (*PROMPT[::-1], 1)) == (40 if slots == 3 else 0)


def test_a_snapshot_that_frees_no_slot_yet_is_kept() -> None:
    """Its slot belongs to a request that has just ended, whose release is in flight."""
    states = StateSlots(2)
    released, returned = states.allocate_slot(), states.allocate_slot()
    assert released is not None
    assert returned is not None
    states.add_snapshot(released, block=0, tokens=1)
    states.add_snapshot(returned, block=1, tokens=1)
    states.allocator.release_blocks(1, [released])
    states.allocator.unshare_block(returned)
    assert states.allocate_slot() == returned
    assert states.find_snapshot(0, 1, 1) == (1, released)
    assert states.allocate_slot() is None
    states.allocator.reclaim_released(1)
    assert states.allocate_slot() == released


def chat_hit_rate(slots: int, dropped: int) -> float:
    """Share of prompts' tokens found in the prefix cache by two chats of six turns with a common
    system prompt.

    A prompt ends with 5 tokens that begin the answer. The last two of them and the ``dropped``
    first tokens of an answer (its reasoning) are not in the next prompt.
    """
    player = Player.of(512, state_slots=slots)
    system, chats = tuple(range(1000, 1400)), [(), ()]
    for turn in range(6):
        for number in range(2):
            asked = tuple(range(2000 + 100 * (2 * turn + number), 2040 + 100 * (2 * turn + number)))
            prompt = (*system, *chats[number], *asked, 1, 2, 3, 4, 5)
            player.serve(f"{number}.{turn}", prompt, 150)
            kept = prompt[: len(prompt) - 2 * (dropped > 0)]
            chats[number] = (*kept[len(system) :], *[player.token] * (150 - dropped))
    return round(player.gauge("prefix_hit_rate"), 3)


@pytest.mark.parametrize(
    ("dropped", "attention", "recurrent"), [(0, 0.915, 0.879), (90, 0.817, 0.706)]
)
def test_most_of_a_chat_is_reused(dropped: int, attention: float, recurrent: float) -> None:
    assert (chat_hit_rate(0, dropped), chat_hit_rate(16, dropped)) == (attention, recurrent)
