"""Estimates of answer lengths."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.scheduler.policies.answer_lengths import (
    MAX_ANSWERS,
    MAX_SIMILAR,
    MIN_ANSWERS,
    AnswerLengths,
)


def test_few_answers_give_no_estimate() -> None:
    lengths = AnswerLengths()
    for _ in range(MIN_ANSWERS - 1):
        lengths.add_answer(100, 7)
    assert lengths.longer_answers(0, 100) == [1]
    assert lengths.longer_answers(20, 100) == [41]
    lengths.add_answer(100, 9)
    assert lengths.longer_answers(0, 100) == [7] * (MIN_ANSWERS - 1) + [9]
    assert lengths.longer_answers(7, 100) == [9]
    assert lengths.longer_answers(9, 100) == [19]


def test_estimates_depend_on_the_prompt_length() -> None:
    lengths = AnswerLengths()
    for index in range(MAX_SIMILAR):
        lengths.add_answer(1000 + index, 400)
        lengths.add_answer(10 + index, 5)
    assert set(lengths.longer_answers(0, 20)) == {5}
    assert set(lengths.longer_answers(0, 2000)) == {400}
    assert set(lengths.longer_answers(0, 500)) == {5}
    assert set(lengths.longer_answers(0, 600)) == {400}


def test_equal_prompts_use_the_latest_answers() -> None:
    lengths = AnswerLengths()
    for answer in (*range(2000, 1000, -1), *range(1, 3 * MAX_SIMILAR)):
        lengths.add_answer(100, answer)
    assert lengths.longer_answers(0, 100) == list(range(2 * MAX_SIMILAR, 3 * MAX_SIMILAR))


@given(st.integers(0, 1 << 16), st.sampled_from([0, 2040, 1 << 20]))
def test_predictive_prompts_use_similar_answers(seed: int, tokens: int) -> None:
    rng, lengths, known = random.Random(seed), AnswerLengths(), list[tuple[int, int]]()
    for _ in range(MAX_ANSWERS + 200):
        prompt = rng.randrange(1, 40)
        known.append((prompt, 100 * prompt + rng.randrange(1, 99)))
        lengths.add_answer(*known[-1])
    prompt = rng.randrange(1, 40)
    found = lengths.longer_answers(tokens, prompt)
    latest = sorted(known[-MAX_ANSWERS:], key=lambda each: abs(each[0] - prompt))
    farthest = abs(latest[MAX_SIMILAR - 1][0] - prompt)
    may_be = Counter(answer for each, answer in latest if abs(each - prompt) <= farthest)
    if all(answer <= tokens for answer in may_be):
        assert found == [2 * tokens + 1]
        return
    must_be = Counter(answer for each, answer in latest if abs(each - prompt) < farthest)
    assert len(found) <= MAX_SIMILAR
    assert Counter(found) <= may_be
    assert Counter({n: k for n, k in must_be.items() if n > tokens}) <= Counter(found)
    assert list(found) == sorted(found)


@given(st.integers(0, 1 << 16), st.sampled_from([0, 40, 98, 99]))
def test_unpredictive_prompts_use_all_answers(seed: int, tokens: int) -> None:
    """The estimate is a sample of all longer recent answers."""
    rng, lengths, known = random.Random(seed), AnswerLengths(), list[int]()
    for _ in range(MAX_ANSWERS + 200):
        known.append(rng.randrange(1, 100))
        lengths.add_answer(rng.randrange(1, 4000), known[-1])
    found = lengths.longer_answers(tokens, rng.randrange(1, 4000))
    longer = [answer for answer in known[-MAX_ANSWERS:] if answer > tokens]
    if not longer:
        assert found == [2 * tokens + 1]
        return
    assert len(found) == min(len(longer), MAX_SIMILAR)
    for answer in range(tokens, 100):
        share = sum(1 for each in longer if each <= answer) / len(longer)
        assert (
            abs(sum(1 for each in found if each <= answer) / len(found) - share) <= 1 / MAX_SIMILAR
        )


@pytest.mark.parametrize(("told", "similar"), [(0.03, False), (0.3, True)])
def test_threshold_of_explained_variance(told: float, similar: bool) -> None:
    """Prompts of two lengths explain the part ``told`` of the variance of log answer lengths."""
    rng, lengths = random.Random(1), AnswerLengths()
    for index in range(MAX_ANSWERS):
        long = index % 2
        mean = 4 + (2 * long - 1) * math.sqrt(told / (1 - told))
        lengths.add_answer(10 + 1000 * long, round(math.exp(rng.gauss(mean, 1.0))))
    short, long = (list(lengths.longer_answers(0, prompt)) for prompt in (10, 1010))
    assert (short != long) == similar
