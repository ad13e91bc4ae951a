"""Exact decisions of a head that sends drafts ahead: each test plays the stages by hand."""

from collections.abc import Sequence

import pytest

from molink.scheduler.batch import Batch
from molink.scheduler.head import Head
from molink.scheduler.limits import HeadLimits
from molink.scheduler.request import Emission, HeadRequest
from molink.scheduler.speculation.base import Foretold
from molink.wire.messages.data import Choice, Release, Rows, Sampled, Sampling, Volume
from molink.wire.messages.serving import Rejected, Token


class Says:
    """Drafts 101, 102, 103, … by position, from 11 on, whatever comes before."""

    def draft(self, tokens: Sequence[int], count: int) -> Foretold:
        return Foretold([90 + at for at in range(len(tokens), len(tokens) + count)])


def decoding(**changes: int | bool) -> Head:
    """One request of 10 tokens and one more, 50; passes of 3 drafts, of which two go ahead."""
    given = {"blocks": 64, "block_size": 4, "micro_batches": 1, "chunk_tokens": 64}
    given |= {"draft_tokens": 3, "ahead": 2, "prefix_cache": False}
    made = Head(HeadLimits(**{**given, **changes}), 1, source=Says)
    submit(made, "a")
    say(made, sent(made.next(0.0)), 50)
    return made


def submit(to: Head, key: str, **changes: object) -> None:
    fields = {"prompt_tokens": 10, "sampling": Sampling(), "max_tokens": 100, **changes}
    to.submit(HeadRequest("d", key, tuple(range(10)), **fields), 0.0)


def sent(batch: Batch | None) -> Volume:
    assert batch is not None
    (volume,) = batch.volumes
    assert len(volume.tokens) == volume.header.count
    return volume.header


def flying(made: Head) -> list[Volume]:
    """A pass of drafts and two that go ahead."""
    volumes = [sent(made.next(0.0)) for _ in range(3)]
    made.validate()
    return volumes


def say(to: Head, volume: Volume, *tokens: int) -> list[Emission]:
    """The volume comes back, its only group sampled with ``tokens``."""
    (rows,) = volume.rows
    first = rows.start + rows.count - len(rows.checked)
    choices = [Choice(rows.request, at, token) for at, token in enumerate(tokens, first)]
    emissions = to.sampled(Sampled(volume.tick, tuple(choices)), {}, 0.0)
    to.validate()
    return emissions


def told(emissions: Sequence[Emission]) -> list[tuple[int, int]]:
    messages = [emission.message for emission in emissions]
    return [(each.position, each.token) for each in messages if isinstance(each, Token)]


def test_drafts_go_ahead_while_those_before_them_are_under_way() -> None:
    made = decoding()
    first, second, third = flying(made)
    assert first.rows == (Rows(0, 10, 4, 2, (3,), True, drafts=(101, 102, 103)),)
    assert second.rows == (Rows(0, 14, 3, first.tick, (4,), True, drafts=(104, 105, 106)),)
    assert third.rows == (Rows(0, 17, 3, second.tick, (), True, drafts=(107, 108, 109)),)
    assert made.next(0.0) is None, "no more may be in flight"


def test_as_long_as_they_are_right_each_pass_brings_its_tokens() -> None:
    made = decoding()
    first, second, third = flying(made)
    assert told(say(made, first, 101, 102, 103, 104)) == [(at, 90 + at) for at in range(11, 15)]
    assert made.next(0.0) is None
    assert told(say(made, second, 105, 106, 107)) == [(at, 90 + at) for at in range(15, 18)]
    assert sent(made.next(0.0)).rows[0].drafts == (110, 111, 112)
    assert told(say(made, third, 108, 109, 7)) == [(18, 108), (19, 109), (20, 7)]
    # The path is left: a pass begins with what is known.
    (rows,) = sent(made.next(0.0)).rows
    assert (rows.start, rows.drafts) == (20, (111, 112, 113))
    assert made.stats()[0]["head_draft_tokens_accepted_total"] == 9.0


