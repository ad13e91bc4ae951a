"""Whether models fit, and how fast they would be."""

from dataclasses import replace

import pytest

from molink.checkpoint.hub_catalog import load_catalog
from molink.sim.data_sheet_candidates import make_candidate
from molink.sim.model_description import ModelDescription
from molink.sim.model_fit import estimate_fit, needed_memory
from molink.swarm.placement.links import Links


def described(name: str) -> ModelDescription:
    entry = load_catalog().find_entry(name)
    assert entry is not None
    return ModelDescription.from_catalog(entry)


def test_a_model_fits_one_card_two_cards_or_none() -> None:
    card, other = make_candidate("a", "rtx3060"), make_candidate("b", "rtx3060")
    alone = estimate_fit(described("qwen3:8b"), [card])
    assert (alone.quantize, alone.num_stages, alone.fits) == ("none", 1, True)
    large = described("mistral-small:24b")
    assert not estimate_fit(large, [card]).fits
    together = estimate_fit(large, [card, other])
    assert (together.quantize, together.num_stages) == ("none", 2)
    refused = estimate_fit(described("llama3.3:70b"), [card, other])
    assert (refused.fits, refused.tokens_per_s) == (False, 0.0)
    assert "needs" in refused.reason


def test_weights_in_16_bits_may_need_a_mode() -> None:
    found = estimate_fit(described("qwen3:14b-bf16"), [make_candidate("a", "rtx4090")])
    assert found.quantize == "int8"
    asked = estimate_fit(described("qwen3:14b-bf16"), [make_candidate("a", "rtx4090")], None, "nf4")
    assert asked.quantize == "nf4"


def test_speed_is_what_memory_and_links_allow() -> None:
    card = make_candidate("a", "rtx3090")
    dense, mixture = described("qwen3:32b"), described("qwen3:30b-a3b")
    slow, fast = (estimate_fit(one, [card]).tokens_per_s for one in (dense, mixture))
    entry = load_catalog().find_entry("qwen3:32b")
    assert entry is not None
    assert slow == pytest.approx(card.read_rate / entry.describe_weights().nbytes, rel=0.15)
    # A row reads 8 of 128 experts.
    assert fast > 3 * slow
    halves = [replace(card, memory=card.memory * 2 // 3), make_candidate("b", "rtx3090")]
    links = Links()
    links.record_measurement("a", "b", 0.05, 1e9)
    links.record_measurement("b", "a", 0.05, 1e9)
    far = estimate_fit(dense, halves, links)
    assert far.num_stages == 2
    assert 1 / far.tokens_per_s > 1 / slow + 0.1


def test_without_a_measured_rate_there_is_no_speed() -> None:
    unmeasured = replace(make_candidate("a", "rtx3090"), read_rate=0.0)
    found = estimate_fit(described("qwen3:8b"), [unmeasured])
    assert found.fits
    assert found.tokens_per_s == 0.0


def test_needed_memory_is_more_than_the_weights() -> None:
    entry = load_catalog().find_entry("qwen3:8b")
    assert entry is not None
    weights = entry.describe_weights().nbytes
    assert weights < needed_memory(described("qwen3:8b").facts) < 1.5 * weights
