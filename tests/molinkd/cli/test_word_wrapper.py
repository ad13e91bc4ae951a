"""Lines of a streamed text are broken between words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molinkd.cli.word_wrapper import WordWrapper


def wrap(text: str, width: int, size: int = 1) -> str:
    wrapper = WordWrapper(width)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join([*map(wrapper.wrap, pieces), wrapper.flush()])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("one  two\n\n three", ["one  two", "", " three"]),
        ("a extraordinarily b", ["a", "extraordinarily", "b"]),
        ("每台电脑负责几层。好", ["每台电脑", "负责几", "层。好"]),
        ("molink 是什么？", ["molink", "是什么？"]),
        ("```py\nx = one_two_three\n```\none two three", None),
    ],
)
def test_lines_are_broken_between_words(text: str, lines: list[str] | None) -> None:
    wanted = "```py\nx = one_two_three\n```\none two\nthree" if lines is None else "\n".join(lines)
    for size in (1, 3, len(text)):
        assert wrap(text, 8, size) == wanted


def test_words_come_as_soon_as_they_end() -> None:
    wrapper = WordWrapper(80)
    assert [wrapper.wrap(piece) for piece in ("one tw", "o ", "\n")] == ["one", " two", "\n"]


@given(st.text("ab 好。`\n", max_size=60), st.integers(4, 12), st.integers(1, 9))
def test_only_spaces_are_lost(text: str, width: int, size: int) -> None:
    def condensed(one: str) -> str:
        return "".join(one.split())

    found = wrap(text, width, size)
    assert condensed(found) == condensed(text)
    assert found == wrap(text, width), "pieces make no difference"
