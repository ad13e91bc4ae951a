"""Drafts from earlier answers.

Models repeat their own phrases, and clients repeat their questions. As in Oliaro et al.,
"SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", earlier answers predict
later ones where a request's own text does not.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from molink.facts.images import FIRST_IMAGE_ID
from molink.scheduler.speculation.base import DraftProposal
from molink.scheduler.speculation.occurrences import MAX_NGRAM, Occurrences, match_length

#: Maximum number of tokens in each of the two parts of the history. When the newer part is full,
#: the older one is dropped. A token takes up to 400 bytes.
_PART_TOKENS = 1 << 15
#: Maximum number of tokens kept of an answer, so that the end of a long answer delays no step.
_ANSWER_TOKENS = 1 << 12
#: Discount on the count of the most frequent next token, by the number of matching tokens; measured
#: on recorded answers.
_DISCOUNTS = (0.8, 0.8, 0.65, 0.45)
#: Separates answers.
_END = -1


class AnswerHistory:
    """Answers of ended requests; a request finds only answers of its own cache scope.

    Without scopes, as in the prefix cache, clients could test guesses of other clients' answers by
    response times.
    """

    def __init__(self, part_tokens: int = _PART_TOKENS) -> None:
        self._part_tokens = part_tokens
        self._newer, self._older = _Answers(), _Answers()

    def add_answer(self, scope: bytes, tokens: Sequence[int], prompt: int) -> None:
        """Add the answer, which follows the first ``prompt`` tokens of ``tokens``."""
        if len(tokens) <= prompt:
            return
        if len(self._newer) >= self._part_tokens:
            self._newer, self._older = _Answers(), self._newer
        first = max(0, prompt - MAX_NGRAM)
        self._newer.add_tokens(scope, tokens[first : prompt + _ANSWER_TOKENS])

    def propose_drafts(self, scope: bytes, tokens: Sequence[int], count: int) -> DraftProposal:
        """Propose up to ``count`` tokens that followed the longest matches.

        If the next tokens of these differ, propose the most frequent one and the tokens that
        followed its latest occurrence. Its probability is its share less an absolute discount (as
        in Ney et al., "On Structuring Probabilistic Dependences in Stochastic Language Modelling").
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
    """One part of the history: tokens of answers in a single sequence."""

    def __init__(self) -> None:
        self._tokens = array("q", [_END])
        self._pairs, self._singles = Occurrences(), Occurrences()
        self._pairs.add_position(None)
        self._singles.add_position(None)

    def __len__(self) -> int:
        return len(self._tokens)

    def token_at(self, position: int) -> int:
        """Return the token at a position, or the separator."""
        return self._tokens[position]

    def copy_tokens(self, position: int, count: int) -> list[int]:
        """Return up to ``count`` tokens from ``position`` to the end of the answer."""
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
        """Yield each match with the last of ``tokens``: its length and the position after it.

        Matches of one token are yielded only if there are no longer ones.
        """
        position = 0
        for position in self._pairs.iterate_positions((scope, *tokens[-2:])):
            yield match_length(self._tokens, position, tokens, 2, MAX_NGRAM), position
        if not position:
            for position in self._singles.iterate_positions((scope, *tokens[-1:])):
                yield 1, position
