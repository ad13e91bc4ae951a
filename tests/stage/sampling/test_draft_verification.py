"""Which drafts are accepted, and how each row is sampled."""

from molink.stage.sampling.draft_verification import accept_tokens, sample_rows
from molink.stage.sampling.sampler import SampledToken
from molink.stage.sampling.token_history import TokenHistory
from molink.wire.messages.data_plane import SamplingParams


def tokens(*ids: int | None) -> list[SampledToken | None]:
    return [None if token is None else SampledToken(token) for token in ids]


def test_tokens_are_good_up_to_the_first_that_is_no_draft() -> None:
    assert accept_tokens(tokens(1, 2, 3), (1, 2)) == tokens(1, 2, 3)
    assert accept_tokens(tokens(1, 9, 3), (1, 2)) == tokens(1, 9)
    assert accept_tokens(tokens(9, 2, 3), (1, 2)) == tokens(9)
    assert accept_tokens(tokens(5), ()) == tokens(5)


def test_nothing_follows_what_is_unusable() -> None:
    assert accept_tokens(tokens(None, 2, 3), (1, 2)) == []
    assert accept_tokens(tokens(1, None, 3), (1, 2)) == tokens(1)
    assert accept_tokens(tokens(1, 2, None), (1, 2)) == tokens(1, 2)
    assert accept_tokens(tokens(None), ()) == []


def test_each_row_has_its_position_and_what_comes_before_it() -> None:
    penalty = SamplingParams(presence_penalty=0.5)
    history = TokenHistory([1, 2], [3])
    rows = sample_rows(6, (3, 9), penalty, history)
    assert [row.position for row in rows] == [6, 7, 8]
    counts = [row.history.token_counts for row in rows if row.history is not None]
    assert counts == [{1: 0, 2: 0, 3: 1}, {1: 0, 2: 0, 3: 2}, {1: 0, 2: 0, 3: 2, 9: 1}]
    assert history.token_counts == {1: 0, 2: 0, 3: 1}
