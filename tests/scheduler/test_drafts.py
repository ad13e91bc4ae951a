"""Drafts: exact decisions of a scheduler, with the test in place of the stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from molink.facts.profile import Profile
from molink.scheduler.batch import MicroBatch
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.request_state import Emission
from molink.scheduler.scheduler import Scheduler
from molink.scheduler.speculation.answer_history import AnswerHistory
from molink.scheduler.speculation.base import DraftProposal
from molink.wire.messages.data_plane import (
    MAX_SLICES,
    ForcedTokens,
    History,
    MtpDrafts,
    Release,
    RequestSlice,
    SampledId,
    SamplerOutput,
    SamplingParams,
    TopLogprobs,
    Volume,
)
from molink.wire.messages.serving import OutputToken, Rejected
from tests.support.request_states import make_state


@dataclass
class Says:
    """Drafts 100, 101, 102, … by position."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal([90 + at for at in range(len(tokens), len(tokens) + count)])


def make_scheduler(**changes: Any) -> Scheduler:
    given = {"num_blocks": 64, "block_size": 4, "micro_batches": 1, "max_num_batched_tokens": 64}
    given |= {"num_speculative_tokens": 3, "prefix_cache": False}
    return Scheduler(SchedulerConfig(**{**given, **changes}), 1, create_draft_source=Says)


def submit(to: Scheduler, key: str, tokens: int = 10, answer: int = 100, **changes: object) -> None:
    fields = {"prompt_tokens": tokens, "sampling_params": SamplingParams(), **changes}
    to.submit_request(make_state("d", key, tuple(range(tokens)), max_tokens=answer, **fields), 0.0)


def prefilled(**changes: int) -> Scheduler:
    """A request of 10 tokens that has generated one token, 50."""
    made = make_scheduler(**changes)
    submit(made, "a")
    say(made, sent(made.next_batch(0.0)), 50)
    return made


def sent(batch: MicroBatch | None) -> Volume:
    assert batch is not None
    (volume,) = batch.volumes
    assert len(volume.tokens) == volume.header.count
    return volume.header


def say(to: Scheduler, volume: Volume, *tokens: int) -> list[Emission]:
    """Return the volume with ``tokens`` sampled from its only slice."""
    (rows,) = volume.slices
    first = rows.start + rows.count - len(rows.drafts)
    choices = [SampledId(rows.request, at, token) for at, token in enumerate(tokens, first)]
    emissions = to.on_sampled(SamplerOutput(volume.seq, tuple(choices)), {}, 0.0)
    to.validate()
    return emissions


def told(emissions: Sequence[Emission]) -> list[tuple[int, int, str | None]]:
    return [
        (message.position, message.token, message.finish_reason)
        for message in (emission.message for emission in emissions)
        if isinstance(message, OutputToken)
    ]


# --- what goes out, and what comes back -----------------------------------------------------------


def test_drafts_are_rows_after_the_last_token() -> None:
    made = prefilled()
    batch = made.next_batch(0.0)
    drafts = (101, 102, 103)
    # Blocks 0 to 2 hold 12 tokens; the last two drafts need another one.
    assert sent(batch).slices == (RequestSlice(0, 10, 4, 2, (3,), True, drafts=drafts),)
    assert batch is not None
    assert batch.volumes[0].tokens == [50, *drafts]
    made.validate()


@pytest.mark.parametrize(
    ("tokens", "start"), [((7,), 11), ((101, 7), 12), ((101, 102, 7), 13), ((101, 102, 103, 7), 14)]
)
def test_tokens_are_accepted_up_to_the_first_wrong_draft(
    tokens: tuple[int, ...], start: int
) -> None:
    made = prefilled()
    emissions = say(made, sent(made.next_batch(0.0)), *tokens)
    assert told(emissions) == [(at, token, None) for at, token in enumerate(tokens, 11)]
    batch = made.next_batch(0.0)
    (rows,) = sent(batch).slices
    # It continues with the last token; rows of wrong drafts are overwritten.
    assert (rows.start, rows.count) == (start, 4)
    assert batch is not None
    assert batch.volumes[0].tokens[0] == 7
    counters = made.collect_stats()[0]
    assert counters["scheduler_draft_tokens_total"] == 3.0
    assert counters["scheduler_draft_tokens_accepted_total"] == len(tokens) - 1


