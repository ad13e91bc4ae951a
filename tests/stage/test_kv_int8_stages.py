"""Stages with 8-bit KV give nearly the same logits, and the same ones in any chunks."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from molink.stage.batch import SequenceRows
from molink.stage.diagnostics.stage_profile import profile_key
from tests.support.models import MakeModel
from tests.support.stage import Ring

BLOCKS = range(3, 13)
#: Whole pages, so that the CPU's compiled attention is used.
OPTIONS = {"block_size": 16, "blocks": 16, "kv_cache_dtype": "int8"}
#: ``gather`` alone, and the CPU's default.
AVOID = pytest.mark.parametrize("avoid", [("compiled-attention",), ()])


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).abs().max() / exact.std())


@AVOID
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_logits_are_nearly_those_of_exact_kv(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    family: str,
    avoid: tuple[str, ...],
) -> None:
    folder = make_model(tmp_path, family, 3)
    tokens, rows = random_tokens(100), [SequenceRows(0, 100, BLOCKS)]
    exact = make_ring(folder, avoid=avoid, block_size=16).run(tokens, rows)
    found = make_ring(folder, (1,), avoid=avoid, **OPTIONS).run(tokens, rows)
    # A token may choose other experts.
    assert 1e-4 < float((found - exact).square().mean().sqrt() / exact.std()) < 0.05


@AVOID
def test_chunks_and_stages_change_nothing(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    avoid: tuple[str, ...],
) -> None:
    folder = make_model(tmp_path, "qwen3", 3)
    tokens = random_tokens(90)
    whole = make_ring(folder, avoid=avoid, **OPTIONS).run(tokens, [SequenceRows(0, 90, BLOCKS)])
    for splits in ((), (1,), (1, 2)):
        ring = make_ring(folder, splits, avoid=avoid, **OPTIONS)
        # Some chunks, and then single rows, as in decode steps.
        bounds = [0, 40, 41, 75, *range(76, 91)]
        parts = [
            ring.run(tokens[first:last], [SequenceRows(first, last - first, BLOCKS)])
            for first, last in pairwise(bounds)
        ]
        assert relative_error(torch.cat(parts), whole) < 1e-4


def test_a_copied_prefix_gives_what_its_source_gives(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    ring = make_ring(make_model(tmp_path, "llama", 2), **OPTIONS)
    tokens, (stage,) = random_tokens(60), ring.stages
    expected = ring.run(tokens, [SequenceRows(0, 60, [0, 1, 2, 3])])[40:]
    # Blocks of whole pages are shared, the rest of the prefix is copied.
    table = [0, 1, 9, 8]
    stage.copy_block(2, table, 40)
    found = ring.run(tokens[40:], [SequenceRows(40, 20, table)])
    assert relative_error(found, expected) < 1e-4
    assert stage.open_host_pool(8 * stage.block_bytes(16))[0] == 8
    stage.swap_blocks(out=True, blocks=(9, 8), hosts=(5, 6))
    stage.swap_blocks(out=False, blocks=(11, 12), hosts=(5, 6))
    again = ring.run(tokens[-1:], [SequenceRows(59, 1, [0, 1, 11, 12])])
    assert relative_error(again, expected[-1:]) < 1e-4


def test_measured_times_are_of_one_type_of_kv(
    make_model: MakeModel, make_ring: type[Ring], tmp_path: Path
) -> None:
    folder = make_model(tmp_path, "llama", 2)
    (plain,), (quantized,) = make_ring(folder).stages, make_ring(folder, **OPTIONS).stages
    assert profile_key(plain, 16) != profile_key(quantized, 16)
    size = plain.config.head_dim
    assert quantized.block_bytes(16) * 4 * size == plain.block_bytes(16) * (size + 2)
