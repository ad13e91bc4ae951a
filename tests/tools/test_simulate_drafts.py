"""Drafts of recorded texts in virtual time."""

from dataclasses import replace

from molink.facts.drafts import AUTO_DRAFTS
from molink.sim.simulate import simulate_scenario
from tools.simulate_drafts import build_scenario, format_row, load_texts, rank_candidates


def test_candidates_come_by_their_match_then_the_latest_first() -> None:
    assert rank_candidates([1, 2, 3, 9, 2, 4, 2, 5, 1, 2]) == [3, 5, 4]
    assert rank_candidates([1]) == []


def test_an_edit_is_much_faster_with_drafts_and_no_draft_is_lost_to_an_oracle() -> None:
    texts = load_texts()
    assert {kind: len(some) for kind, some in texts.items()} == {
        "code edit": 8,
        "summary with quotes": 8,
        "chat": 8,
        "translation": 8,
        "earlier chat": 96,
    }
    plain = build_scenario("rtx4090:100:30", "qwen-7b", texts["code edit"][:2], 1)
    auto = replace(plain, num_speculative_tokens=AUTO_DRAFTS)
    without, drafted = simulate_scenario(plain), simulate_scenario(auto)
    oracle = simulate_scenario(replace(auto, oracle_drafts=True, prefix_cache=False))
    assert without.drafted == 0
    assert oracle.tpots[0] <= drafted.tpots[0] < without.tpots[0] / 6
    assert oracle.drafted < drafted.drafted
    cells = list(format_row("code edit", "auto", drafted, without))
    assert float(cells[3]) > 6
