"""Mixtures of experts in kernels: routing, sorting and products."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from molink.checkpoint.experts import Routing, Scoring
from molink.gguf.block_formats import BLOCK_FORMATS, E2M1_VALUES, BlockFormat
from molink.stage.decoder.expert_mlp import ExpertList, ExpertMlp
from molink.stage.decoder.grouped_experts import GroupedExpertMlp, GroupedExperts
from molink.stage.decoder.mlp import (
    GatedMlp,
    SharedExpertMlp,
    apply_bounded,
    create_gate,
)
from molink.stage.decoder.router import ExpertRouter
from molink.stage.gpu_kernels import block_product
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.expert_product import (
    ExpertTiles,
    choose_experts,
    multiply_experts,
    sort_by_expert,
)
from molink.stage.gpu_kernels.row_kernels import apply_gate
from molink.stage.linear import ExpertLinear, PlainLinear
from molink.stage.linear.experts_check import check_experts, experts_error, routing_error
from molink.stage.linear.planes_check import dequantize_codes, draw_codes
from tests.support.launch_counter import counted_launches
from tests.support.triton_device import DEVICE, needs_triton, widen_products

pytestmark = needs_triton

#: The interpreter truncates bf16 instead of rounding it.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2**-6, torch.float32: 1e-5}
#: One format of each kind; gpt-oss's rows end within a block of 128 columns.
FORMATS: dict[str, tuple[BlockFormat | None, int]] = {
    "none": (None, 72),
    "q4_0": (BLOCK_FORMATS["q4_0"], 64),
    "q4_k": (BLOCK_FORMATS["q4_k"], 256),
    "q5_0": (BLOCK_FORMATS["q5_0"], 64),
    "q6_k": (BLOCK_FORMATS["q6_k"], 256),
    "q8_0": (BLOCK_FORMATS["q8_0"], 96),
    "int8": (BlockFormat(8, 0, 64, 64, number_dtype="f32"), 64),
    "gptq": (BlockFormat(4, 8, 64, 64, has_shifts=True), 64),
    "fp8": (BlockFormat(8, 0, 64, 64, number_dtype="f32", is_float=True, shared_rows=32), 64),
    "mxfp4": (
        BlockFormat(
            4, 0, 32, 192,
            has_nested_scales=True, number_dtype="f32", codebook=E2M1_VALUES, step_kind="e8m0",
        ),
        192,
    ),
}  # fmt: skip
#: How rows choose experts: at random, all the same, or each row those after the previous row's.
CHOICES = ("any", "same", "in turn")


@pytest.fixture(scope="module", autouse=True)
def wide_products() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            widen_products(patch)
        yield


def choose(kind: str, rows: int, top_k: int, count: int, generator: torch.Generator) -> Tensor:
    """The chosen experts as int32 ``[rows, top_k]``, different ones within each row."""
    if kind == "any":
        drawn = torch.rand(rows, count, generator=generator).argsort(-1)[:, :top_k]
    else:
        first = torch.arange(rows)[:, None] * (0 if kind == "same" else top_k)
        drawn = (first + torch.arange(top_k)) % count
    return drawn.int().to(DEVICE)


def list_tiles(tiles: ExpertTiles) -> list[tuple[int, list[int]]]:
    """Expert and pairs of each tile."""
    order = tiles.order.tolist()
    return [
        (expert, order[first:last]) for expert, first, last in tiles.tiles.T.tolist() if expert >= 0
    ]


@settings(max_examples=15)
@given(
    count=st.integers(1, 40),
    rows=st.integers(0, 50),
    part=st.floats(0, 1),
    kind=st.sampled_from(CHOICES),
    tensor=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pairs_are_sorted_and_cut_by_expert(
    count: int, rows: int, part: float, kind: str, tensor: bool, seed: int
) -> None:
    top_k = max(1, round(part * min(count, 8)))
    experts = choose(kind, rows, top_k, count, torch.Generator().manual_seed(seed))
    with mock.patch.object(block_product, "has_tensor_products", return_value=tensor):
        given_rows = torch.empty(rows, 1, dtype=torch.float16, device=DEVICE)
        tiles = sort_by_expert(experts, count, given_rows)
    flat = experts.flatten().tolist()
    found: list[int] = []
    for expert, pairs in list_tiles(tiles):
        assert 1 <= len(pairs) <= tiles.shape[0]
        assert {flat[pair] for pair in pairs} == {expert}
        found += pairs
    assert found == sorted(range(len(flat)), key=lambda pair: flat[pair])
    # All tiles are full except each expert's last one, so their number is minimal.
    least = sum(-(-flat.count(expert) // tiles.shape[0]) for expert in set(flat))
    assert len(list_tiles(tiles)) == least <= tiles.tiles.shape[1]


@settings(max_examples=15)
@given(
    count=st.integers(1, 70),
    rows=st.integers(0, 9),
    part=st.floats(0, 1),
    renormalize=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 99),
)
def test_the_likeliest_experts_are_chosen(
    count: int, rows: int, part: float, renormalize: bool, dtype: torch.dtype, seed: int
) -> None:
    top_k = max(1, round(part * count))
    logits = torch.randn(rows, count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    routing = Routing(num_experts=count, top_k=top_k, renormalize=renormalize)
    weights, experts = choose_experts(logits.to(DEVICE), routing, None)
    odds, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    exact = odds[:, :top_k]
    exact = exact / exact.sum(-1, keepdim=True) if renormalize else exact
    assert torch.equal(experts.cpu().long(), order[:, :top_k])
    torch.testing.assert_close(weights.double().cpu(), exact, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_no_numbers_choose_experts_that_exist(number: float) -> None:
    logits = torch.randn(4, 6, device=DEVICE)
    logits[1], logits[2, 3] = number, number
    routing = Routing(num_experts=6, top_k=4, renormalize=True)
    weights, experts = choose_experts(logits, routing, None)
    assert all(len({*row} & {*range(6)}) == 4 for row in experts.tolist())
    # A single minus infinity only keeps its expert from being chosen.
    assert weights.isnan().any(-1).tolist() == [False, True, number != -float("inf"), False]
    assert sorted(sort_by_expert(experts, 6, logits).order.tolist()) == list(range(16))
    corrected = replace(routing, scoring="sigmoid", is_corrected=True, min_sum=1e-20)
    routing = replace(corrected, groups=3, top_groups=2)
    weights, experts = choose_experts(logits, routing, torch.zeros(6, device=DEVICE))
    assert all(len({*row} & {*range(6)}) == 4 for row in experts.tolist())
    assert weights[1].isnan().all() == (number != number)


@settings(max_examples=30)
@given(
    size=st.integers(2, 20),
    groups=st.integers(1, 9),
    voters=st.integers(1, 2),
    kept=st.floats(0, 1),
    part=st.floats(0, 1),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    is_corrected=st.booleans(),
    renormalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_corrected_experts_of_the_best_groups_are_chosen_as_by_torch(
    size: int,
    groups: int,
    voters: int,
    kept: float,
    part: float,
    scoring: Scoring,
    is_corrected: bool,
    renormalize: bool,
    seed: int,
) -> None:
    count, top_groups = size * groups, max(1, round(kept * groups))
    routing = Routing(
        num_experts=count,
        top_k=max(1, round(part * min(8, size * top_groups))),
        renormalize=renormalize,
        scoring=scoring,
        is_corrected=is_corrected,
        groups=groups,
        top_groups=top_groups,
        group_voters=voters,
        min_sum=1e-20,
        scale=2.5,
    )
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, count, generator=generator)
    correction = torch.randn(count, generator=generator).mul_(3) if is_corrected else None
    router = ExpertRouter(lambda rows: rows, routing, correction)
    weights, experts = router.choose(logits)
    moved = None if correction is None else correction.to(DEVICE)
    found, chosen = replace(router, correction=moved).choose_on_gpu(logits.to(DEVICE))
    assert torch.equal(chosen.cpu().long(), experts)
    torch.testing.assert_close(found.cpu(), weights, atol=1e-6, rtol=1e-5)
    assert (experts < count).all()
    if is_corrected:
        plain = router.projection(logits).sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        ratio = weights / plain.gather(-1, experts)
        # Weights are the scores without the correction bias.
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))


@settings(max_examples=20)
@given(
    name=st.sampled_from(list(FORMATS)),
    count=st.integers(1, 7),
    rows=st.integers(1, 70),
    part=st.floats(0, 1),
    kind=st.sampled_from(CHOICES),
    groups=st.integers(1, 2),
    dtype=st.sampled_from(list(TOLERANCES)),
    biased=st.booleans(),
    shares=st.booleans(),
    tensor=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products(
    name: str,
    count: int,
    rows: int,
    part: float,
    kind: str,
    groups: int,
    dtype: torch.dtype,
    biased: bool,
    shares: bool,
    tensor: bool,
    seed: int,
) -> None:
    """Pairs share a row, as before the gate, or have one each, as after it."""
    form, columns = FORMATS[name]
    outputs = 32 * groups if form is not None and form.shared_rows > 1 else 25 * groups
    top_k, generator = max(1, round(part * count)), torch.Generator().manual_seed(seed)
    experts = choose(kind, rows, top_k, count, generator)
    weight, values = draw_weight(form, (count * outputs, columns), dtype, generator)
    size = min(1.0, 1e4 / (float(values.abs().max()) * columns**0.5))
    of_rows = rows if shares else rows * top_k
    drawn = (size * torch.randn(of_rows, columns, generator=generator)).to(dtype)
    bias = torch.randn(count * outputs, generator=generator).to(dtype) if biased else None
    with mock.patch.object(block_product, "has_tensor_products", return_value=tensor):
        tiles = sort_by_expert(experts, count, torch.empty(rows, 1, dtype=dtype, device=DEVICE))
        found = multiply_experts(
            weight,
            drawn.to(DEVICE),
            None if bias is None else bias.to(DEVICE),
            tiles,
            count,
            top_k if shares else 1,
        )
    assert (found.dtype, found.shape) == (dtype, (rows * top_k, outputs))
    of_pair = drawn.double().repeat_interleave(top_k if shares else 1, 0)
    largest = size * float(values.abs().max()) * columns**0.5
    for pair, expert in enumerate(experts.flatten().tolist()):
        part_of = slice(expert * outputs, (expert + 1) * outputs)
        exact = values[part_of] @ of_pair[pair]
        exact += 0 if bias is None else bias[part_of].double()
        error = float((found[pair].double().cpu() - exact).abs().max())
        assert error <= TOLERANCES[dtype] * max(largest, float(exact.abs().max()))


def draw_weight(
    form: BlockFormat | None, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor | BlockPlanes, Tensor]:
    """A random weight on the device, and its values in float64."""
    if form is None:
        plain = torch.randn(shape, generator=generator).to(dtype)
        return plain.to(DEVICE), plain.double()
    part = draw_codes(form, shape, generator)
    planes = BlockPlanes.pack_blocks(PlaneLayout(form, shape), [part], DEVICE)
    return planes, dequantize_codes(form, part)


@pytest.mark.parametrize("name", FORMATS)
def test_an_expert_takes_the_place_of_another(name: str) -> None:
    form, columns = FORMATS[name]
    generator, outputs = torch.Generator().manual_seed(0), 64

    def draw(count: int) -> ExpertLinear:
        shape = count * outputs, columns
        bias = torch.randn(shape[0], generator=generator)
        if form is None:
            plain = torch.randn(shape, generator=generator)
            return ExpertLinear(plain, bias, count)
        part = draw_codes(form, shape, generator)
        planes = BlockPlanes.pack_blocks(PlaneLayout(form, shape), [part], torch.device("cpu"))
        return ExpertLinear(planes, bias, count)

    stacked, other = draw(3), draw(1)
    before = [plane.clone() for plane in list_planes(stacked)]
    stacked.put_expert(1, other)
    for plane, old, new in zip(list_planes(stacked), before, list_planes(other), strict=True):
        axis = plane.ndim > 1 and name != "none"
        found, kept, given = (each.transpose(0, int(axis)) for each in (plane, old, new))
        size = len(given)
        assert torch.equal(found[size : 2 * size], given)
        for rows in (slice(size), slice(2 * size, None)):
            assert torch.equal(found[rows], kept[rows])


def list_planes(linear: ExpertLinear) -> list[Tensor]:
    """All tensors with numbers of the experts."""
    assert linear.bias is not None
    weight = linear.weight
    parts = [weight] if isinstance(weight, Tensor) else weight._own_planes
    return [linear.bias, *(each for each in parts if each.numel())]


# --- mixtures ---------------------------------------------------------------------------------

HIDDEN, INNER = 24, 20


def make_mixtures(
    count: int, top_k: int, activation: str, biased: bool, bounded: bool, dtype: torch.dtype
) -> tuple[GroupedExpertMlp, ExpertMlp]:
    """A mixture by kernels, and the same mixture by torch, expert by expert."""
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    router = PlainLinear(draw(count, HIDDEN))
    gate_up, down = draw(count * 2 * INNER, HIDDEN), draw(count * HIDDEN, INNER)
    biases = (draw(count * 2 * INNER), draw(count * HIDDEN)) if biased else (None, None)
    gate = create_gate(activation, 1.5)
    bounded_gate = (lambda rows: apply_bounded(gate, rows)) if bounded else None

    def cut(whole: Tensor | None, expert: int) -> Tensor | None:
        return None if whole is None else whole.view(count, -1, *whole.shape[1:])[expert]

    experts = [
        GatedMlp(
            PlainLinear(cut(gate_up, index), cut(biases[0], index)),
            PlainLinear(cut(down, index), cut(biases[1], index)),
            gate,
            bounded_gate,
        )
        for index in range(count)
    ]
    routing = Routing(num_experts=count, top_k=top_k, renormalize=True)
    grouped = GroupedExpertMlp(
        ExpertRouter(PlainLinear(router.weight.to(DEVICE)), routing),
        GroupedExperts(
            *(
                ExpertLinear(weight.to(DEVICE), None if bias is None else bias.to(DEVICE), count)
                for weight, bias in ((gate_up, biases[0]), (down, biases[1]))
            ),
            gate,
            bounded_gate,
        ),
    )
    return grouped, ExpertMlp(ExpertRouter(router, routing), ExpertList(experts))


@settings(max_examples=12)
@given(
    count=st.integers(1, 9),
    top_k=st.integers(1, 8),
    rows=st.integers(0, 40),
    activation=st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]),
    biased=st.booleans(),
)
def test_a_mixture_is_that_of_torch(
    count: int, top_k: int, rows: int, activation: str, biased: bool
) -> None:
    top_k = min(count, top_k)
    grouped, one_by_one = make_mixtures(count, top_k, activation, biased, False, torch.float32)
    given_rows = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    found = grouped(given_rows.to(DEVICE)).cpu()
    if rows:
        torch.testing.assert_close(found, one_by_one(given_rows), atol=1e-4, rtol=1e-4)
    assert found.shape == (rows, HIDDEN)
    assert grouped.nbytes == one_by_one.nbytes


def test_products_beyond_float16_are_scaled_down() -> None:
    grouped, one_by_one = make_mixtures(4, 2, "silu", False, True, torch.float16)
    rows = 30 * torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)).half()
    found = grouped(rows.to(DEVICE)).cpu()
    assert found.dtype == torch.float32
    expected = one_by_one(rows)
    assert (found - expected).abs().max() < 4e-3 * expected.abs().max()


def test_a_rows_result_does_not_depend_on_others() -> None:
    grouped, _ = make_mixtures(8, 3, "silu", False, False, torch.float32)
    rows = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    together = grouped(rows)
    for part in (slice(0, 1), slice(3, 9), slice(20, 60)):
        torch.testing.assert_close(grouped(rows[part]), together[part], atol=2e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
def test_a_row_of_nan_harms_no_other() -> None:
    grouped, _ = make_mixtures(6, 2, "silu", False, False, torch.float32)
    rows = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    alone = grouped(rows[[0, 1, 2, 4, 5, 6]])
    rows[3] = torch.nan
    with np.errstate(invalid="ignore"):
        found = grouped(rows)
    assert found[3].isnan().all()
    torch.testing.assert_close(found[[0, 1, 2, 4, 5, 6]], alone)


def test_a_shared_expert_is_added() -> None:
    grouped, one_by_one = make_mixtures(4, 2, "silu", False, False, torch.float32)
    rows, gate = torch.randn(3, HIDDEN), PlainLinear(torch.randn(1, HIDDEN))
    shared = one_by_one.group.experts[0]
    if DEVICE.type == "cpu":
        mixtures = [SharedExpertMlp(mlp, shared, gate) for mlp in (grouped, one_by_one)]
        torch.testing.assert_close(*(mlp(rows) for mlp in mixtures), atol=1e-4, rtol=1e-4)
        assert [mlp.capturable for mlp in mixtures] == [True, False]


def test_a_mixture_launches_few_operators() -> None:
    """The reference runs one row, for which the host computes no choices."""
    grouped, one_by_one = make_mixtures(32, 8, "silu", False, False, torch.bfloat16)
    gate = partial(apply_gate, activation="silu", limit=0.0)
    experts = ExpertList([replace(expert, gate=gate) for expert in one_by_one.group.experts])
    found, rows = [], torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    gated = replace(grouped, group=replace(grouped.group, gate=gate))
    for mixture in (gated, replace(one_by_one, group=experts)):
        with torch.inference_mode(), counted_launches() as counter:
            mixture(rows)
        found.append(counter.counts.total())
    assert found == [7, 33]


@pytest.mark.parametrize("rows", [1, 64])
def test_the_host_waits_for_nothing(rows: int) -> None:
    """On the meta device no number can be read."""
    grouped, one_by_one = make_mixtures(8, 2, "clamped_swiglu", True, False, torch.float32)
    given_rows = torch.empty(rows, HIDDEN, device="meta")

    def move(linear: ExpertLinear) -> ExpertLinear:
        assert isinstance(linear.weight, Tensor)
        assert linear.bias is not None
        return replace(linear, weight=linear.weight.to("meta"), bias=linear.bias.to("meta"))

    empty = PlainLinear(torch.empty(8, HIDDEN, device="meta"))
    router = replace(grouped.router, projection=empty)
    group = grouped.group
    there = replace(group, gate_up=move(group.gate_up), down=move(group.down))
    moved = replace(grouped, router=router, group=there)
    with counted_launches():
        assert moved(given_rows).shape == given_rows.shape
    with pytest.raises((NotImplementedError, RuntimeError)):
        replace(one_by_one, router=router)(given_rows)


# --- checks of a device -----------------------------------------------------------------------


@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (8, 2), (40, 8)])
def test_a_device_is_proven_by_its_choices(count: int, top_k: int) -> None:
    routing = Routing(num_experts=count, top_k=top_k, renormalize=True)
    assert routing_error(routing, torch.float16, DEVICE) < 1e-6
    if count % 4 == 0:
        grouped = replace(routing, groups=count // 2, top_groups=4, scale=2.5)
        corrected = replace(grouped, scoring="sigmoid", is_corrected=True)
        assert routing_error(corrected, torch.float32, DEVICE) < 1e-6


@pytest.mark.parametrize("name", ["none", "mxfp4"])
def test_a_device_is_proven_by_its_products(name: str) -> None:
    assert experts_error(*FORMATS[name], torch.float16, DEVICE) < TOLERANCES[torch.float16]


@pytest.mark.parametrize("wrong", ["choose_experts", "sort_by_expert", "multiply_experts"])
def test_wrong_kernels_are_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from molink.stage.linear import experts_check

    monkeypatch.setattr(experts_check, "_ROWS", (1, 12))
    check = check_experts.__wrapped__
    routing = Routing(num_experts=8, top_k=2, renormalize=True)
    assert check(None, 64, routing, torch.float32, DEVICE)
    right = getattr(experts_check, wrong)

    def other(*arguments: object) -> object:
        made = right(*arguments)
        if wrong == "choose_experts":
            return made[0], made[1].flip(-1)
        if wrong == "sort_by_expert":
            return ExpertTiles(made.order.flip(0), made.tiles, made.shape)
        return 1.1 * made

    monkeypatch.setattr(experts_check, wrong, other)
    assert not check(None, 64, routing, torch.float32, DEVICE)
    monkeypatch.setattr(experts_check, wrong, None)
    assert not check(None, 64, routing, torch.float32, DEVICE)
