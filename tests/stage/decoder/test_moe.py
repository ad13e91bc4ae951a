"""Each row goes through the experts that it chose, and no others run."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from molink.checkpoint.experts import Routing
from molink.checkpoint.model_folder import ModelFolder
from molink.stage.decoder.expert_mlp import ExpertList, ExpertMlp
from molink.stage.decoder.mlp import GatedMlp, create_gate
from molink.stage.decoder.router import ExpertRouter
from molink.stage.linear import PlainLinear
from molink.stage.stage import Stage
from tests.support.models import MakeModel

HIDDEN, INNER = 8, 6


@dataclass
class Spy:
    """An expert that records its numbers of rows."""

    capturable = True

    expert: GatedMlp
    given: list[int] = field(default_factory=list)

    def __call__(self, rows: Tensor) -> Tensor:
        self.given.append(len(rows))
        return self.expert(rows)

    @property
    def nbytes(self) -> int:
        return self.expert.nbytes


def make(
    count: int, chosen: int, normalized: bool, seed: int, activation: str = "silu"
) -> tuple[ExpertMlp, Generator]:
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> PlainLinear:
        return PlainLinear(torch.randn(rows, columns, generator=generator))

    experts = ExpertList(
        [
            Spy(GatedMlp(weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER), create_gate(activation)))
            for _ in range(count)
        ]
    )
    routing = Routing(num_experts=count, top_k=chosen, renormalize=normalized)
    return ExpertMlp(ExpertRouter(weight(count, HIDDEN), routing), experts), generator


@settings(deadline=None)
@given(
    count=st.integers(1, 9),
    part=st.floats(0, 1),
    rows=st.integers(1, 40),
    normalized=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_row_is_the_weighted_sum_of_its_experts(
    count: int, part: float, rows: int, normalized: bool, seed: int
) -> None:
    chosen = max(1, round(part * count))
    mlp, generator = make(count, chosen, normalized, seed)
    given_rows = torch.randn(rows, HIDDEN, generator=generator)
    kept = given_rows.clone()
    results = mlp(given_rows)
    assert torch.equal(given_rows, kept)
    touched = {index: sum(expert.given) for index, expert in enumerate(mlp.group.experts)}
    wanted = dict.fromkeys(range(count), 0)
    for row, result in zip(kept, results, strict=True):
        odds = torch.softmax(row @ mlp.router.projection.weight.T, 0)
        best = sorted(range(count), key=lambda index: -odds[index])[:chosen]
        total = odds[best].sum() if normalized else 1.0
        expected = sum(
            odds[index] / total * mlp.group.experts[index].expert(row[None])[0] for index in best
        )
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
        for index in best:
            wanted[index] += 1
    assert touched == wanted
    assert all(len(expert.given) <= 1 for expert in mlp.group.experts) or rows == 1


def test_bytes_are_those_of_the_router_and_all_experts() -> None:
    mlp, _ = make(5, 2, True, 0)
    assert mlp.nbytes == 4 * (5 * HIDDEN + 5 * 3 * INNER * HIDDEN)


def test_only_layers_without_experts_can_be_captured(make_model: MakeModel, tmp_path: Path) -> None:
    folder = ModelFolder.open(make_model(tmp_path, "qwen3_moe", mlp_only_layers=[0]))
    assert Stage.load_layers(folder, (0, 1))._decoder.capturable
    assert not Stage.load_layers(folder, (0, 2))._decoder.capturable
    assert not Stage.load_layers(folder, (2, 3))._decoder.capturable


def test_a_stage_reads_the_experts_of_its_layers_only(
    make_model: MakeModel, tmp_path: Path
) -> None:
    folder = ModelFolder.open(make_model(tmp_path, "mixtral", num_hidden_layers=4))
    whole = Stage.load_layers(folder, (0, 4)).weight_bytes
    ends = 4 * (2 * 320 * 64 + 64)
    middle = Stage.load_layers(folder, (1, 2)).weight_bytes
    assert whole == 4 * middle + ends
    assert middle > 4 * 6 * 3 * 48 * 64