@pytest.mark.parametrize(
    ("tokens", "start"), [((7,), 11), ((101, 102, 103, 7), 14)], ids=["within", "after"]
)
def test_after_a_wrong_draft_what_went_ahead_brings_nothing(
    tokens: tuple[int, ...], start: int
) -> None:
    made = decoding()
    first, second, third = flying(made)
    say(made, first, *tokens)
    volume = sent(made.next(0.0))
    (rows,) = volume.rows
    assert (rows.start, rows.after, rows.is_ahead) == (start, third.tick, False)
    assert say(made, second) == say(made, third) == []
    assert told(say(made, volume, 8)) == [(start + 1, 8)]


@pytest.mark.parametrize("tokens", [(105,), (105, 106, 107, 108)], ids=str)
def test_tokens_of_rows_on_a_wrong_path_fail_their_request(tokens: tuple[int, ...]) -> None:
    made = decoding()
    first, second, _ = flying(made)
    say(made, first, 7)
    (emission,) = say(made, second, *tokens)
    assert isinstance(emission.message, Rejected)


@pytest.mark.parametrize("tokens", [(), (105, 9, 8), (105, 106, 107, 108)], ids=str)
def test_other_tokens_than_rows_ahead_have_fail_their_request(tokens: tuple[int, ...]) -> None:
    made = decoding()
    first, second, _ = flying(made)
    say(made, first, 101, 102, 103, 104)
    (emission,) = say(made, second, *tokens)
    assert isinstance(emission.message, Rejected)


def test_where_a_right_row_could_not_be_sampled_the_path_is_left() -> None:
    made = decoding()
    first, second, third = flying(made)
    assert told(say(made, first, 101, 102)) == [(11, 101), (12, 102)]
    (rows,) = sent(made.next(0.0)).rows
    assert (rows.start, rows.is_ahead) == (12, False)
    assert say(made, second) == say(made, third) == []


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_cancel_gives_all_blocks_back(when: str) -> None:
    made = decoding(prefix_cache=True)
    first, second, third = flying(made)
    back = [first, second, third]
    if when == "later":
        say(made, back.pop(0), 101, 102, 103, 104)
    made.cancel("d", "a", 0.0)
    batch = made.next(0.0)
    assert batch is not None
    (release,) = (control.body for control in batch.control)
    assert isinstance(release, Release)
    assert (release.after, *release.also) == (third.tick, *(each.tick for each in back[:-1]))
    for volume in back:
        assert say(made, volume, 9) == []
    made.released(release.tick, 0.0)
    made.validate()
    assert made.stats()[1]["head_blocks_used"] == 0.0
    tree = made._cache._tree
    right = [*range(10), 50, *range(101, 110)]
    assert tree.match(right).tokens == (10 if when == "at once" else 14)


def test_who_has_rows_on_a_wrong_path_in_flight_is_not_preempted() -> None:
    made = decoding(ahead=1)
    first, second = sent(made.next(0.0)), sent(made.next(0.0))
    say(made, first, 7)
    job = made._roster.find("d", "a")
    assert job is not None
    assert list(made._roster._at_rest()) == []
    say(made, second)
    assert list(made._roster._at_rest()) == [job]


def test_nothing_goes_ahead_beside_prompts_or_decode_rows() -> None:
    made = decoding(micro_batches=2)
    first = sent(made.next(0.0))
    submit(made, "b", max_tokens=50)
    prompt = sent(made.next(0.0))
    assert prompt.prefill
    assert made.next(0.0) is None
    say(made, prompt, 60)
    say(made, first, 7)
    # Both decode, one in each volume; only then does something go ahead.
    volumes = [sent(made.next(0.0)) for _ in range(4)]
    assert [volume.rows[0].is_ahead for volume in volumes] == [False, False, True, True]
    assert [len(volume.rows) for volume in volumes] == [1, 1, 1, 1]
