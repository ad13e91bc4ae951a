"""Rows of several requests in one forward give each request's own results."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import InvariantError, UsageError
from molink.stage import stage as stages
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from tests.support.models import MakeModel
from tests.support.stage import Ring

#: (cached tokens, new rows) of the requests of one forward, in order.
MIXES = {
    "decode": [(7, 1), (40, 1), (8, 1), (0, 1)],
    "prefill": [(0, 20), (0, 9), (0, 2)],
    "chunks": [(16, 20), (5, 9), (63, 2)],
    "fused": [(33, 1), (0, 30), (2, 1), (24, 11), (50, 1)],
    "single": [(20, 1)],
    "far apart": [(300, 1), (3, 1), (290, 1), (4, 1), (5, 1), (6, 1), (7, 1)],
}


def scattered(
    requests: list[tuple[int, int]], block_size: int, blocks: int, seed: int
) -> list[tuple[int, ...]]:
    """Non-contiguous block tables that share no block, one per request."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = []
    for before, rows in requests:
        needed = -(-(before + rows) // block_size)
        tables.append(tuple(order[:needed]))
        del order[:needed]
    return tables


@pytest.fixture(scope="module")
def folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return make_model(made, "qwen3", 1, rope_parameters=rope, max_position_embeddings=48)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_mixed_rows_equal_each_alone(
    folder: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    mix: str,
    block_size: int,
) -> None:
    requests, blocks = MIXES[mix], 1400 // block_size
    ring = make_ring(folder, (1,), blocks=blocks, block_size=block_size)
    tables = scattered(requests, block_size, blocks, seed=1)
    prompts = [random_tokens(before + rows, seed) for seed, (before, rows) in enumerate(requests)]
    for (before, _), prompt, table in zip(requests, prompts, tables, strict=True):
        if before:
            ring.run(prompt[:before], [SequenceRows(0, before, table)])
    fused = ring.run(
        [token for (before, _), prompt in zip(requests, prompts, strict=True)
         for token in prompt[before:]],
        [SequenceRows(*request, table) for request, table in zip(requests, tables, strict=True)],
    )  # fmt: skip
    alone = []
    for (before, rows), prompt in zip(requests, prompts, strict=True):
        other = make_ring(folder, (), block_size=block_size, blocks=blocks)
        table = range(-(-len(prompt) // block_size))
        if before:
            other.run(prompt[:before], [SequenceRows(0, before, table)])
        alone.append(other.run(prompt[before:], [SequenceRows(before, rows, table)]))
    torch.testing.assert_close(fused, torch.cat(alone), atol=1e-4, rtol=0)


def test_only_the_wanted_logits(
    folder: Path, make_ring: type[Ring], random_tokens: Callable[..., list[int]]
) -> None:
    ring, rows = make_ring(folder), [SequenceRows(0, 12, (3, 1))]
    every = ring.run(random_tokens(12), rows)
    assert ring.run(random_tokens(12), rows, []).shape == (0, 320)
    for wanted in ([11, 4], list(range(11, -1, -1))):
        some = ring.run(random_tokens(12), rows, wanted)
        torch.testing.assert_close(some, every[wanted], atol=1e-5, rtol=0)


@torch.inference_mode()
def poison(stage: Stage) -> None:
    """Fill the pool with what a failed request may leave there."""
    stage._pool._storage.fill_(torch.nan)


def test_a_reused_block_carries_nothing_over(
    folder: Path, make_ring: type[Ring], random_tokens: Callable[..., list[int]]
) -> None:
    ring = make_ring(folder, (2,))
    clean = ring.run(random_tokens(5), [SequenceRows(0, 5, (7,))])
    for stage in ring.stages:
        poison(stage)
    poisoned = [ring.run(random_tokens(4), [SequenceRows(0, 4, (7,))])]
    poisoned.append(ring.run(random_tokens(5)[4:], [SequenceRows(4, 1, (7,))]))
    torch.testing.assert_close(torch.cat(poisoned), clean, atol=1e-5, rtol=0)
    # Beside a longer request the short one's table is padded, with its own blocks only.
    for stage in ring.stages:
        poison(stage)
    ring.run(random_tokens(4), [SequenceRows(0, 4, (7,))])
    ring.run(random_tokens(30, 1), [SequenceRows(0, 30, (1, 2, 3, 4))])
    both = ring.run(
        [random_tokens(5)[4], 9], [SequenceRows(4, 1, (7,)), SequenceRows(30, 1, (1, 2, 3, 4))]
    )
    torch.testing.assert_close(both[:1], clean[4:], atol=1e-5, rtol=0)
    assert both.isfinite().all()


def test_the_callers_tensors_stay_as_they_are(folder: Path) -> None:
    stage = Stage.load_layers(ModelFolder.open(folder), (1, 2), "cpu", "f32")
    stage.allocate_kv_pool(4, 8)
    hidden = torch.randn(3, 64)
    before = hidden.clone()
    rows = stage.forward(StageInput(None, hidden, (SequenceRows(0, 3, (2,)),)))
    assert rows.shape == (3, 64)
    assert torch.equal(hidden, before)


def test_wrong_batches_are_refused(folder: Path, random_tokens: Callable[..., list[int]]) -> None:
    stage = Stage.load_layers(ModelFolder.open(folder), (0, 1), "cpu", "f32")
    tokens = torch.tensor(random_tokens(9))
    with pytest.raises(InvariantError, match="before a KV pool"):
        stage.forward(StageInput(tokens, None, (SequenceRows(0, 9, (0, 1)),)))
    stage.allocate_kv_pool(4, 8)
    for rows, message in [
        (SequenceRows(0, 9, (0,)), "don't fit 1 blocks"),
        (SequenceRows(0, 9, (0, 4)), "block 4 is not in a pool of 4"),
        (SequenceRows(0, 8, (0, 1)), "9 rows, its sequences 8"),
    ]:
        with pytest.raises(InvariantError, match=message):
            stage.forward(StageInput(tokens, None, (rows,)))
    for wrong in (-1, 320):
        tokens[3] = wrong
        with pytest.raises(InvariantError, match="token id is not in 0:320"):
            stage.forward(StageInput(tokens, None, (SequenceRows(0, 9, (0, 1)),)))
    with pytest.raises(InvariantError, match="no tokens"):
        stage.forward(StageInput(None, torch.zeros(9, 64), (SequenceRows(0, 9, (0, 1)),)))


def test_sizes_and_ends(folder: Path) -> None:
    opened = ModelFolder.open(folder)
    whole = Stage.load_layers(opened, (0, 3), "cpu", "f32")
    parts = [Stage.load_layers(opened, bounds, "cpu", "f32") for bounds in ((0, 1), (1, 2), (2, 3))]
    assert [part.is_first for part in parts] == [True, False, False]
    assert [part.is_last for part in parts] == [False, False, True]
    assert whole.weight_bytes == sum(part.weight_bytes for part in parts)
    # keys and values x layers x positions x kv heads x head_dim x float32
    assert whole.block_bytes(8) == 2 * 3 * 8 * 2 * 16 * 4
    assert parts[0].block_bytes(8) * 3 == whole.block_bytes(8)
    half = Stage.load_layers(opened, (0, 1), "cpu", "bf16")
    # Norms of heads stay in float32.
    assert half.weight_bytes * 2 == pytest.approx(parts[0].weight_bytes, rel=0.02)


def test_a_tied_head_is_held_once_by_a_whole_model(make_model: MakeModel, tmp_path: Path) -> None:
    opened = ModelFolder.open(make_model(tmp_path, "qwen2", 0, tie_word_embeddings=True))
    whole = Stage.load_layers(opened, (0, 3), "cpu", "f32")
    last = Stage.load_layers(opened, (2, 3), "cpu", "f32")
    assert whole.weight_bytes == sum(span.nbytes for span in opened.tensors.values())
    assert last.weight_bytes > 320 * 64 * 4


def test_rows_from_a_stage_of_another_dtype_are_taken(folder: Path) -> None:
    stage = Stage.load_layers(ModelFolder.open(folder), (1, 2), "cpu", "f32")
    stage.allocate_kv_pool(4, 8)
    hidden = torch.randn(3, 64, dtype=torch.bfloat16)
    rows = stage.forward(StageInput(None, hidden, (SequenceRows(0, 3, (2,)),)))
    assert rows.dtype == torch.float32


def test_cuda_is_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [stages.find_device(name) for name in ("cuda", "cuda:1", "cpu")]
    assert found == [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")]


@pytest.mark.parametrize("device", ["tpu9", "cuda:99", "mps"])
def test_unknown_device(folder: Path, device: str) -> None:
    with pytest.raises(UsageError, match=device):
        Stage.load_layers(ModelFolder.open(folder), (0, 1), device)
