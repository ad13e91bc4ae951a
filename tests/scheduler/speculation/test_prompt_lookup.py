"""Prompt lookup against a plain search."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from molink.scheduler.speculation.prompt_lookup import PromptLookup


def searched(tokens: Sequence[int], k: int, longest: int) -> tuple[Sequence[int], int]:
    """The tokens after the latest earlier occurrence of as many last tokens as possible."""
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        last = tokens[-length:]
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at : at + length] == last:
                return tokens[at + length : at + length + k], length
    return (), 1


def test_the_latest_longest_match_is_continued() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 7, 2, 3]
    assert PromptLookup().propose_drafts(tokens, 2)[:2] == ([5, 7], 2)
    assert PromptLookup().propose_drafts([*tokens, 4], 2)[:2] == ([9, 2], 3)
    assert PromptLookup().propose_drafts([*tokens, 9], 2)[:2] == ([2, 3], 1)
    assert not PromptLookup().propose_drafts([1, 2, 3], 2).tokens
    assert not PromptLookup().propose_drafts([1], 2).tokens


@given(
    # At most 64 occurrences are compared; in these texts no n-gram occurs more often.
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_drafts_always_continue_a_match(
    tokens: list[int], begin: int, k: int, longest: int
) -> None:
    lookup = PromptLookup(longest)
    for end in range(min(begin, len(tokens)), len(tokens) + 1):
        text = tokens[:end]
        assert lookup.propose_drafts(text, k)[:2] == searched(text, k, longest)


def test_long_prompts_are_indexed_incrementally() -> None:
    lookup, prompt = PromptLookup(), list(range(5000))
    text = [*prompt, 3000, 3001]
    assert not lookup.propose_drafts(text, 2).tokens
    assert lookup.propose_drafts(text, 2).tokens == [3002, 3003]
