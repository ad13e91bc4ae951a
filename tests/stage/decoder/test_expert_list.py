"""Experts with quantized weights on a CPU: one call for all gives each expert's bits."""

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from molink.gguf.block_formats import BLOCK_FORMATS
from molink.stage.cpu_kernels.create import create_block_matmul, create_integer_matmul
from molink.stage.cpu_kernels.repack import parse_blocks
from molink.stage.decoder.expert_mlp import ExpertList
from molink.stage.decoder.mlp import GatedMlp, create_gate
from molink.stage.linear import BlockLinear
from tests.support.gguf_models import random_rows

HIDDEN, INNER, COUNT = 64, 32, 5
_GATE = create_gate("silu")
creators = pytest.mark.parametrize("create", [create_block_matmul, create_integer_matmul])


def project(create: object, name: str, out: int, width: int) -> BlockLinear:
    assert callable(create)
    product = create(BLOCK_FORMATS[name], torch.float32, 1)
    if product is None:
        pytest.skip("this CPU has no products of quantized weights")
    stored = torch.from_numpy(random_rows(Kind[name.upper()], (out, width)))
    parts = [parse_blocks(name, stored)]
    return BlockLinear.pack_blocks(product, out, parts, torch.randn(out), torch.float32)


def make(create: object, *names: str) -> ExpertList:
    """Experts with weights of these types in turn."""
    types = [names[index % len(names)] for index in range(COUNT)]
    return ExpertList(
        [
            GatedMlp(
                project(create, name, 2 * INNER, HIDDEN),
                project(create, name, HIDDEN, INNER),
                _GATE,
            )
            for name in types
        ]
    )


def run_singly(group: ExpertList, rows: Tensor, counts: list[int]) -> Tensor:
    parts = zip(group.experts, rows.split(counts), strict=True)
    return torch.cat([expert(part) for expert, part in parts if len(part)])


@creators
@pytest.mark.parametrize("names", [("q4_0",), ("q8_0",), ("q4_0", "q8_0")])
@torch.inference_mode()
def test_all_at_once_is_what_one_by_one_gives(create: object, names: tuple[str, ...]) -> None:
    group = make(create, *names)
    row = torch.randn(1, HIDDEN)
    exact = torch.cat([group.experts[index](row) for index in (3, 0, 4)])
    assert torch.equal(group.run_row(row, torch.tensor([3, 0, 4])), exact)
    for counts in ([1, 0, 2, 0, 3], [0, 0, 7, 0, 0], [0, 30, 1, 0, 40]):
        rows = torch.randn(sum(counts), HIDDEN)
        order = torch.randperm(len(rows))
        found = group.multiply(rows, order, counts)
        assert torch.equal(found, run_singly(group, rows[order], counts))


@creators
@torch.inference_mode()
def test_an_expert_that_was_replaced_is_used(create: object) -> None:
    group, other = make(create, "q4_0"), make(create, "q4_0")
    row, chosen = torch.randn(1, HIDDEN), torch.tensor([1, 2])
    before = group.run_row(row, chosen)
    group.replace_expert(1, other.experts[1])
    after = group.run_row(row, chosen)
    assert torch.equal(after[0], other.run_row(row, chosen)[0])
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])


@creators
def test_weights_of_one_format_are_multiplied_in_one_call(create: object) -> None:
    assert make(create, "q4_0").runs_at_once
    assert not make(create, "q4_0", "q8_0").runs_at_once
