"""A history that grows token by token equals one that is built at once."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.stage.sampling.token_history import TokenHistory

TOKENS = st.lists(st.integers(-2, 40), max_size=80)
PARTS = st.lists(st.tuples(st.booleans(), TOKENS), max_size=6)


@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_any_order_of_parts(parts: list[tuple[bool, list[int]]]) -> None:
    history, prompt, generated = TokenHistory(), [], []
    for answered, tokens in parts:
        (generated if answered else prompt).extend(tokens)
        (history.add_generated if answered else history.add_prompt)(tokens)
    counts = Counter(generated)
    expected = {token: counts[token] for token in {*prompt, *generated} if token >= 0}
    assert history.token_counts == expected
    for vocabulary in (0, 20, 1000):
        ids, times = history.token_entries(vocabulary)
        assert ids.dtype == torch.int64
        assert times.dtype == torch.float32
        found = dict(zip(ids.tolist(), times.tolist(), strict=True))
        assert len(found) == len(ids)
        assert found == {token: n for token, n in expected.items() if token < vocabulary}


def test_one_token_at_a_time() -> None:
    history = TokenHistory([5, 6])
    for token in [6, 7, *range(300), 6]:
        history.add_generated([token])
    assert history.token_counts == dict.fromkeys(range(300), 1) | {6: 3, 7: 2}
