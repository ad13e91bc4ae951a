"""Rows attend to the positions that they choose."""

import math

import pytest
import torch

from molink.errors import UsageError
from molink.stage.attention import token_choice
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.create import create_attention
from molink.stage.attention.gather import GatherAttention, PlainAttention
from molink.stage.attention.token_choice import TokenChoice

ROWS, POSITIONS, TOP_K = 6, 9, 4


def make_choice(generator: torch.Generator) -> TokenChoice:
    queries = torch.randn(ROWS + 2, 3, 5, generator=generator)
    weights = torch.randn(ROWS + 2, 3, generator=generator)
    return TokenChoice(queries, weights, slice(2, 7), TOP_K)


@pytest.mark.parametrize("shared", [False, True])
def test_the_best_of_what_is_seen_is_chosen(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr(token_choice, "_MAX_SCORES", 2 * 3 * POSITIONS)
    generator = torch.Generator().manual_seed(0)
    choice, rows = make_choice(generator), slice(1, 1 + ROWS)
    keys = torch.randn(1 if shared else ROWS, POSITIONS, 8, generator=generator)
    # The first two rows have fewer positions than they may choose.
    mask = torch.full((ROWS, POSITIONS), -math.inf).triu(3)
    restricted = choice.restrict_mask(mask, rows, keys)
    for row in range(ROWS):
        scores = torch.zeros(POSITIONS)
        for head in range(3):
            products = keys[0 if shared else row, :, 2:7] @ choice.queries[1 + row, head]
            scores += choice.weights[1 + row, head] * products.relu()
        seen = [position for position in range(POSITIONS) if position < row + 3]
        best = sorted(seen, key=lambda position: -float(scores[position]))[:TOP_K]
        assert restricted[row].eq(0).nonzero().flatten().tolist() == sorted(best)


def test_few_positions_are_all_chosen() -> None:
    mask = torch.zeros(ROWS, TOP_K)
    choice = make_choice(torch.Generator().manual_seed(0))
    assert choice.restrict_mask(mask, slice(0, ROWS), torch.zeros(1, TOP_K, 8)) is mask


def test_only_gathered_keys_can_be_chosen_from() -> None:
    shape, cpu = AttentionShape(1, 4, 64, 0.1, (0,), kv_kinds=1, chooses=True), torch.device("cpu")
    made = [
        create_attention("auto", shape, 16, torch.float32, cpu, disabled)
        for disabled in ((), ("gather-attention",))
    ]
    assert [type(one) for one in made] == [GatherAttention, PlainAttention]
    with pytest.raises(UsageError, match="can't attend to chosen positions"):
        create_attention("compiled", shape, 16, torch.float32, cpu)
