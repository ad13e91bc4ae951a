"""Bubbles in virtual time."""

from molink.ring.bubbles import WINDOW_S, Bubbles


def test_only_time_with_requests_and_without_steps_counts() -> None:
    bubbles = Bubbles(100.0)
    bubbles.note(103.0, live=True, computing=False)
    assert bubbles.seconds == 0
    bubbles.note(104.0, live=True, computing=True)
    bubbles.note(106.5, live=True, computing=False)
    bubbles.note(107.0, live=False, computing=False)
    bubbles.note(109.0, live=False, computing=False)
    assert bubbles.seconds == 1.5


def test_the_share_is_that_of_the_last_window() -> None:
    bubbles = Bubbles(0.0)
    bubbles.note(0.0, live=True, computing=True)
    bubbles.note(3.0, live=True, computing=False)
    assert bubbles.share == 0
    bubbles.note(4.0, live=False, computing=False)
    bubbles.note(WINDOW_S, live=False, computing=False)
    assert (bubbles.share, bubbles.busy) == (0.25, 0.6)
    bubbles.note(2 * WINDOW_S, live=False, computing=False)
    assert bubbles.share == bubbles.busy == 0
    assert bubbles.seconds == 1.0
