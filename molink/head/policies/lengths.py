"""How long answers are, as far as those that there were tell."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

#: Answers that are remembered, the latest ones.
REMEMBERED = 1024
#: Of these, those to the prompts of the most similar length tell of a new one.
SIMILAR = 64
#: With fewer of them nothing is known.
LEAST = 16


class AnswerLengths:
    """The latest answers' tokens, by the length of their prompts.

    Services have habits: prompts of one length tend to come from the same template, and that to the
    same kind of answer. Where the length tells nothing, all answers are alike, and what is left is
    how their lengths are distributed.
    """

    def __init__(self) -> None:
        #: Each as its prompt, minus how many there were before it, and itself.
        self._latest: deque[tuple[int, int, int]] = deque()
        #: The same ones, by prompt; of prompts that are equally long the latest first.
        self._sorted: list[tuple[int, int, int]] = []
        self._count = 0

    def add(self, prompt: int, answer: int) -> None:
        """A prompt of so many tokens had an answer of so many."""
        if len(self._latest) == REMEMBERED:
            oldest = self._latest.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        known = prompt, -self._count, answer
        self._count += 1
        self._latest.append(known)
        insort(self._sorted, known)

    def beyond(self, tokens: int, prompt: int) -> Sequence[int]:
        """Tokens of answers to similar prompts that have more than ``tokens``, in rising order.

        If there are none, or too few are known: as many again as there are already.
        """
        similar = self._similar(prompt) if len(self._sorted) >= LEAST else ()
        return sorted(answer for *_, answer in similar if answer > tokens) or [2 * tokens + 1]

    def _similar(self, prompt: int) -> Sequence[tuple[int, int, int]]:
        """Those whose prompts differ least in length."""
        known, last = self._sorted, len(self._sorted)
        end = begin = bisect_left(known, (prompt,))
        while end - begin < min(SIMILAR, last):
            if end == last or (begin > 0 and prompt - known[begin - 1][0] < known[end][0] - prompt):
                begin -= 1
            else:
                end += 1
        return known[begin:end]
