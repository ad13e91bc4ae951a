"""Prefix caching: exact decisions of a scheduler, with the test in place of the stages."""

from dataclasses import dataclass, field

import pytest

from molink.errors import InvariantError
from molink.scheduler.batch import MicroBatch
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.prefix_tree import ROOT
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Release,
    RequestSlice,
    SampledId,
    SamplerOutput,
    SamplingParams,
    Volume,
)
from molink.wire.messages.serving import MAX_CACHE_SALT, OutputToken
from tests.support.request_states import make_state

PLAIN = SamplingParams()
PROMPT = tuple(range(100, 140))


@dataclass
class Player:
    """A scheduler with stages that answer at once; each sampled row gives ``token``."""

    scheduler: Scheduler
    token: int = 50
    told: list[OutputToken] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, blocks: int = 64, size: int = 16, **changes: int) -> "Player":
        given = {"max_num_batched_tokens": 512, **changes}
        return cls(Scheduler(SchedulerConfig(blocks, size, 2, **given), 1))

    def submit(
        self, key: str, tokens: tuple[int, ...], answer: int, prompt: int = 0, salt: bytes = b""
    ) -> None:
        state = make_state(
            "peer", key, tokens, prompt or len(tokens), answer, PLAIN, cache_salt=salt
        )
        self.scheduler.submit_request(state, 0.0)

    def next(self) -> MicroBatch | None:
        batch = self.scheduler.next_batch(0.0)
        self.scheduler.validate()
        return batch

    def back(self, volume: Volume) -> None:
        choices = tuple(
            SampledId(rows.request, rows.start + rows.count, self.token)
            for rows in volume.slices
            if rows.sample
        )
        self.told += [
            emission.message
            for emission in self.scheduler.on_sampled(SamplerOutput(volume.seq, choices), {}, 0)
        ]
        self.scheduler.validate()

    def round(self, seq: int) -> None:
        self.scheduler.on_released(seq, 0.0)
        self.scheduler.validate()

    def finish(self, batch: MicroBatch | None) -> None:
        for volume in batch.volumes if batch else ():
            self.back(volume.header)
        for control in batch.controls if batch else ():
            if isinstance(control.body, Release):
                self.round(control.body.seq)

    def drain(self) -> None:
        while (batch := self.next()) is not None:
            self.finish(batch)

    def serve(
        self, key: str, tokens: tuple[int, ...], answer: int, prompt: int = 0, salt: bytes = b""
    ) -> MicroBatch:
        """Serve a request to its end; returns its first micro-batch."""
        self.submit(key, tokens, answer, prompt, salt)
        first = self.next()
        self.finish(first)
        self.drain()
        return first

    def gauge(self, name: str) -> float:
        return self.scheduler.collect_stats()[1][f"scheduler_{name}"]

    def counter(self, name: str) -> float:
        return self.scheduler.collect_stats()[0][f"scheduler_{name}_total"]


def group(batch: MicroBatch) -> RequestSlice:
    """The only slice of a micro-batch."""
    (volume,) = batch.volumes
    (rows,) = volume.header.slices
    return rows


def table(batch: MicroBatch) -> tuple[int, ...]:
    """The blocks announced at a request's admission."""
    bodies = [type(control.body) for control in batch.controls]
    assert bodies in ([Admit], [Admit, BlockTable])
    return () if bodies == [Admit] else tuple(batch.controls[1].ids)


# --- hits ----------------------------------------------------------------------------------------


def test_partial_blocks_are_copied() -> None:
    player = Player.of()
    assert table(player.serve("a", PROMPT, 1)) == ()
    player.submit("b", (*PROMPT[:37], 7, 8, 9), 1)
    batch = player.next()
    admit, scheduler = batch.controls
    assert admit.body == Admit(4, 1, PLAIN, 40, 40)
    assert scheduler.body == BlockTable(5, 1, Payload("i32", (2,)))
    assert scheduler.ids == (0, 1)
    assert group(batch) == RequestSlice(
        1, 37, 3, after_seq=5, blocks=(3,), sample=True, copy_from_block=2
    )
    assert batch.volumes[0].tokens == [7, 8, 9]
    player.finish(batch)
    player.drain()
    assert [token.cached_tokens for token in player.told] == [0, 37]


