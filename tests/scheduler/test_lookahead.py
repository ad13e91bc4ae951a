"""Lookahead drafts: exact decisions of a scheduler, with the test in place of the stages."""

from collections.abc import Sequence

import pytest

from molink.scheduler.batch import MicroBatch
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.request_state import Emission
from molink.scheduler.scheduler import Scheduler
from molink.scheduler.speculation.base import DraftProposal
from molink.wire.messages.data_plane import (
    Release,
    RequestSlice,
    SampledId,
    SamplerOutput,
    SamplingParams,
    Volume,
)
from molink.wire.messages.serving import OutputToken, Rejected
from tests.support.request_states import make_state


class Says:
    """Drafts 101, 102, 103, … by position, from 11 on."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal([90 + at for at in range(len(tokens), len(tokens) + count)])


def decoding(**changes: int | bool) -> Scheduler:
    """A scheduler with a decoding request; passes have 3 drafts and 2 lookahead volumes.

    The request has 10 prompt tokens and one generated token, 50.
    """
    given = {"num_blocks": 64, "block_size": 4, "micro_batches": 1, "max_num_batched_tokens": 64}
    given |= {"num_speculative_tokens": 3, "lookahead_volumes": 2, "prefix_cache": False}
    made = Scheduler(SchedulerConfig(**{**given, **changes}), 1, create_draft_source=Says)
    submit(made, "a")
    say(made, sent(made.next_batch(0.0)), 50)
    return made


def submit(to: Scheduler, key: str, **changes: object) -> None:
    fields = {
        "prompt_tokens": 10,
        "sampling_params": SamplingParams(),
        "max_tokens": 100,
        **changes,
    }
    to.submit_request(make_state("d", key, tuple(range(10)), **fields), 0.0)


def sent(batch: MicroBatch | None) -> Volume:
    assert batch is not None
    (volume,) = batch.volumes
    assert len(volume.tokens) == volume.header.count
    return volume.header


def flying(made: Scheduler) -> list[Volume]:
    """A pass of drafts in flight, and its two lookahead volumes."""
    volumes = [sent(made.next_batch(0.0)) for _ in range(3)]
    made.validate()
    return volumes


def say(to: Scheduler, volume: Volume, *tokens: int) -> list[Emission]:
    """Return the volume with ``tokens`` sampled from its only slice."""
    (rows,) = volume.slices
    first = rows.start + rows.count - len(rows.verified_drafts)
    choices = [SampledId(rows.request, at, token) for at, token in enumerate(tokens, first)]
    emissions = to.on_sampled(SamplerOutput(volume.seq, tuple(choices)), {}, 0.0)
    to.validate()
    return emissions


def told(emissions: Sequence[Emission]) -> list[tuple[int, int]]:
    messages = [emission.message for emission in emissions]
    return [(each.position, each.token) for each in messages if isinstance(each, OutputToken)]


def test_lookahead_drafts_follow_drafts_in_flight() -> None:
    made = decoding()
    first, second, third = flying(made)
    assert first.slices == (RequestSlice(0, 10, 4, 2, (3,), True, drafts=(101, 102, 103)),)
    assert second.slices == (RequestSlice(0, 14, 3, first.seq, (4,), True, drafts=(104, 105, 106)),)
    assert third.slices == (RequestSlice(0, 17, 3, second.seq, (), True, drafts=(107, 108, 109)),)
    assert made.next_batch(0.0) is None, "the limit of volumes in flight"


def test_right_lookahead_drafts_yield_their_tokens() -> None:
    made = decoding()
    first, second, third = flying(made)
    assert told(say(made, first, 101, 102, 103, 104)) == [(at, 90 + at) for at in range(11, 15)]
    assert made.next_batch(0.0) is None
    assert told(say(made, second, 105, 106, 107)) == [(at, 90 + at) for at in range(15, 18)]
    assert sent(made.next_batch(0.0)).slices[0].drafts == (110, 111, 112)
    assert told(say(made, third, 108, 109, 7)) == [(18, 108), (19, 109), (20, 7)]
    # The draft path is cleared, so a pass starts after the known tokens.
    (rows,) = sent(made.next_batch(0.0)).slices
    assert (rows.start, rows.drafts) == (20, (111, 112, 113))
    assert made.collect_stats()[0]["scheduler_draft_tokens_accepted_total"] == 9.0


@pytest.mark.parametrize(
    ("tokens", "start"), [((7,), 11), ((101, 102, 103, 7), 14)], ids=["within", "after"]
)
def test_a_wrong_draft_invalidates_lookahead_rows(tokens: tuple[int, ...], start: int) -> None:
    made = decoding()
    first, second, third = flying(made)
    say(made, first, *tokens)
    volume = sent(made.next_batch(0.0))
    (rows,) = volume.slices
    assert (rows.start, rows.after_seq, rows.is_lookahead) == (start, third.seq, False)
    assert say(made, second) == say(made, third) == []
    assert told(say(made, volume, 8)) == [(start + 1, 8)]


@pytest.mark.parametrize("tokens", [(105,), (105, 106, 107, 108)], ids=str)
def test_tokens_from_a_wrong_path_fail_the_request(tokens: tuple[int, ...]) -> None:
    made = decoding()
    first, second, _ = flying(made)
    say(made, first, 7)
    (emission,) = say(made, second, *tokens)
    assert isinstance(emission.message, Rejected)


@pytest.mark.parametrize("tokens", [(), (105, 9, 8), (105, 106, 107, 108)], ids=str)
def test_tokens_other_than_the_lookahead_drafts_fail_the_request(tokens: tuple[int, ...]) -> None:
    made = decoding()
    first, second, _ = flying(made)
    say(made, first, 101, 102, 103, 104)
    (emission,) = say(made, second, *tokens)
    assert isinstance(emission.message, Rejected)


def test_an_unsampled_row_clears_the_draft_path() -> None:
    made = decoding()
    first, second, third = flying(made)
    assert told(say(made, first, 101, 102)) == [(11, 101), (12, 102)]
    (rows,) = sent(made.next_batch(0.0)).slices
    assert (rows.start, rows.is_lookahead) == (12, False)
    assert say(made, second) == say(made, third) == []


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_cancel_frees_all_blocks(when: str) -> None:
    made = decoding(prefix_cache=True)
    first, second, third = flying(made)
    back = [first, second, third]
    if when == "later":
        say(made, back.pop(0), 101, 102, 103, 104)
    made.cancel_request("d", "a", 0.0)
    batch = made.next_batch(0.0)
    assert batch is not None
    (release,) = (control.body for control in batch.controls)
    assert isinstance(release, Release)
    assert (release.after_seq, *release.pending_seqs) == (
        third.seq,
        *(each.seq for each in back[:-1]),
    )
    for volume in back:
        assert say(made, volume, 9) == []
    made.on_released(release.seq, 0.0)
    made.validate()
    assert made.collect_stats()[1]["scheduler_blocks_used"] == 0.0
    tree = made._cache._tree
    right = [*range(10), 50, *range(101, 110)]
    assert tree.match_prefix(right).num_tokens == (10 if when == "at once" else 14)


def test_requests_with_wrong_path_rows_in_flight_are_not_preempted() -> None:
    made = decoding(lookahead_volumes=1)
    first, second = sent(made.next_batch(0.0)), sent(made.next_batch(0.0))
    say(made, first, 7)
    state = made._queues.find_request("d", "a")
    assert state is not None
    assert list(made._queues._idle_requests()) == []
    say(made, second)
    assert list(made._queues._idle_requests()) == [state]


def test_no_lookahead_beside_prompts_or_decode_rows() -> None:
    made = decoding(micro_batches=2)
    first = sent(made.next_batch(0.0))
    submit(made, "b", max_tokens=50)
    prompt = sent(made.next_batch(0.0))
    assert prompt.prefill
    assert made.next_batch(0.0) is None
    say(made, prompt, 60)
    say(made, first, 7)
    # Both requests decode, each in a volume of its own; only then lookahead is sent.
    volumes = [sent(made.next_batch(0.0)) for _ in range(4)]
    assert [volume.slices[0].is_lookahead for volume in volumes] == [False, False, True, True]
    assert [len(volume.slices) for volume in volumes] == [1, 1, 1, 1]
