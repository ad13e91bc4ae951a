"""Drafts from earlier answers against a plain search."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.images import FIRST_IMAGE_ID
from molink.scheduler.speculation.answer_history import AnswerHistory
from molink.scheduler.speculation.occurrences import MAX_NGRAM

HOME, OTHER = b"home", b"other"


def history(*answers: Sequence[int], prompt: int = 0) -> AnswerHistory:
    made = AnswerHistory()
    for answer in answers:
        made.add_answer(HOME, answer, prompt)
    return made


def test_the_longest_match_is_continued_up_to_the_end_of_its_answer() -> None:
    made = history([1, 2, 3, 4, 5], [9, 3, 7, 8])
    assert made.propose_drafts(HOME, [1, 2, 3], 8).tokens == [4, 5]
    assert made.propose_drafts(HOME, [1, 2, 3], 1).tokens == [4]
    assert made.propose_drafts(HOME, [6, 9, 3], 8).tokens == [7, 8]
    assert not made.propose_drafts(HOME, [4, 5], 8).tokens
    assert not made.propose_drafts(HOME, [6], 8).tokens


def test_most_matches_decide_and_give_the_probability() -> None:
    made = history([1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 8, 9])
    found = made.propose_drafts(HOME, [0, 1, 2], 8)
    assert found.tokens == [5, 7]  # the continuation of the latest occurrence
    assert found.first_probability == pytest.approx((2 - 0.8) / 3)
    sure = history(*([1, 2, 3, 4, 5],) * 4).propose_drafts(HOME, [1, 2, 3, 4], 8)
    assert sure.tokens == [5]
    assert sure.first_probability == pytest.approx((4 - 0.45) / 4)
    assert sure.evidence == MAX_NGRAM - 1


def test_an_answer_starts_like_earlier_ones_after_the_same_prompt_end() -> None:
    made = history([10, 11, 12, 13, 1, 2], prompt=4)
    assert made.propose_drafts(HOME, [20, 12, 13], 8).tokens == [1, 2]
    # Nothing else is kept of a prompt, and nothing of a request without an answer.
    made.add_answer(HOME, [30, 31, 32, 33, 34, 35, 1], 6)
    made.add_answer(HOME, [40, 41], 2)
    assert not made.propose_drafts(HOME, [30, 31], 8).tokens
    assert not made.propose_drafts(HOME, [40], 8).tokens


def test_answers_are_found_in_their_scope_only() -> None:
    made = history([1, 2, 3])
    made.add_answer(OTHER, [1, 2, 7], 0)
    assert made.propose_drafts(HOME, [1, 2], 8).tokens == [3]
    assert made.propose_drafts(OTHER, [1, 2], 8).tokens == [7]
    assert not made.propose_drafts(b"", [1, 2], 8).tokens


def test_images_are_not_proposed() -> None:
    made = history([5, FIRST_IMAGE_ID, FIRST_IMAGE_ID, 6, 1], prompt=4)
    assert not made.propose_drafts(HOME, [5], 8).tokens
    assert made.propose_drafts(HOME, [6], 8).tokens == [1]


def test_old_answers_are_dropped() -> None:
    made = AnswerHistory(part_tokens=4)
    for first in (10, 20, 30):
        made.add_answer(HOME, [first, first + 1, first + 2, first + 3], 0)
    assert not made.propose_drafts(HOME, [10, 11], 8).tokens
    assert made.propose_drafts(HOME, [20, 21], 8).tokens == [22, 23]
    assert made.propose_drafts(HOME, [30, 31], 8).tokens == [32, 33]


@given(
    # At most 64 occurrences are compared; in these texts no token occurs more often.
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=15), max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_the_likeliest_next_token_is_that_of_a_plain_search(
    answers: list[list[int]], tokens: list[int]
) -> None:
    expected: dict[int, Counter[int]] = {}
    for answer in answers:
        for end in range(1, len(answer) + 1):
            length = 0
            while length < min(MAX_NGRAM, end, len(tokens)) and (
                answer[end - length - 1] == tokens[-length - 1]
            ):
                length += 1
            following = answer[end] if end < len(answer) else -1
            expected.setdefault(length, Counter())[following] += 1
    votes = expected.get(max(expected, default=0), Counter[int]())
    found = history(*answers).propose_drafts(HOME, tokens, 3)
    if not max(expected, default=0):
        assert not found.tokens
    else:
        likeliest = {token for token, count in votes.items() if count == max(votes.values())}
        assert (found.tokens[0] if found.tokens else -1) in likeliest