def test_salts_share_no_prefix() -> None:
    """Neither full blocks nor part of one, also while the other request runs."""
    player = Player.of()
    player.serve("a", PROMPT, 1, salt=b"one")
    for salt in (b"two", b"", b"\0", b"one\0"):
        assert table(player.serve(f"b{salt!r}", PROMPT, 1, salt=salt)) == ()
    for salt in (b"one", b"two", b"", b"\0", b"one\0"):
        player.serve(f"c{salt!r}", PROMPT, 1, salt=salt)
    cached = [token.cached_tokens for token in player.told]
    assert cached == [0] * 5 + [39] * 5
    player.submit("d", (*PROMPT, 1), 9, salt=b"three")
    player.finish(player.next())
    player.submit("e", (*PROMPT, 2), 9, salt=b"four")
    player.submit("f", (*PROMPT, 3), 9, salt=b"three")
    player.drain()
    firsts = {
        token.key: token.cached_tokens for token in player.told if token.position == len(PROMPT) + 1
    }
    assert (firsts["d"], firsts["e"]) == (0, 0)
    assert firsts["f"] > 0


def test_adapters_share_no_prefix() -> None:
    """An adapter changes keys and values, so no client's salt may match an adapter's scope."""
    player = Player.of()
    one = make_state("peer", "x", PROMPT, len(PROMPT), 1, PLAIN, adapter="one").request.cache_scope
    scopes = [(b"", ""), (b"", "one"), (b"", "two"), (b"s", ""), (b"s", "one"), (one[:16], "")]
    for turn in range(2):
        for number, (salt, adapter) in enumerate(scopes):
            key = f"{turn}/{number}"
            state = make_state(
                "peer", key, PROMPT, len(PROMPT), 1, PLAIN, cache_salt=salt, adapter=adapter
            )
            player.scheduler.submit_request(state, 0.0)
            player.drain()
    assert [token.cached_tokens for token in player.told] == [0] * 6 + [39] * 6
    assert len(one) > MAX_CACHE_SALT


def test_salted_blocks_are_evicted_like_others() -> None:
    player = Player.of(blocks=8)
    for number in range(20):
        player.serve(str(number), tuple(range(number, number + 60)), 1, salt=bytes([number]))
    assert player.counter("prefix_evictions") > 0
    player.serve("last", tuple(range(19, 79)), 1, salt=bytes([19]))
    assert player.told[-1].cached_tokens == 59


def test_the_next_message_finds_prompt_and_answer() -> None:
    player = Player.of()
    player.serve("a", PROMPT, 20)
    # 40 + 20 tokens, of which the last was never computed.
    round_trip = (*PROMPT, *[50] * 20, 1, 2, 3)
    batch = player.serve("b", round_trip, 5)
    assert table(batch) == (0, 1, 2)
    assert (group(batch).start, group(batch).count) == (59, 4)
    assert player.told[20].cached_tokens == 59
    assert {token.cached_tokens for token in player.told[21:]} == {0}
    assert player.gauge("blocks_used") == 0


def test_the_last_token_is_always_computed() -> None:
    player = Player.of()
    player.serve("a", PROMPT[:32], 20)
    rows = group(player.serve("b", PROMPT[:32], 1))
    assert (rows.start, rows.count) == (31, 1)
    assert rows.copy_from_block == 1
    assert group(player.serve("c", PROMPT[:1], 1)).start == 0


def test_a_prompt_is_shared_once_computed() -> None:
    player = Player.of()
    player.submit("a", PROMPT, 100)
    player.finish(player.next())
    player.submit("b", PROMPT, 100)
    batch = player.next()
    admit = [control.body for control in batch.controls]
    assert admit[1] == BlockTable(admit[1].seq, 1, Payload("i32", (2,)))
    prefill = batch.volumes[-1].header.slices[0]
    # Only full blocks are shared: "a" still writes to its third block.
    assert (prefill.start, prefill.count, prefill.copy_from_block) == (32, 8, -1)


def test_rows_in_flight_are_not_shared() -> None:
    player = Player.of()
    player.submit("a", PROMPT, 100)
    player.next()
    player.submit("b", PROMPT, 100)
    assert table(player.next()) == ()


def test_uncomputed_rows_of_a_cancelled_request_are_not_shared() -> None:
    player = Player.of(max_num_batched_tokens=16)
    player.submit("a", PROMPT, 100)
    first, second = player.next(), player.next()
    player.back(first.volumes[0].header)
    player.scheduler.cancel_request("peer", "a", 0.0)
    player.next()
    player.scheduler.on_tombstone(second.volumes[0].header.seq, 0.0)
    player.submit("b", PROMPT, 100)
    batch = player.next()
    assert table(batch) == (0,)
    assert group(batch).start == 16


