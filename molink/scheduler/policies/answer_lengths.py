"""How long answers are, as far as those that there were tell."""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from statistics import fmean

#: Answers that are remembered, the latest ones.
MAX_ANSWERS = 1024
#: Of these, those to the prompts of the most similar length tell of a new one.
MAX_SIMILAR = 64
#: Unless similarity tells at least so much of the variance of answers' logarithms: then all tell.
MIN_EXPLAINED = 0.1
#: With fewer of them nothing is known.
MIN_ANSWERS = 16


class AnswerLengths:
    """The latest answers' tokens, by the length of their prompts.

    Services have habits: prompts of one length tend to come from the same template, and that to the
    same kind of answer. Where the length tells nothing, all answers are alike, and what is left is
    how their lengths are distributed: the more answers tell of that, the better.
    """

    def __init__(self) -> None:
        #: Each as its prompt, minus how many there were before it, and itself.
        self._latest: deque[tuple[int, int, int]] = deque()
        #: The same ones, by prompt; of prompts that are equally long the latest first.
        self._sorted: list[tuple[int, int, int]] = []
        #: Their tokens, rising.
        self._answers: list[int] = []
        self._count = 0
        #: Whether prompts tell of answers.
        self._prompts_predict = False

    def add_answer(self, prompt: int, answer: int) -> None:
        """A prompt of so many tokens had an answer of so many."""
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
        """Tokens of answers to similar prompts that have more than ``tokens``, in rising order.

        If there are none, or too few are known: as many again as there are already.
        """
        answers = self._answers if len(self._sorted) >= MIN_ANSWERS else ()
        if self._prompts_predict:
            answers = sorted(answer for *_, answer in self._similar_prompts(prompt))
        longer = answers[bisect_right(answers, tokens) :]
        return _thin_answers(longer) or [2 * tokens + 1]

    def _similar_prompts(self, prompt: int) -> Sequence[tuple[int, int, int]]:
        """Those whose prompts differ least in length."""
        known, last = self._sorted, len(self._sorted)
        end = begin = bisect_left(known, (prompt,))
        while end - begin < min(MAX_SIMILAR, last):
            if end == last or (begin > 0 and prompt - known[begin - 1][0] < known[end][0] - prompt):
                begin -= 1
            else:
                end += 1
        return known[begin:end]


def _explained_variance(values: Sequence[float]) -> float:
    """The share of the variance of ``values`` that is not within :data:`MAX_SIMILAR` neighbours."""
    groups = [values[begin : begin + MAX_SIMILAR] for begin in range(0, len(values), MAX_SIMILAR)]
    whole = _sum_of_squares(values)
    return 1 - sum(map(_sum_of_squares, groups)) / whole if whole else 0.0


def _sum_of_squares(values: Sequence[float]) -> float:
    """The sum of squared differences from the mean."""
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _thin_answers(answers: Sequence[int]) -> Sequence[int]:
    """At most :data:`MAX_SIMILAR` of them, as evenly as they are."""
    step = len(answers) / MAX_SIMILAR
    return answers if step <= 1 else [answers[int((i + 0.5) * step)] for i in range(MAX_SIMILAR)]
