"""Stop strings across token borders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.text.stop_strings import StopStringFinder


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The cut by definition: at the match that ends first, and of several at the longest."""
    ends = [
        (index + len(stop), -len(stop), stop)
        for stop in stops
        for index in range(len(text))
        if text.startswith(stop, index)
    ]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def run(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopStringFinder(stops)
    out = "".join(matcher.push_text(chunk) for chunk in chunks)
    return out + matcher.flush_text(), matcher.matched


@settings(max_examples=400, deadline=None)
@given(
    chunks=st.lists(st.text("aab ", max_size=5), max_size=12),
    stops=st.lists(st.text("aab ", min_size=1, max_size=6), max_size=4),
)
def test_cut_is_independent_of_chunks(chunks: list[str], stops: list[str]) -> None:
    assert run(chunks, stops) == expected("".join(chunks), stops)


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.text("ab ", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_holds_back_only_what_may_begin_a_stop(chunks: list[str], stops: list[str]) -> None:
    matcher = StopStringFinder(stops)
    text = emitted = ""
    for chunk in chunks:
        text += chunk
        emitted += matcher.push_text(chunk)
        if matcher.matched is not None:
            return
        held = text[len(emitted) :]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        assert len(held) == longest


def test_stop_strings_across_token_borders() -> None:
    matcher = StopStringFinder(["\n\nUser:"])
    assert matcher.push_text("Hi\n") == "Hi"
    assert matcher.push_text("\nUs") == ""
    assert matcher.push_text("ual") == "\n\nUsual"
    assert matcher.push_text("\n\nUser: more") == ""
    assert matcher.matched == "\n\nUser:"
    assert matcher.push_text("ignored") == ""
    assert matcher.flush_text() == ""


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stops_everything_passes(stops: list[str]) -> None:
    assert StopStringFinder(stops).push_text("anything") == "anything"