def test_uncomputed_blocks_are_not_shared() -> None:
    player = Player.of()
    player.submit("a", PROMPT, 100)
    volume = player.next().volumes[0].header
    player.scheduler.on_sampled(SamplerOutput(volume.seq, (), (0,)), {}, 0.0)
    player.finish(player.next())
    assert table(player.serve("b", PROMPT, 1)) == ()


def test_a_failed_requests_blocks_are_evicted_unless_shared() -> None:
    player = Player.of()
    player.serve("a", PROMPT, 1)
    player.submit("other", PROMPT[:20], 100)
    player.finish(player.next())
    player.submit("b", (*PROMPT[:32], 1), 100)
    batch = player.next()
    assert batch.controls[1].ids == (0, 1)
    for volume in batch.volumes:
        failed = tuple(rows.request for rows in volume.header.slices if rows.request == 2)
        choices = tuple(
            SampledId(rows.request, rows.start + 1, 50)
            for rows in volume.header.slices
            if rows.request != 2
        )
        player.scheduler.on_sampled(SamplerOutput(volume.header.seq, choices, failed), {}, 0.0)
    player.finish(player.next())
    player.submit("b", (*PROMPT[:32], 1), 100)
    # "other" holds the first block only; of "a" the third block is evicted before the second.
    (ids,) = (control.ids for control in player.next().controls if control.ids)
    assert ids == (0,)
    assert player.gauge("blocks_cached") == 0


def test_a_disabled_prefix_cache_keeps_nothing() -> None:
    player = Player.of(prefix_cache=False)
    for key in "ab":
        assert table(player.serve(key, PROMPT, 1)) == ()
    assert player.gauge("blocks_free") == 64
    assert player.gauge("blocks_cached") == 0
    assert player.counter("prefix_lookup_tokens") == 80


def test_a_resubmitted_request_reports_no_more_than_its_prompt() -> None:
    player = Player.of()
    player.serve("a", PROMPT, 20)
    player.serve("b", (*PROMPT, *[50] * 10), 5, prompt=40)
    assert player.told[20].cached_tokens == 40


def test_shared_blocks_need_no_header_room() -> None:
    player = Player.of(blocks=4096, size=1, max_model_len=1 << 20, max_num_batched_tokens=4096)
    tokens = tuple(range(3000))
    player.serve("a", tokens, 1)
    batch = player.serve("b", (*tokens, 1), 1)
    assert len(table(batch)) == 3000
    assert len(group(batch).blocks) == 1


def test_hits_are_counted_once_per_request() -> None:
    player = Player.of()
    player.serve("a", PROMPT, 1)
    player.serve("b", PROMPT, 1)
    assert player.counter("prefix_lookup_tokens") == 80
    assert player.counter("prefix_hit_tokens") == 39
    assert player.gauge("prefix_hit_rate") == 0.4875
    assert player.counter("prefill_rows") == 41


# --- memory --------------------------------------------------------------------------------------


def test_a_copy_source_is_held() -> None:
    player = Player.of(blocks=4)
    player.serve("a", PROMPT[:20], 1)
    assert (player.gauge("blocks_cached"), player.gauge("blocks_free")) == (2, 2)
    player.submit("b", (*PROMPT[:19], 1), 1)
    batch = player.next()
    assert group(batch).copy_from_block == 1
    assert player.gauge("blocks_used") == 3
    player.back(batch.volumes[0].header)
    # "b" has two blocks until its release completes; the copy source is only cached again.
    assert player.gauge("blocks_used") == 2
    player.drain()


def test_a_release_drops_the_copy_source() -> None:
    player = Player.of(blocks=4)
    player.serve("a", PROMPT[:20], 1)
    player.submit("b", (*PROMPT[:19], 1), 1)
    volume = player.next().volumes[0].header
    player.scheduler.cancel_request("peer", "b", 0.0)
    release = player.next().controls[0].body
    player.back(volume)
    assert player.gauge("blocks_used") == 3
    player.round(release.seq)
    assert player.gauge("blocks_used") == 0


def test_copy_sources_do_not_prevent_admission() -> None:
    player = Player.of(blocks=3)
    player.serve("a", PROMPT, 1)
    assert player.gauge("blocks_cached") == 3
    # "b" needs all three blocks: two are shared, and none is left for a copy source.
    batch = player.serve("b", (*PROMPT[:37], 1, 2, 3), 1)
    assert (group(batch).start, group(batch).copy_from_block) == (32, -1)