def test_blocks_of_wrong_drafts_are_reused() -> None:
    made = prefilled()
    say(made, sent(made.next_batch(0.0)), 7)
    (rows,) = sent(made.next_batch(0.0)).slices
    assert (rows.start, rows.blocks) == (11, ())


def test_alternatives_come_with_each_token() -> None:
    made = prefilled()
    volume = sent(made.next_batch(0.0))
    choices = (SampledId(0, 11, 101, -0.5), SampledId(0, 12, 7, -0.25))
    tops = {(0, at): TopLogprobs(0, at, (at,), (-0.5,)) for at in (11, 12)}
    emissions = made.on_sampled(SamplerOutput(volume.seq, choices), tops, 0.0)
    messages = [emission.message for emission in emissions]
    assert [getattr(message, "top", None) for message in messages] == [
        ((at, -0.5),) for at in (11, 12)
    ]
    assert [getattr(message, "logprob", None) for message in messages] == [-0.5, -0.25]


# --- tokens forced by a grammar -------------------------------------------------------------------


def say_forced(to: Scheduler, volume: Volume, token: int, *forced: ForcedTokens) -> None:
    """Return the volume with one token, and the forced tokens after it."""
    (rows,) = volume.slices
    choice = SampledId(rows.request, rows.start + rows.count - len(rows.drafts), token)
    to.on_sampled(SamplerOutput(volume.seq, (choice,), (), forced), {}, 0.0)
    to.validate()


def test_forced_tokens_become_the_next_drafts() -> None:
    made = prefilled()
    say_forced(made, sent(made.next_batch(0.0)), 7, ForcedTokens(0, (60, 61)))
    batch = made.next_batch(0.0)
    assert sent(batch).slices[0].drafts == (60, 61)
    assert batch is not None
    assert batch.volumes[0].tokens == [7, 60, 61]
    say(made, batch.volumes[0].header, 60, 61, 8)
    assert sent(made.next_batch(0.0)).slices[0].drafts == (105, 106, 107)


def test_forced_tokens_are_limited_to_the_maximum_drafts() -> None:
    made = prefilled()
    say_forced(made, sent(made.next_batch(0.0)), 7, ForcedTokens(0, tuple(range(60, 70))))
    assert sent(made.next_batch(0.0)).slices[0].drafts == (60, 61, 62)


@pytest.mark.parametrize("request_id", [0, 9])
def test_forced_tokens_of_unknown_or_ended_requests_are_ignored(request_id: int) -> None:
    made = prefilled()
    volume = sent(made.next_batch(0.0))
    if request_id == 0:
        made.cancel_request("d", "a", 0.0)
    say_forced(made, volume, 7, ForcedTokens(request_id, (60,)))
    assert request_id == 0 or sent(made.next_batch(0.0)).slices[0].drafts == (102, 103, 104)


def test_wrong_forced_tokens_cost_only_their_rows() -> None:
    made = prefilled()
    say_forced(made, sent(made.next_batch(0.0)), 7, ForcedTokens(0, (60, 61)))
    emissions = say(made, sent(made.next_batch(0.0)), 9)
    assert told(emissions) == [(12, 9, None)]
    assert sent(made.next_batch(0.0)).slices[0].start == 12


# --- drafts of the last stage's MTP layers --------------------------------------------------------


