"""Digests name the whole beginning of a prompt, and are the same everywhere."""

from hypothesis import given
from hypothesis import strategies as st

from molink.routing.spans import SPAN_TOKENS, span_digests

tokens = st.lists(st.integers(0, 5), max_size=4 * SPAN_TOKENS)


@given(tokens, tokens)
def test_two_prompts_share_the_digests_of_what_they_share(one: list[int], other: list[int]) -> None:
    mine, theirs = span_digests(one), span_digests(other)
    assert len(mine) == len(one) // SPAN_TOKENS
    for index in range(min(len(mine), len(theirs))):
        end = (index + 1) * SPAN_TOKENS
        assert (mine[index] == theirs[index]) == (one[:end] == other[:end])


@given(tokens, st.integers(0, 4))
def test_they_can_be_continued(prompt: list[int], spans: int) -> None:
    whole = span_digests(prompt)
    spans = min(spans, len(whole))
    after = whole[spans - 1].to_bytes(8, "little") if spans else bytes(8)
    assert span_digests(prompt[spans * SPAN_TOKENS :], after) == whole[spans:]


def test_they_are_the_same_on_every_pc() -> None:
    assert span_digests(range(SPAN_TOKENS)) == (DIGEST,)


#: Of the tokens 0 to 63, as any PC and any version has it.
DIGEST = 3678511507499414395
