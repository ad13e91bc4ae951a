"""Layer ranges as people read and type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.layer_range import format_layers, format_ranges, parse_layers

_FIRST, _COUNT = st.integers(0, 5000), st.integers(1, 5000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1-22", (0, 22)), ("5", (4, 5)), ("3-3", (2, 3)), ("1–4", (0, 4))]
    + [(text, None) for text in ("auto", "none", "", "0-4", "0", "4-2", "0:4", "-4", "4-", "a-b")],
)
def test_parse_layers(text: str, expected: tuple[int, int] | None) -> None:
    assert parse_layers(text) == expected


@given(_FIRST, _COUNT)
def test_what_people_read_can_be_typed(first: int, count: int) -> None:
    assert parse_layers(format_layers((first, first + count))) == (first, first + count)


def test_format_ranges() -> None:
    assert format_ranges([(2, 4), (7, 8)]) == "3-4, 8"
