from tools.bench_drafts import Answered, counters, row

METRICS = """\
# HELP molink_head_draft_tokens_total Tokens that were guessed ahead and sent to be verified.
molink_head_draft_tokens_total{pipeline="p1"} 10
molink_head_draft_tokens_total{pipeline="p2"} 2.0
molink_head_draft_tokens_accepted_total{pipeline="p1"} 4
molink_head_guess_seconds_total 0.5
molink_head_running{pipeline="p1"} 7
"""


def test_counters_are_of_all_heads() -> None:
    assert counters(METRICS) == {
        "head_draft_tokens": 12.0,
        "head_draft_tokens_accepted": 4.0,
        "head_guess_seconds": 0.5,
    }


def test_a_row_compares_with_the_first_side() -> None:
    before = [Answered(10, 0.1, "a", {}), Answered(10, 0.2, "b", {})]
    after = [
        Answered(10, 0.05, "a", {"head_draft_tokens": 8.0, "head_draft_tokens_accepted": 6.0}),
        Answered(10, 0.05, "c", {"head_guess_seconds": 0.04}),
    ]
    expected = "| chat | auto | 50.0 | 3.00 (2.00–4.00) | 75% | 2.0 | 1 of 2 |"
    assert row("chat", "auto", after, before) == expected
    assert row("chat", "none", before, before).endswith("| 1.00 (1.00–1.00) |  |  | 2 of 2 |")
