"""States after drafts, right and wrong ones, equal those of the same rows without drafts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.recurrent import RecurrentShape
from molink.errors import InvariantError
from molink.facts.drafts import MAX_DRAFTS
from molink.stage.batch import SequenceRows
from molink.stage.decoder.mixer import ForwardContext, Mixer, StateContext
from molink.stage.decoder.parallel import ParallelMixers
from molink.stage.linear import Projection
from molink.stage.stage import Stage
from molink.stage.state_pool import StatePool
from tests.support.models import MakeModel

#: Sizes of rows that fill vectors: torch's kernels compute the rest of a tensor differently.
DELTA_RULE = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA_RULE,
    "olmo_hybrid": DELTA_RULE | {"linear_num_key_heads": 32},
    "kimi_linear": {"linear_num_heads": 16},
    "falcon_h1": {"mamba_d_ssm": 512, "mamba_n_heads": 32, "mamba_d_state": 16},
    "lfm2": {},
}
#: Requests, each of this many rows, in slots of a pool.
REQUESTS, LENGTH, SLOTS = 3, 17, 5


@dataclass(frozen=True)
class RowByRow:
    """A projection of one row at a time, whose results don't depend on other rows."""

    inner: Projection

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.cat([self.inner(row) for row in rows.split(1)])


@dataclass
class Layer:
    """A recurrent layer of a small model, and rows for its requests."""

    mixer: Mixer
    shape: RecurrentShape
    rows: Tensor

    def create_pool(self) -> StatePool:
        return StatePool(self.shape, 1, SLOTS, torch.device("cpu"))

    @torch.inference_mode()
    def run(self, pool: StatePool, sequences: Sequence[SequenceRows], rows: Tensor) -> Tensor:
        """Outputs of a step; a request's slot is its number."""
        states = StateContext(pool, pool.locate_rows(sequences))
        context = ForwardContext(cast(Any, None), rows, (), cast(Any, None), states)
        return self.mixer(rows, context)


