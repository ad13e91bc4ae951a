"""The delta rule gives the same results in chunks as row by row."""

import pytest
import torch

from molink.stage.decoder.delta_rule import run_chunks, update_memories


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
def test_chunks_are_rows_one_by_one(by_channel: bool, strength: float) -> None:
    torch.manual_seed(0)
    rows, heads, key_dim, value_dim = 70, 3, 8, 5
    queries, keys = torch.randn(2, rows, heads, key_dim)
    keys /= keys.norm(dim=-1, keepdim=True)
    values = torch.randn(rows, heads, value_dim)
    # Strong decays erase earlier rows, and their inverses would overflow.
    decays = -strength * torch.rand(rows, heads, key_dim if by_channel else 1)
    parts = (
        queries,
        keys,
        values,
        decays if by_channel else decays[..., 0],
        torch.rand(rows, heads),
    )
    start = torch.randn(heads, key_dim, value_dim)
    memory, memories = start.clone(), start.clone().unsqueeze(0)
    read = run_chunks(memory, *parts)
    single = zip(*(part.split(1) for part in parts), strict=True)
    expected = [update_memories(memories, *row) for row in single]
    torch.testing.assert_close(read, torch.cat(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(memory, memories[0], atol=1e-4, rtol=1e-4)
