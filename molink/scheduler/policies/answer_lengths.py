"""Estimates answer lengths from recent answers."""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from statistics import fmean

#: Number of recent answers kept.
MAX_ANSWERS = 1024
#: Number of answers, to prompts of the most similar length, that an estimate uses.
MAX_SIMILAR = 64
#: Share of the variance of log lengths that prompts must explain; otherwise all answers are used.
MIN_EXPLAINED = 0.1
#: Minimum answers for an estimate.
MIN_ANSWERS = 16


class AnswerLengths:
    """Lengths of recent answers, in tokens, by the length of their prompts.

    Prompts of equal length often share a template, and so the kind of answer. If prompt lengths
    explain nothing, all answers form one distribution.
    """

    def __init__(self) -> None:
        #: Prompt length, negative arrival number and answer length, in order of arrival.
        self._latest: deque[tuple[int, int, int]] = deque()
        #: The same, sorted; among equal prompts the latest comes first.
        self._sorted: list[tuple[int, int, int]] = []
        #: Answer lengths, sorted.
        self._answers: list[int] = []
        self._count = 0
        #: Whether prompt lengths explain answer lengths.
        self._prompts_predict = False

    def add_answer(self, prompt: int, answer: int) -> None:
        """Record an answer."""
        if len(self._latest) == MAX_ANSWERS:
            oldest = self._latest.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
            del self._answers[bisect_left(self._answers, oldest[2])]
        known = prompt, -self._count, answer
        self._count += 1
        self._latest.append(known)
        insort(self._sorted, known)
        insort(self._answers, answer)
        if self._count % MAX_SIMILAR == 0:
            self._prompts_predict = (
                _explained_variance([math.log(answer) for *_, answer in self._sorted])
                >= MIN_EXPLAINED
            )

    def longer_answers(self, tokens: int, prompt: int) -> Sequence[int]:
        """Return recent lengths above ``tokens`` of similar prompts' answers, ascending.

        If there are none, or too few answers are known, the answer is assumed to be half done.
        """
        answers = self._answers if len(self._sorted) >= MIN_ANSWERS else ()
        if self._prompts_predict:
            answers = sorted(answer for *_, answer in self._similar_prompts(prompt))
        longer = answers[bisect_right(answers, tokens) :]
        return _thin_answers(longer) or [2 * tokens + 1]

    def _similar_prompts(self, prompt: int) -> Sequence[tuple[int, int, int]]:
        """Return the answers to the prompts of the most similar length."""
        known, last = self._sorted, len(self._sorted)
        end = begin = bisect_left(known, (prompt,))
        while end - begin < min(MAX_SIMILAR, last):
            if end == last or (begin > 0 and prompt - known[begin - 1][0] < known[end][0] - prompt):
                begin -= 1
            else:
                end += 1
        return known[begin:end]


def _explained_variance(values: Sequence[float]) -> float:
    """Return the share of variance between groups of :data:`MAX_SIMILAR` neighbours."""
    groups = [values[begin : begin + MAX_SIMILAR] for begin in range(0, len(values), MAX_SIMILAR)]
    whole = _sum_of_squares(values)
    return 1 - sum(map(_sum_of_squares, groups)) / whole if whole else 0.0


def _sum_of_squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _thin_answers(answers: Sequence[int]) -> Sequence[int]:
    """Return at most :data:`MAX_SIMILAR` of the answers, evenly spaced."""
    step = len(answers) / MAX_SIMILAR
    return answers if step <= 1 else [answers[int((i + 0.5) * step)] for i in range(MAX_SIMILAR)]
