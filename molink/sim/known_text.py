"""Prompts and answers that are known in advance, so that drafts can be judged."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.bench.workload import HASH_BLOCK_TOKENS, PlannedRequest
from molink.scheduler.speculation.base import DraftProposal
from molink.scheduler.speculation.prompt_lookup import PromptLookup

#: The token that ends answers without content; their other tokens are 0.
END_TOKEN = 1


@dataclass(frozen=True, slots=True)
class KnownText:
    """Tokens of a prompt and its answer.

    ``forced_runs`` has, for each answer token, the number of tokens that a grammar forces from that
    token on; it is empty without a grammar. ``model_drafts`` has, for each answer token, the draft
    model's tokens from that token on, with their probabilities.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    forced_runs: tuple[int, ...] = ()
    model_drafts: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()

    def has_prefix(self, tokens: Sequence[int]) -> bool:
        """Whether prompt and answer begin with ``tokens``."""
        prompt = len(self.prompt)
        known = tuple(tokens)
        return known[:prompt] == self.prompt[: len(known)] and (
            known[prompt:] == self.answer[: max(0, len(known) - prompt)]
        )

    def model_drafts_at(self, position: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the draft model's tokens and probabilities from ``position`` on."""
        at = position - len(self.prompt)
        return self.model_drafts[at] if 0 <= at < len(self.model_drafts) else ((), ())

    def token_at(self, position: int) -> int:
        """Return the token at ``position`` of prompt and answer; 0 after the end."""
        at = position - len(self.prompt)
        if at < 0:
            return self.prompt[position]
        return self.answer[at] if at < len(self.answer) else 0

    def forced_at(self, position: int) -> tuple[int, ...]:
        """Return the tokens that a grammar forces from ``position`` on."""
        at = position - len(self.prompt)
        return (
            self.answer[at : at + self.forced_runs[at]] if 0 <= at < len(self.forced_runs) else ()
        )


class OracleLookup:
    """Prompt lookup that stops before the first wrong draft, as an upper bound."""

    def __init__(self, texts: Sequence[KnownText]) -> None:
        self._lookup = PromptLookup()
        self._texts = texts

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Propose the prompt lookup's drafts up to the first wrong one."""
        drafts, evidence, _ = self._lookup.propose_drafts(tokens, count)
        known = tuple(tokens)
        for text in self._texts:
            whole = text.prompt + text.answer
            if whole[: len(known)] == known:
                pairs = enumerate(zip(drafts, whole[len(known) :], strict=False), 1)
                end = next((at for at, (draft, right) in pairs if draft != right), len(drafts))
                return DraftProposal(drafts[:end], evidence)
        return DraftProposal(drafts, evidence)


def tokens_of(planned: PlannedRequest, count: int) -> tuple[int, ...]:
    """Return the first ``count`` tokens of a request without content.

    All tokens of a hashed block are its hash id plus 1; other tokens are 0.
    """
    tokens: list[int] = []
    for part in planned.hash_ids:
        tokens += [part + 1] * min(HASH_BLOCK_TOKENS, planned.input_tokens - len(tokens))
    return tuple(tokens[:count]) + (0,) * (count - len(tokens))


def token_of(last: int, position: int) -> int:
    """Return the token at ``position`` of an answer without content that ends at ``last``."""
    return END_TOKEN if position == last else 0