@pytest.mark.parametrize(
    ("percents", "drafts"), [((90, 80, 70), (60, 61, 62)), ((1,), (102, 103, 104))]
)
def test_mtp_drafts_become_the_next_drafts(
    percents: tuple[int, ...], drafts: tuple[int, ...]
) -> None:
    made = make_scheduler(profiles=(Profile(mtp_s=0.001),))
    submit(made, "a")
    batch = made.next_batch(0.0)
    assert batch is not None
    # The last stage gets the prompt's last row, so it may also draft after its first token.
    assert [each.ids for each in batch.controls if isinstance(each.body, History)] == [
        tuple(range(10))
    ]
    say(made, sent(batch), 50)
    volume = sent(made.next_batch(0.0))
    assert (volume.max_mtp_drafts, volume.min_probability) == (3, 0.0)
    choice = SampledId(0, 11, 7)
    mtp_drafts = MtpDrafts(0, (60, 61, 62), percents)
    made.on_sampled(SamplerOutput(volume.seq, (choice,), (), (), (mtp_drafts,)), {}, 0.0)
    made.validate()
    assert sent(made.next_batch(0.0)).slices[0].drafts == drafts


def test_without_an_mtp_layer_no_token_is_predicted() -> None:
    volume = sent(prefilled().next_batch(0.0))
    assert volume.max_mtp_drafts == 0


# --- the end within drafts ------------------------------------------------------------------------


def test_a_stop_token_among_drafts_ends_the_answer() -> None:
    made = make_scheduler()
    submit(made, "a", stop_token_ids=(102,))
    say(made, sent(made.next_batch(0.0)), 50)
    emissions = say(made, sent(made.next_batch(0.0)), 101, 102, 103, 7)
    assert told(emissions) == [(11, 101, None), (12, 102, "stop")]
    assert not made.live_requests


@pytest.mark.parametrize(("answer", "drafts"), [(2, 0), (3, 1), (4, 2), (5, 3), (6, 3)])
def test_drafts_do_not_exceed_max_tokens(answer: int, drafts: int) -> None:
    made = make_scheduler()
    submit(made, "a", answer=answer)
    say(made, sent(made.next_batch(0.0)), 50)
    volume = sent(made.next_batch(0.0))
    assert len(volume.slices[0].drafts) == drafts
    found = told(say(made, volume, *volume.slices[0].drafts, 7))
    assert [finish for *_, finish in found] == [*[None] * drafts, "length" if answer < 6 else None]


def test_drafts_do_not_exceed_the_credit_window() -> None:
    made = make_scheduler()
    submit(made, "a", credit_window=3)
    say(made, sent(made.next_batch(0.0)), 50)
    volume = sent(made.next_batch(0.0))
    assert volume.slices[0].drafts == (101,)
    say(made, volume, 101, 7)
    assert made.next_batch(0.0) is None
    made.grant_credit("d", "a", 13)
    assert sent(made.next_batch(0.0)).slices[0].drafts == (103, 104)


# --- blocks ---------------------------------------------------------------------------------------


def test_drafts_do_not_preempt() -> None:
    made = make_scheduler(num_blocks=10, num_speculative_tokens=15)
    submit(made, "a", answer=20)
    submit(made, "b", answer=20)
    volume = sent(made.next_batch(0.0))
    choices = tuple(SampledId(rows.request, 10, 50) for rows in volume.slices)
    made.on_sampled(SamplerOutput(volume.seq, choices), {}, 0.0)
    # The first gets the four free blocks; one draft fits into the other's last block.
    volume = sent(made.next_batch(0.0))
    assert [rows.drafts for rows in volume.slices] == [tuple(range(101, 116)), (101,)]
    made.validate()
    assert made.collect_stats()[0]["scheduler_preemptions_total"] == 0.0


def test_drafts_of_a_volume_fit_into_the_sampler_output() -> None:
    made = make_scheduler(num_blocks=512, max_num_seqs=200, max_num_batched_tokens=256)
    for index in range(100):
        submit(made, f"r{index}", 1)
    volume = sent(made.next_batch(0.0))
    made.on_sampled(
        SamplerOutput(volume.seq, tuple(SampledId(rows.request, 1, 50) for rows in volume.slices)),
        {},
        0.0,
    )
    volume = sent(made.next_batch(0.0))
    assert len(volume.slices) == 100
    assert sum(1 + len(rows.drafts) for rows in volume.slices) == MAX_SLICES
    made.validate()


