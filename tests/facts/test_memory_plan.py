"""How a stage's memory is shared out: exact numbers, and what holds for every budget."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import UsageError
from molink.facts.footprint import GRAPH_BYTES, GRAPH_POOL_BYTES, Footprint, StageSetup, StepLimits
from molink.facts.memory_plan import MemoryPlan, explain_refusal, plan_memory, usable_bytes
from molink.facts.model import ModelFacts

GB, MB = 10**9, 10**6
#: Llama 3.1 8B, by hand: 4096 hidden, 14336 inner, 32 + 2 × 8 heads of 128, 128256 tokens.
PROJECTIONS = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
LLAMA = ModelFacts(
    name="llama",
    layers=32,
    layer_bytes=2 * (PROJECTIONS + 2 * 4096),
    first_bytes=2 * 128256 * 4096,
    last_bytes=2 * (128256 * 4096 + 4096),
    kv_bytes=2 * 2 * 1024,
    max_model_len=131072,
    element_bytes=2,
    projection_bytes=2 * PROJECTIONS,
    int8_bytes=PROJECTIONS + 4 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096),
    nf4_bytes=PROJECTIONS // 2 + PROJECTIONS // 64 * 4,
    widest=2 * 4096 * 14336,
    row_elements=4 * 4096 + 4 * 128 + 3 * 14336,
    hidden=4096,
    vocabulary=128256,
)
TINY = ModelFacts(
    name="tiny",
    layers=4,
    layer_bytes=1000,
    first_bytes=500,
    last_bytes=504,
    kv_bytes=8,
    max_model_len=64,
    element_bytes=2,
    projection_bytes=900,
    int8_bytes=460,
    nf4_bytes=250,
    widest=200,
    row_elements=10,
    vocabulary=50,
    tied=True,
)
LOAD = StepLimits(max_chunk_rows=8, max_decode_rows=2)


def test_memory_plan_adds_up() -> None:
    plan = plan_memory(TINY, (0, 4), StageSetup(step_limits=LOAD), 40_000, requests=4)
    assert plan == MemoryPlan(
        budget=40_000,
        weights=4 * 1000 + 500 + 504 - 500,
        # (8 + 2) rows × 10 elements; 3 × 50 logits; copies for 256 tokens, a mask for 64.
        activations=10 * 10 * 2 + 3 * 50 * (2 + 8) + 256 * 2 * (8 + 2) + 64 * 8 * (2 + 1),
        graphs=0,
        margin=2000,
        kv=256 * 4 * 8,
    )
    assert str(plan) == "4.5 kB weights + 8.4 kB activations + 2.0 kB margin + 8.2 kB KV"


def test_graphs_are_planned_on_a_gpu_only() -> None:
    gpu = plan_memory(TINY, (1, 3), StageSetup(kind="cuda", step_limits=LOAD), GB)
    assert gpu.graphs == GRAPH_POOL_BYTES + 2 * GRAPH_BYTES + 2 * 10 * 2
    assert gpu.weights == 2000
    assert plan_memory(TINY, (1, 3), StageSetup(step_limits=LOAD), GB).graphs == 0


def test_quantized_projections_keep_their_size() -> None:
    for mode, packed in (("int8", 460), ("nf4", 250)):
        target = StageSetup(bf16=False, quantize=mode, step_limits=LOAD)  # type: ignore[arg-type]
        need = Footprint.of_stage(TINY, target)
        assert need.layer_bytes == 2 * 100 + packed
        assert need.token_bytes == 16
        assert need.step_bytes == 10 * 10 * 4 + 200 * 4
    stored = Footprint.of_stage(replace_facts(quantized="nf4"), StageSetup(step_limits=LOAD))
    assert stored == Footprint.of_stage(TINY, StageSetup(quantize="nf4", step_limits=LOAD))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (StageSetup(), 2),
        (StageSetup(bf16=False), 4),
        (StageSetup(kind="cuda", bf16=False), 2),
        (StageSetup(bf16=False, dtype="bf16"), 2),
        (StageSetup(dtype="f32"), 4),
    ],
)
def test_element_size_follows_dtype_and_device(target: StageSetup, expected: int) -> None:
    assert target.element_bytes(TINY) == expected


def test_an_8b_model_on_common_gpus() -> None:
    gpu = StageSetup(kind="cuda")
    whole = plan_memory(LLAMA, (0, 32), gpu, 20 * GB)
    assert 16.0 < whole.weights / GB < 16.1
    assert 0.3 < whole.activations / GB < 0.4
    assert whole.kv / GB > 2
    small = plan_memory(LLAMA, (0, 32), replace(gpu, quantize="nf4"), 8 * GB)
    assert 6.0 < small.weights / GB < 6.1
    assert small.kv / GB > 0.9


def test_refusal_tells_numbers_and_alternatives() -> None:
    gpu = StageSetup(kind="cuda")
    with pytest.raises(UsageError) as caught:
        plan_memory(LLAMA, (0, 24), gpu, 10 * GB)
    assert str(caught.value) == (
        "layers 0:24 of llama need at least 12.4 GB (11.5 GB weights + 107.8 MB activations + "
        "85.3 MB CUDA graphs + 500.0 MB margin + 201.3 MB KV), the budget is 10.0 GB: 18 layers "
        "would fit, or --quantize int8"
    )
    assert explain_refusal(LLAMA, (0, 32), gpu, 8 * GB).endswith(
        "the budget is 8.0 GB: 14 layers would fit, or --quantize nf4"
    )
    assert explain_refusal(LLAMA, (3, 5), gpu, GB // 10).endswith("no layer would fit")
    assert ": 1 layer would fit, or" in explain_refusal(
        TINY, (1, 3), StageSetup(step_limits=LOAD), 6000
    )
    stored = replace_facts(quantized="nf4")
    assert "--quantize" not in explain_refusal(stored, (1, 3), StageSetup(step_limits=LOAD), 5000)


def replace_facts(**changes: object) -> ModelFacts:
    return msgspec.structs.replace(TINY, **changes)


facts = st.builds(
    ModelFacts,
    name=st.just("m"),
    layers=st.integers(1, 6),
    layer_bytes=st.integers(100, 5000),
    first_bytes=st.integers(0, 3000),
    last_bytes=st.integers(3000, 5000),
    kv_bytes=st.integers(1, 64),
    max_model_len=st.integers(1, 5000),
    element_bytes=st.sampled_from([2, 4]),
    projection_bytes=st.integers(0, 100),
    int8_bytes=st.integers(0, 60),
    nf4_bytes=st.integers(0, 30),
    widest=st.integers(0, 100),
    row_elements=st.integers(0, 50),
    hidden=st.integers(0, 10),
    score_heads=st.sampled_from([0, 4]),
    vocabulary=st.integers(0, 200),
    tied=st.booleans(),
)
targets = st.builds(
    StageSetup,
    kind=st.sampled_from(["cpu", "cuda"]),
    bf16=st.booleans(),
    dtype=st.sampled_from(["auto", "f32", "bf16"]),
    quantize=st.sampled_from(["none", "int8", "nf4"]),
    step_limits=st.builds(
        StepLimits, max_chunk_rows=st.integers(1, 64), max_decode_rows=st.integers(1, 8)
    ),
)


def planned(
    model: ModelFacts,
    layers: tuple[int, int],
    target: StageSetup,
    budget: int,
    block_size: int = 16,
) -> MemoryPlan | None:
    try:
        return plan_memory(model, layers, target, budget, requests=3, block_size=block_size)
    except UsageError:
        return None


@given(facts, targets, st.integers(0, 20 * MB), st.integers(0, 100_000), st.data())
@settings(max_examples=300, deadline=None)
def test_every_plan_stays_within_its_budget(
    model: ModelFacts, target: StageSetup, budget: int, more: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, model.layers - 1))
    layers = (first, data.draw(st.integers(first + 1, model.layers)))
    count, opens, closes = layers[1] - first, first == 0, layers[1] == model.layers
    need = Footprint.of_stage(model, target)
    needs = need.min_bytes(count, opens=opens, closes=closes)
    plan = planned(model, layers, target, budget)
    larger = planned(model, layers, target, budget + more)
    if plan is None:
        assert needs > usable_bytes(budget)
        assert need.max_layers(usable_bytes(budget), opens=opens, closes=closes) < count
        return
    assert needs <= usable_bytes(budget)
    assert plan.total <= budget
    assert plan.kv >= count * need.min_tokens * need.token_bytes
    assert larger is not None
    assert larger.kv >= plan.kv, "more memory, fewer blocks"
    assert larger.kv <= count * need.token_bytes * 16 * -(-3 * model.max_model_len // 16)
    one_more = count * need.token_bytes * 16 + 16 * (need.attention_copy_bytes + need.mask_bytes)
    full = plan.kv == count * need.token_bytes * 16 * -(-3 * model.max_model_len // 16)
    assert full or plan.total + one_more > budget, "room is left unused"


@given(facts, targets, st.data())
def test_split_stages_hold_the_whole_model(
    model: ModelFacts, target: StageSetup, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, model.layers))
    whole = plan_memory(model, (0, model.layers), target, GB)
    if cut == model.layers:
        return
    parts = [plan_memory(model, part, target, GB) for part in ((0, cut), (cut, model.layers))]
    need = Footprint.of_stage(model, target)
    assert sum(part.weights for part in parts) == whole.weights + need.shared_bytes
    # What a step takes, every stage needs for itself; logits only the last.
    assert sum(part.activations for part in parts) <= 2 * whole.activations
    assert sum(part.kv for part in parts) == whole.kv
