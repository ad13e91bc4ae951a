"""What is asked and answered, where that matters: real tokens for drafts to be right or wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.bench.planned import PlannedRequest
from molink.bench.trace import PART_TOKENS, TraceRow
from molink.scheduler.speculation.base import Foretold
from molink.scheduler.speculation.lookup import PromptLookup

#: The token that ends an answer without content; its others are 0.
END = 1


@dataclass(frozen=True, slots=True)
class KnownText:
    """Tokens of a prompt and of its answer.

    ``runs`` has, for each token of the answer, how many from it on a grammar forces; ``()``: it is
    held to none. ``guesses`` has, for each, what a draft model guesses from it on, and the chances
    of that.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    runs: tuple[int, ...] = ()
    guesses: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()

    def begins_with(self, tokens: Sequence[int]) -> bool:
        """Whether these are its first ones."""
        prompt = len(self.prompt)
        known = tuple(tokens)
        return known[:prompt] == self.prompt[: len(known)] and (
            known[prompt:] == self.answer[: max(0, len(known) - prompt)]
        )

    def guessed(self, position: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What a draft model guesses from a position on."""
        at = position - len(self.prompt)
        return self.guesses[at] if 0 <= at < len(self.guesses) else ((), ())

    def token(self, position: int) -> int:
        """The one at a position of both; what comes after them is 0."""
        at = position - len(self.prompt)
        if at < 0:
            return self.prompt[position]
        return self.answer[at] if at < len(self.answer) else 0

    def forced(self, position: int) -> tuple[int, ...]:
        """Those that a grammar forces from a position on."""
        at = position - len(self.prompt)
        return self.answer[at : at + self.runs[at]] if 0 <= at < len(self.runs) else ()


class Foresight:
    """Prompt lookup that stops with the first wrong draft: as if all beyond it were cancelled."""

    def __init__(self, texts: Sequence[KnownText]) -> None:
        self._lookup = PromptLookup()
        self._texts = texts

    def draft(self, tokens: Sequence[int], count: int) -> Foretold:
        """As :class:`molink.scheduler.speculation.base.DraftSource` says."""
        drafts, evidence = self._lookup.draft(tokens, count)
        known = tuple(tokens)
        for text in self._texts:
            whole = text.prompt + text.answer
            if whole[: len(known)] == known:
                pairs = enumerate(zip(drafts, whole[len(known) :], strict=False), 1)
                end = next((at for at, (draft, right) in pairs if draft != right), len(drafts))
                return Foretold(drafts[:end], evidence)
        return Foretold(drafts, evidence)


def tokens_of(planned: PlannedRequest, count: int) -> tuple[int, ...]:
    """The first ``count`` tokens of prompt and answer where only it is known what prompts share.

    A part of the prompt is its id, over and over; what comes after the parts is 0.
    """
    tokens: list[int] = []
    for part in planned.parts:
        tokens += [part + 1] * min(PART_TOKENS, planned.input_tokens - len(tokens))
    return tuple(tokens[:count]) + (0,) * (count - len(tokens))


def token_of(last: int, position: int) -> int:
    """The token at ``position`` of an answer without content that ends at ``last``."""
    return END if position == last else 0


def rows_of(texts: Sequence[KnownText]) -> tuple[TraceRow, ...]:
    """Requests of these sizes in this order, a second apart, for a workload."""
    return tuple(
        TraceRow(float(index), len(text.prompt), len(text.answer))
        for index, text in enumerate(texts)
    )
