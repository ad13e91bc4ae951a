"""What is asked and answered, where that matters: real tokens for drafts to be right or wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.bench.planned_requests import PlannedRequest
from molink.bench.trace import HASH_BLOCK_TOKENS, TraceRow
from molink.scheduler.speculation.base import DraftProposal
from molink.scheduler.speculation.prompt_lookup import PromptLookup

#: The token that ends an answer without content; its others are 0.
END_TOKEN = 1


@dataclass(frozen=True, slots=True)
class KnownText:
    """Tokens of a prompt and of its answer.

    ``forced_runs`` has, for each token of the answer, how many from it on a grammar forces; ``()``:
    it is held to none. ``model_drafts`` has, for each, what a draft model guesses from it on, and
    the chances of that.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    forced_runs: tuple[int, ...] = ()
    model_drafts: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()

    def has_prefix(self, tokens: Sequence[int]) -> bool:
        """Whether these are its first ones."""
        prompt = len(self.prompt)
        known = tuple(tokens)
        return known[:prompt] == self.prompt[: len(known)] and (
            known[prompt:] == self.answer[: max(0, len(known) - prompt)]
        )

    def model_drafts_at(self, position: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What a draft model guesses from a position on."""
        at = position - len(self.prompt)
        return self.model_drafts[at] if 0 <= at < len(self.model_drafts) else ((), ())

    def token_at(self, position: int) -> int:
        """The one at a position of both; what comes after them is 0."""
        at = position - len(self.prompt)
        if at < 0:
            return self.prompt[position]
        return self.answer[at] if at < len(self.answer) else 0

    def forced_at(self, position: int) -> tuple[int, ...]:
        """Those that a grammar forces from a position on."""
        at = position - len(self.prompt)
        return (
            self.answer[at : at + self.forced_runs[at]] if 0 <= at < len(self.forced_runs) else ()
        )


class OracleLookup:
    """Prompt lookup that stops with the first wrong draft: as if all beyond it were cancelled."""

    def __init__(self, texts: Sequence[KnownText]) -> None:
        self._lookup = PromptLookup()
        self._texts = texts

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """As :class:`molink.scheduler.speculation.base.DraftSource` says."""
        drafts, evidence = self._lookup.propose_drafts(tokens, count)
        known = tuple(tokens)
        for text in self._texts:
            whole = text.prompt + text.answer
            if whole[: len(known)] == known:
                pairs = enumerate(zip(drafts, whole[len(known) :], strict=False), 1)
                end = next((at for at, (draft, right) in pairs if draft != right), len(drafts))
                return DraftProposal(drafts[:end], evidence)
        return DraftProposal(drafts, evidence)


def tokens_of(planned: PlannedRequest, count: int) -> tuple[int, ...]:
    """The first ``count`` tokens of prompt and answer where only it is known what prompts share.

    A part of the prompt is its id, over and over; what comes after the parts is 0.
    """
    tokens: list[int] = []
    for part in planned.hash_ids:
        tokens += [part + 1] * min(HASH_BLOCK_TOKENS, planned.input_tokens - len(tokens))
    return tuple(tokens[:count]) + (0,) * (count - len(tokens))


def token_of(last: int, position: int) -> int:
    """The token at ``position`` of an answer without content that ends at ``last``."""
    return END_TOKEN if position == last else 0


def rows_of(texts: Sequence[KnownText]) -> tuple[TraceRow, ...]:
    """Requests of these sizes in this order, a second apart, for a workload."""
    return tuple(
        TraceRow(float(index), len(text.prompt), len(text.answer))
        for index, text in enumerate(texts)
    )