@pytest.fixture(scope="module", params=FAMILIES)
def layer(
    request: pytest.FixtureRequest, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> Layer:
    torch.set_num_threads(1)
    path, sizes = tmp_path_factory.mktemp("layer"), FAMILIES[request.param]
    folder = ModelFolder.open(make_model(path, request.param, 3, **sizes))
    stage = Stage.load_layers(folder, (0, 1), "cpu", "f32")
    mixer = stage._decoder.blocks[0].mixer
    mixer = mixer.recurrent if isinstance(mixer, ParallelMixers) else mixer
    assert mixer is not None
    kinds = {
        name: RowByRow(getattr(mixer, name))
        for name in ("rows", "rates", "gate_up", "decay_up", "output")
        if hasattr(mixer, name)
    }
    shape, size = folder.config.recurrent, folder.config.hidden_size
    assert shape is not None
    rows = torch.randn(REQUESTS, LENGTH, size, generator=torch.Generator().manual_seed(1))
    return Layer(replace(cast(Any, mixer), **kinds), shape, rows)


@dataclass
class Schedule:
    """Random steps of requests: a first chunk, then single rows with drafts.

    Of a request's drafts, some are the rows that follow, and the others random.
    """

    rng: random.Random
    most: int
    done: list[int] = field(default_factory=lambda: [0] * REQUESTS)
    #: Of each step, by request: position, rows without drafts, right drafts and wrong ones.
    steps: list[list[tuple[int, int, int, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        while any(done < LENGTH for done in self.done):
            step = list[tuple[int, int, int, int, int]]()
            for request in rng.sample(range(REQUESTS), rng.randint(1, REQUESTS)):
                start, left = self.done[request], LENGTH - self.done[request]
                if not left:
                    continue
                count = rng.randint(1, 6) if not start or rng.random() < 0.1 else 1
                count, drafts = min(count, left), rng.randint(0, self.most)
                right = min(rng.randint(0, drafts), left - count) if count == 1 else 0
                wrong = drafts - right if count == 1 else 0
                step.append((request, start, count, right, wrong))
                self.done[request] += count + right
            if step:
                self.steps.append(step)


def check_schedule(layer: Layer, schedule: Schedule) -> tuple[StatePool, StatePool]:
    """Run it with drafts and without; every right row has the same output.

    Returns both pools.
    """
    drafted, plain = layer.create_pool(), layer.create_pool()
    noise = torch.Generator().manual_seed(schedule.rng.randrange(1 << 30))
    for step in schedule.steps:
        sequences, parts, kept = list[SequenceRows](), list[Tensor](), list[int]()
        singles, expected = list[SequenceRows](), list[Tensor]()
        for request, start, count, right, wrong in step:
            end = start + count
            each = count if count > 1 else 1
            sequences.append(SequenceRows(start, each, (), state_slot=request))
            sequences += [
                SequenceRows(position, 1, (), state_slot=request, is_draft=True)
                for position in range(end, end + right + wrong)
            ]
            first = sum(len(part) for part in parts)
            kept += range(first, first + count + right)
            parts.append(layer.rows[request, start : end + right])
            parts.append(torch.randn(wrong, layer.rows.shape[2], generator=noise))
        output = layer.run(drafted, sequences, torch.cat(parts))
        for request, start, count, right, _ in step:
            rows = layer.rows[request]
            singles = [SequenceRows(start, count, (), state_slot=request)]
            expected.append(layer.run(plain, singles, rows[start : start + count]))
            for position in range(start + count, start + count + right):
                singles = [SequenceRows(position, 1, (), state_slot=request)]
                expected.append(layer.run(plain, singles, rows[position : position + 1]))
        assert_same(output[kept], torch.cat(expected))
    return drafted, plain


def assert_same(one: Tensor, other: Tensor) -> None:
    """Outputs are the same but for gates, whose kernel rounds single rows differently."""
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def settle(layer: Layer, pool: StatePool) -> None:
    """Run one more row of each request."""
    sequences = [SequenceRows(LENGTH, 1, (), state_slot=slot) for slot in range(REQUESTS)]
    layer.run(pool, sequences, layer.rows[:, 0])


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 32), most=st.sampled_from([0, 1, 3, MAX_DRAFTS]))
def check_any_schedule(layer: Layer, seed: int, most: int) -> None:
    pools = check_schedule(layer, Schedule(random.Random(seed), most))
    for pool in pools:
        settle(layer, pool)
    one, other = pools
    assert torch.equal(one.conv_rows, other.conv_rows)
    assert torch.equal(one.memories, other.memories)


def test_states_are_bit_equal_to_those_without_drafts(layer: Layer) -> None:
    check_any_schedule(layer)


def test_every_draft_may_be_the_first_wrong_one(layer: Layer) -> None:
    plain = layer.create_pool()
    rows = layer.rows[0]
    expected = [
        layer.run(plain, [SequenceRows(position, 1, ())], rows[position : position + 1])
        for position in range(LENGTH)
    ]
    for right in range(MAX_DRAFTS + 1):
        pool = layer.create_pool()
        given = rows[: MAX_DRAFTS + 1].clone()
        given[right + 1 :] *= -1.5
        sequences = [SequenceRows(0, 1, ())]
        sequences += [SequenceRows(at, 1, (), is_draft=True) for at in range(1, MAX_DRAFTS + 1)]
        output = layer.run(pool, sequences, given)
        assert_same(output[: right + 1], torch.cat(expected[: right + 1]))
        assert [pool.has_state(0, at) for at in range(MAX_DRAFTS + 3)] == [
            *[True] * (MAX_DRAFTS + 2),
            False,
        ]
        after = layer.run(pool, [SequenceRows(right + 1, 1, ())], rows[right + 1 : right + 2])
        assert_same(after, expected[right + 1])
        # Those before can't be taken back, and those after are forgotten.
        assert [pool.has_state(0, at) for at in (right + 1, right + 2, right + 3)] == [
            False,
            True,
            False,
        ]


def test_a_copy_continues_after_any_right_draft(layer: Layer) -> None:
    """A released request's slot is a snapshot of what it computed, drafts included."""
    pool, rows = layer.create_pool(), layer.rows[0]
    drafts = [SequenceRows(at, 1, (), is_draft=True) for at in range(4, 8)]
    layer.run(pool, [SequenceRows(0, 3, ())], rows[:3])
    layer.run(pool, [SequenceRows(3, 1, ()), *drafts], rows[3:8])
    plain = layer.create_pool()
    layer.run(plain, [SequenceRows(0, 3, ())], rows[:3])
    for at in range(3, 8):
        for target, count in ((1, 1), (2, 5)):
            if at > 3:
                pool.copy_slot(0, target)
                assert pool.has_state(target, at)
                plain.copy_slot(0, target)
                outputs = [
                    layer.run(
                        each,
                        [SequenceRows(at, count, (), state_slot=target)],
                        rows[at : at + count],
                    )
                    for each in (pool, plain)
                ]
                assert_same(*outputs)
        layer.run(plain, [SequenceRows(at, 1, ())], rows[at : at + 1])


def test_rows_after_an_unknown_state_run(layer: Layer) -> None:
    """As those of a request whose earlier step failed."""
    pool = layer.create_pool()
    assert not pool.has_state(0, 7)
    output = layer.run(pool, [SequenceRows(7, 1, ())], layer.rows[0, :1])
    assert bool(torch.isfinite(output).all())
    assert pool.has_state(0, 8)


def test_more_drafts_than_fit_are_refused(layer: Layer) -> None:
    pool, count = layer.create_pool(), MAX_DRAFTS + 1
    drafts = [SequenceRows(at, 1, (), is_draft=True) for at in range(1, count + 1)]
    with pytest.raises(InvariantError, match="drafts don't fit"):
        layer.run(pool, [SequenceRows(0, 1, ()), *drafts], layer.rows[0, : count + 1])
