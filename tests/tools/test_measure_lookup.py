"""Prompt lookup played through on tokens that are known."""

from tools.measure_lookup import Answer, Tally, play
from tools.simulate_drafts import until_loop


def test_an_answer_that_copies_its_prompt() -> None:
    answer = Answer("copy", [10, 11, 12, 13, 14, 15, 16], [10, 11, 12, 13, 14, 15, 16], ended=False)
    # 10 comes with the prompt; 11 alone; then 12, 13 and 14; then 15 and 16.
    assert play(answer, 2, 4, 2) == Tally(6, 3, 2, 4, 4)
    assert play(answer, 8, 4, 2) == Tally(6, 2, 1, 5, 5)


def test_an_answer_that_only_seems_to() -> None:
    answer = Answer("not", [1, 2, 3, 4], [1, 2, 9, 9], ended=False)
    assert play(answer, 2, 4, 2) == Tally(3, 3, 1, 2, 0)


def test_loops_are_cut_off() -> None:
    beginning = list(range(20))
    assert until_loop(beginning) == beginning
    assert until_loop([*beginning, *beginning[3:12]]) == beginning
