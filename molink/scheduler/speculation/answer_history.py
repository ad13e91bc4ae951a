"""Drafts from earlier answers.

A model repeats its own phrases, and clients ask again what they have asked before. As in Oliaro et
al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", earlier answers
predict later ones where a request's own text does not.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from molink.facts.images import FIRST_IMAGE_ID
from molink.scheduler.speculation.base import DraftProposal
from molink.scheduler.speculation.occurrences import MAX_NGRAM, Occurrences, match_length

#: Tokens in each of two parts of the history; the older part is dropped when the newer is full. A
#: token takes up to 400 bytes.
_PART_TOKENS = 1 << 15
#: Tokens of an answer that are kept, so that the end of a long one delays no step.
_ANSWER_TOKENS = 1 << 12
#: Occurrences that the most frequent next token counts less, by the number of matching tokens;
#: measured on recorded answers.
_DISCOUNTS = (0.8, 0.8, 0.65, 0.45)
#: Stands between answers.
_END = -1


class AnswerHistory:
    """Answers of ended requests, each found only by requests of its cache scope.

    Like the prefix cache, it would otherwise let clients test guesses of others' answers by
    response times.
    """

    def __init__(self, part_tokens: int = _PART_TOKENS) -> None:
        self._part_tokens = part_tokens
        self._newer, self._older = _Answers(), _Answers()

    def add_answer(self, scope: bytes, tokens: Sequence[int], prompt: int) -> None:
        """Add the answer that follows the first ``prompt`` of ``tokens``."""
        if len(tokens) <= prompt:
            return
        if len(self._newer) >= self._part_tokens:
            self._newer, self._older = _Answers(), self._newer
        first = max(0, prompt - MAX_NGRAM)
        self._newer.add_tokens(scope, tokens[first : prompt + _ANSWER_TOKENS])

    def propose_drafts(self, scope: bytes, tokens: Sequence[int], count: int) -> DraftProposal:
        """Propose up to ``count`` tokens as after the longest matches.

        Where these differ, the most frequent next token is proposed, and what followed it latest.
        Its probability is its share, less an absolute discount (as in Ney et al., "On Structuring
        Probabilistic Dependences in Stochastic Language Modelling").
        """
        found = [
            (length, part.token_at(position), part, position)
            for part in (self._newer, self._older)
            for length, position in part.find_matches(scope, tokens)
        ]
        most = max((length for length, *_ in found), default=0)
        longest = [match for match in found if match[0] == most]
        if not longest:
            return DraftProposal()
        ((token, agree),) = Counter(match[1] for match in longest).most_common(1)
        _, _, part, position = next(match for match in longest if match[1] == token)
        probability = (agree - _DISCOUNTS[most - 1]) / len(longest)
        return DraftProposal(part.copy_tokens(position, count), max(1, most - 1), probability)


class _Answers:
    """Tokens of answers, one after another."""

    def __init__(self) -> None:
        self._tokens = array("q", [_END])
        self._pairs, self._singles = Occurrences(), Occurrences()
        self._pairs.add_position(None)
        self._singles.add_position(None)

    def __len__(self) -> int:
        return len(self._tokens)

    def token_at(self, position: int) -> int:
        """The token at a position, or the end of an answer."""
        return self._tokens[position]

    def copy_tokens(self, position: int, count: int) -> list[int]:
        """Up to ``count`` tokens from ``position`` to the end of the answer."""
        tokens = self._tokens[position : position + count]
        return [*takewhile(lambda token: 0 <= token < FIRST_IMAGE_ID, tokens)]

    def add_tokens(self, scope: bytes, tokens: Sequence[int]) -> None:
        """Add the tokens of an answer."""
        before = last = _END
        for token in (*tokens, _END):
            self._pairs.add_position((scope, before, last))
            self._singles.add_position((scope, last))
            self._tokens.append(token)
            before, last = last, token

    def find_matches(self, scope: bytes, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """How many tokens match the last ones, and the position after these; those of one token
        only if there are no others."""
        position = 0
        for position in self._pairs.iterate_positions((scope, *tokens[-2:])):
            yield match_length(self._tokens, position, tokens, 2, MAX_NGRAM), position
        if not position:
            for position in self._singles.iterate_positions((scope, *tokens[-1:])):
                yield 1, position
