"""Bubbles in virtual time."""

from molink.ring.bubbles import WINDOW_S, BubbleMeter


def test_only_time_with_requests_and_without_steps_counts() -> None:
    bubbles = BubbleMeter(100.0)
    bubbles.update_state(103.0, live=True, computing=False)
    assert bubbles.seconds == 0
    bubbles.update_state(104.0, live=True, computing=True)
    bubbles.update_state(106.5, live=True, computing=False)
    bubbles.update_state(107.0, live=False, computing=False)
    bubbles.update_state(109.0, live=False, computing=False)
    assert bubbles.seconds == 1.5


def test_the_share_is_that_of_the_last_window() -> None:
    bubbles = BubbleMeter(0.0)
    bubbles.update_state(0.0, live=True, computing=True)
    bubbles.update_state(3.0, live=True, computing=False)
    assert bubbles.bubble_share == 0
    bubbles.update_state(4.0, live=False, computing=False)
    bubbles.update_state(WINDOW_S, live=False, computing=False)
    assert (bubbles.bubble_share, bubbles.busy_share) == (0.25, 0.6)
    bubbles.update_state(2 * WINDOW_S, live=False, computing=False)
    assert bubbles.bubble_share == bubbles.busy_share == 0
    assert bubbles.seconds == 1.0
