"""Stop strings across token borders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.text.stops import StopStrings


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The cut by definition: the match that ends first, of several the longest."""
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
    matcher = StopStrings(stops)
    out = "".join(matcher.push(chunk) for chunk in chunks)
    return out + matcher.flush(), matcher.matched


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
    matcher = StopStrings(stops)
    text = emitted = ""
    for chunk in chunks:
        text += chunk
        emitted += matcher.push(chunk)
        if matcher.matched is not None:
            return
        held = text[len(emitted) :]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        assert len(held) == longest


def test_across_borders() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.push("Hi\n") == "Hi"
    assert matcher.push("\nUs") == ""
    assert matcher.push("ual") == "\n\nUsual"
    assert matcher.push("\n\nUser: more") == ""
    assert matcher.matched == "\n\nUser:"
    assert matcher.push("ignored") == ""
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stops_everything_passes(stops: list[str]) -> None:
    assert StopStrings(stops).push("anything") == "anything"