def test_eviction_is_lru_and_leaves_first() -> None:
    player = Player.of(blocks=6)
    first, second = PROMPT, PROMPT[::-1]
    player.serve("a", first, 1)
    player.serve("b", second, 1)
    player.serve("a again", first, 1)
    assert player.gauge("blocks_cached") + player.gauge("blocks_free") == 6
    player.serve("c", tuple(range(20)), 1)
    assert player.counter("prefix_evictions") == 2
    assert group(player.serve("b again", second, 1)).start == 16
    assert player.told[-1].cached_tokens == 16


def test_evicted_blocks_with_pending_releases_are_not_free() -> None:
    player = Player.of(blocks=3)
    player.submit("a", PROMPT, 1)
    player.back(player.next().volumes[0].header)
    release = player.next().controls[0].body
    assert player.gauge("blocks_releasing") == 3
    player.submit("b", tuple(range(40)), 1)
    assert player.next() is None
    player.round(release.seq)
    batch = player.next()
    assert group(batch).blocks == (0, 1, 2)
    assert player.counter("prefix_evictions") == 3


def test_a_preempted_request_finds_its_cached_blocks() -> None:
    player = Player.of(blocks=4, size=16, max_num_batched_tokens=64)
    for key, first in (("old", 0), ("young", 100)):
        player.submit(key, tuple(range(first, first + 15)), 30)
    tables = []
    while (batch := player.next()) is not None:
        tables += [control for control in batch.controls if isinstance(control.body, BlockTable)]
        player.finish(batch)
    assert player.counter("preemptions") == 1
    # "young" had two blocks. "old" needed one, and the last block of "young" is evicted first.
    (again,) = tables
    assert (again.body.request, len(again.ids)) == (2, 1)
    assert [token.position for token in player.told if token.key == "young"] == [*range(15, 45)]
    assert player.counter("prefix_hit_tokens") == 0


def test_longer_partial_blocks_replace_shorter_ones() -> None:
    player = Player.of()
    player.serve("a", PROMPT[:20], 1)
    player.serve("b", PROMPT[:25], 1)
    player.serve("c", PROMPT[:22], 1)
    # 16 tokens and 9; the 4 of "a" and the 6 of "c" are among these.
    assert player.gauge("blocks_cached") == 2
    player.serve("d", PROMPT, 1)
    assert player.gauge("blocks_cached") == 3


def test_duplicate_prompts_are_cached_once() -> None:
    player = Player.of()
    for key in "ab":
        player.submit(key, PROMPT, 20)
    player.drain()
    # 59 tokens of both: 4 blocks.
    assert player.gauge("blocks_cached") == 4
    assert player.gauge("blocks_used") == 0


def test_long_requests_share_among_themselves() -> None:
    player = Player.of(short_context=50)
    for key, answer in (("short", 11), ("long", 12), ("long too", 30), ("short too", 1)):
        player.serve(key, PROMPT, answer)
    first = {
        key: next(t.cached_tokens for t in player.told if t.key == key)
        for key in ("short", "long", "long too", "short too")
    }
    assert first == {"short": 0, "long": 0, "long too": 39, "short too": 39}


def test_validation_finds_a_held_block_below_a_cached_one() -> None:
    cache = KVCacheManager(SchedulerConfig(8, 2, 1))
    tree, blocks = cache._tree, cache.allocator.allocate_blocks(2)
    for block in blocks:
        cache.allocator.mark_cached(block)
    tree.insert_block(ROOT, (1, 2), blocks[0])
    tree.insert_block(blocks[0], (3, 4), blocks[1])
    cache.allocator.unshare_block(blocks[0])
    with pytest.raises(InvariantError):
        cache.validate([], [])
    cache.allocator.unshare_block(blocks[1])
    with pytest.raises(InvariantError, match="outlives"):
        cache.validate([], [])
    cache.allocator.touch_blocks([blocks[0]])
    cache.validate([], [])


def test_policies_know_the_uncached_tokens() -> None:
    player = Player.of()
    player.serve("a", PROMPT, 2)
    for key, tokens, uncached in (("b", PROMPT, 1), ("c", (*PROMPT[:20], 7, 8), 2), ("d", (9,), 1)):
        player.submit(key, tokens, 2)
        state = player.scheduler._queues.find_request("peer", key)
        assert state is not None
        assert state.num_uncached == uncached