def test_a_cancel_with_drafts_in_flight_frees_all_blocks() -> None:
    made = prefilled()
    volume = sent(made.next_batch(0.0))
    made.cancel_request("d", "a", 0.0)
    batch = made.next_batch(0.0)
    assert batch is not None
    (release,) = (control.body for control in batch.controls)
    assert isinstance(release, Release)
    assert release.after_seq == volume.seq
    assert say(made, volume, 101, 102, 103, 7) == []
    made.on_released(release.seq, 0.0)
    made.validate()
    assert made.collect_stats()[1]["scheduler_blocks_free"] == 64.0


@pytest.mark.parametrize("cancelled", [False, True])
def test_wrong_drafts_are_not_cached(cancelled: bool) -> None:
    made = prefilled(prefix_cache=True)
    say(made, sent(made.next_batch(0.0)), 101, 7)
    volume = sent(made.next_batch(0.0))
    if not cancelled:
        say(made, volume, 103, 8)
    made.cancel_request("d", "a", 0.0)
    batch = made.next_batch(0.0)
    assert batch is not None
    if cancelled:
        say(made, volume, 103, 8)
    made.on_released(batch.controls[0].body.seq, 0.0)
    tree = made._cache._tree
    right = [*range(10), 50, 101, 7, 103, 8]
    assert tree.match_prefix(right).num_tokens == (12 if cancelled else 14)
    # First with the first drafts, then with the later ones.
    assert tree.match_prefix([*right[:12], 102, 103]).num_tokens == 12
    assert tree.match_prefix([*right[:14], 104, 105]).num_tokens == (12 if cancelled else 14)


# --- hostile stages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choices",
    [
        [(11, 101), (12, 102), (13, 103), (14, 7), (15, 8)],
        [(11, 101), (12, 7), (13, 103)],
        [(11, 9), (12, 102)],
        [(11, 101), (13, 7)],
        [(11, 101), (11, 101)],
        [(12, 102)],
        [(12, 7), (11, 101)],
        [],
    ],
    ids=str,
)
def test_tokens_without_rows_fail_the_request(choices: list[tuple[int, int]]) -> None:
    made = prefilled(prefix_cache=True)
    volume = sent(made.next_batch(0.0))
    sampled = SamplerOutput(volume.seq, tuple(SampledId(0, at, token) for at, token in choices))
    (emission,) = made.on_sampled(sampled, {}, 0.0)
    assert isinstance(emission.message, Rejected)
    assert emission.message.reason == "failed"
    made.validate()
    batch = made.next_batch(0.0)
    assert batch is not None
    made.on_released(batch.controls[0].body.seq, 0.0)
    # Nothing is cached.
    assert made.collect_stats()[1]["scheduler_blocks_free"] == 64.0


def test_several_tokens_without_drafts_fail_the_request() -> None:
    made = prefilled(num_speculative_tokens=0)
    volume = sent(made.next_batch(0.0))
    sampled = SamplerOutput(volume.seq, (SampledId(0, 11, 7), SampledId(0, 12, 8)))
    (emission,) = made.on_sampled(sampled, {}, 0.0)
    assert isinstance(emission.message, Rejected)


# --- earlier answers ------------------------------------------------------------------------------


class Silent:
    """Proposes no drafts."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal()


@pytest.mark.parametrize(
    ("salt", "prefix_cache", "drafts"),
    [(b"", True, (61, 62)), (b"other", True, ()), (b"", False, ())],
)
def test_answers_of_the_same_cache_scope_are_drafted_in_any_epoch(
    salt: bytes, prefix_cache: bool, drafts: tuple[int, ...]
) -> None:
    config = SchedulerConfig(64, 4, 1, num_speculative_tokens=3, prefix_cache=prefix_cache)
    history = AnswerHistory()
    made = Scheduler(config, 1, create_draft_source=Silent, history=history)
    submit(made, "a", answer=3)
    for token in (60, 61, 62):
        say(made, sent(made.next_batch(0.0)), token)
    for again in (made, Scheduler(config, 2, create_draft_source=Silent, history=history)):
        submit(again, "b", cache_salt=salt)
        batch = again.next_batch(0.0)
        assert batch is not None
        say(again, batch.volumes[0].header, 60)
        (rows,) = sent(again.next_batch(0.0)).slices
        assert rows.drafts == drafts
