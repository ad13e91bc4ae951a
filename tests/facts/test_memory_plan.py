"""The plan of a stage's memory: what it must include, and properties for every budget."""

import re
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import UsageError
from molink.facts.footprint import (
    MAX_DEQUANTIZED,
    Footprint,
    StageSetup,
    StepLimits,
    count_pool_blocks,
    count_state_slots,
)
from molink.facts.memory_plan import MemoryPlan, explain_refusal, plan_memory, usable_bytes
from molink.facts.model import (
    BlockWeights,
    ExpertFacts,
    LayerWeights,
    ModelFacts,
    Quantize,
)

GB, MB = 10**9, 10**6
#: Llama 3.1 8B, calculated by hand: 4096 hidden, 14336 inner, 32 + 2 × 8 heads of 128, 128256
#: tokens.
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


PACKED = BlockWeights(layer=(300, 100), first=(250, 0), last=(250, 4))


def test_a_gpu_counts_packed_weights_once_they_are_proven() -> None:
    facts = replace_facts(plane_weights=PACKED)
    wide, packed = (
        Footprint.of_stage(facts, StageSetup("cuda", has_block_kernels=proven, step_limits=LOAD))
        for proven in (False, True)
    )
    assert (wide.layer_bytes, wide.first_bytes, wide.last_bytes) == (1000, 500, 504)
    assert (packed.layer_bytes, packed.first_bytes, packed.last_bytes) == (400, 250, 254)
    # For many rows weights are dequantized.
    assert packed.step_bytes == wide.step_bytes + 200 * 2
    # Weights that a CPU keeps packed are unpacked on a GPU.
    on_cpu = replace_facts(block_weights=PACKED)
    assert Footprint.of_stage(on_cpu, StageSetup("cuda", has_block_kernels=True)) == (
        Footprint.of_stage(TINY, StageSetup("cuda"))
    )
    large = Footprint.of_stage(
        msgspec.structs.replace(LLAMA, plane_weights=PACKED),
        StageSetup("cuda", has_block_kernels=True),
    )
    slices = 2 * MAX_DEQUANTIZED
    assert large.step_bytes == Footprint.of_stage(LLAMA, StageSetup("cuda")).step_bytes + slices


def test_attention_that_reads_pages_leaves_more_for_kv() -> None:
    copies, paged = (
        plan_memory(LLAMA, (0, 32), StageSetup("cuda", reads_pages=proven), 24 * GB)
        for proven in (False, True)
    )
    assert paged.kv > 1.06 * copies.kv
    assert paged.kv - copies.kv == pytest.approx(
        copies.activations - paged.activations, abs=32 * 16 * LLAMA.kv_bytes
    )
    need = Footprint.of_stage(LLAMA, StageSetup("cuda", reads_pages=True))
    assert need.activation_bytes(1 << 20, closes=True) == need.activation_bytes(0, closes=True)


def test_kv_in_8_bits_leaves_room_for_more_tokens() -> None:
    facts = msgspec.structs.replace(LLAMA, int8_kv_bytes=2 * 8 * (128 + 2))
    assert 2 * 128 * facts.int8_kv_bytes == (128 + 2) * facts.kv_bytes
    for reads_pages in (False, True):
        plain, small = (
            StageSetup("cuda", reads_pages=reads_pages, kv_cache_dtype=kept)
            for kept in ("auto", "int8")
        )
        needs = [Footprint.of_stage(facts, one) for one in (plain, small)]
        assert [need.token_bytes for need in needs] == [facts.kv_bytes, facts.int8_kv_bytes]
        plans = [plan_memory(facts, (0, 32), one, 24 * GB) for one in (plain, small)]
        tokens = [plan.kv // need.token_bytes for plan, need in zip(plans, needs, strict=True)]
        assert tokens[1] > (1.9 if reads_pages else 1.7) * tokens[0]
        # Gathered codes are copied first, and then dequantized to rows.
        copied = needs[1].attention_copy_bytes - needs[0].attention_copy_bytes
        assert copied == 2 * facts.int8_kv_bytes * (not reads_pages)


def test_memory_plan_adds_up() -> None:
    plan = plan_memory(TINY, (0, 4), StageSetup(step_limits=LOAD), 40_000, requests=4)
    assert plan.weights == 4 * 1000 + 504, "tied: the embedding counts once"
    # Rows of a step, and float32 logits of its decode rows.
    assert plan.activations >= (8 + 2) * 10 * 2 + 2 * 50 * 4
    assert plan.kv == 4 * TINY.max_model_len * 4 * TINY.kv_bytes, "four requests of full length"
    assert plan.total == plan.weights + plan.activations + plan.graphs + plan.margin + plan.kv
    assert plan.margin > 0
    parts = str(plan).split(" + ")
    assert [part.split(" ")[-1] for part in parts] == ["weights", "activations", "margin", "KV"]
    assert parts[0] == "4.5 kB weights"


def test_larger_steps_leave_less_for_kv() -> None:
    small, large = (
        plan_memory(TINY, (0, 4), StageSetup(step_limits=StepLimits(rows, 2)), 40_000, requests=64)
        for rows in (8, 64)
    )
    assert large.activations > small.activations
    assert large.kv < small.kv


def test_graphs_are_planned_on_a_gpu_only() -> None:
    one, two = (
        plan_memory(TINY, (1, last), StageSetup(kind="cuda", step_limits=LOAD), GB)
        for last in (2, 3)
    )
    assert 0 < one.graphs < two.graphs
    assert two.weights == 2000
    assert plan_memory(TINY, (1, 3), StageSetup(step_limits=LOAD), GB).graphs == 0


def test_quantized_projections_keep_their_size() -> None:
    """Everything else doubles in float32."""
    plain = Footprint.of_stage(TINY, StageSetup(step_limits=LOAD))
    for mode, packed in (("int8", 460), ("nf4", 250)):
        target = StageSetup(bf16=False, quantize=mode, step_limits=LOAD)  # type: ignore[arg-type]
        need = Footprint.of_stage(TINY, target)
        assert need.layer_bytes == 2 * (1000 - 900) + packed
        assert need.token_bytes == 2 * plain.token_bytes
        assert need.step_bytes >= 2 * plain.step_bytes + 200 * 4, "room to unpack the widest weight"
        in_place = Footprint.of_stage(TINY, replace(target, has_block_kernels=True))
        assert in_place.step_bytes == need.step_bytes - 200 * 4, "nothing is unpacked"
        # In int8 a CPU repeats each row's scale along its columns.
        assert in_place.layer_bytes == need.layer_bytes + (460 // 16 if mode == "int8" else 0)
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
    said = str(caught.value)
    assert said == explain_refusal(LLAMA, (0, 24), gpu, 10 * GB)
    needs = re.search(r"layers 1-24 of llama need at least (.+) GB \(", said)
    assert needs is not None
    assert float(needs[1]) > 10
    assert "the budget is 10.0 GB" in said


@pytest.mark.parametrize(("last", "budget", "mode"), [(24, 10 * GB, "int8"), (32, 8 * GB, "nf4")])
def test_alternatives_of_a_refusal_fit(last: int, budget: int, mode: Quantize) -> None:
    gpu = StageSetup(kind="cuda")
    said = explain_refusal(LLAMA, (0, last), gpu, budget)
    advice = re.search(r"(\d+) layers would fit, or --quantize (\w+)$", said)
    assert advice is not None
    layers = int(advice[1])
    plan_memory(LLAMA, (0, layers), gpu, budget)
    with pytest.raises(UsageError):
        plan_memory(LLAMA, (0, layers + 1), gpu, budget)
    assert advice[2] == mode
    plan_memory(LLAMA, (0, last), replace(gpu, quantize=mode), budget)
    if mode == "nf4":
        with pytest.raises(UsageError):
            plan_memory(LLAMA, (0, last), replace(gpu, quantize="int8"), budget)


def test_refusal_without_alternatives() -> None:
    gpu = StageSetup(kind="cuda")
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
    # Every stage has its own step memory; only the last one has logits.
    assert sum(part.activations for part in parts) <= 2 * whole.activations
    assert sum(part.kv for part in parts) == whole.kv


def test_states_grow_with_the_pool_within_bounds() -> None:
    tokens = (0, 1, 2048 * 4, 2048 * 5, 2048 * 64, 10**9)
    assert [count_state_slots(count) for count in tokens] == [0, 4, 4, 5, 64, 64]
    assert count_pool_blocks(100, 10, 16, 0) == 10
    # Four states are the minimum; the rest are blocks.
    assert count_pool_blocks(399, 10, 16, 100) == 0
    assert count_pool_blocks(455, 10, 16, 100) == 5
    # Without KV, the number of states bounds the requests.
    assert count_pool_blocks(5 * 100, 0, 16, 100) * 16 < 6 * 2048
    assert count_pool_blocks(64 * 100, 0, 16, 100) == 2**31 - 1


@given(facts, targets, st.integers(0, 20 * MB), st.data())
@settings(max_examples=200, deadline=None)
def test_every_plan_with_recurrent_layers_stays_within_its_budget(
    model: ModelFacts, target: StageSetup, budget: int, data: st.DataObject
) -> None:
    recurrent = data.draw(st.sets(st.integers(0, model.layers - 1)))
    state = data.draw(st.integers(1, 2000))
    idle = data.draw(st.sets(st.integers(0, model.layers - 1))) - recurrent
    model = msgspec.structs.replace(
        model,
        recurrent_layers=tuple(sorted(recurrent)),
        state_bytes=state,
        mlp_layers=tuple(sorted(idle)),
        parallel_states=(parallel := data.draw(st.booleans())),
    )
    first = data.draw(st.integers(0, model.layers - 1))
    layers = (first, data.draw(st.integers(first + 1, model.layers)))
    count, need = layers[1] - first, Footprint.of_stage(model, target)
    tokens = data.draw(st.integers(0, 10**6))
    average, excess = need.average_pool_bytes(tokens)
    assert need.pool_bytes(layers, tokens) <= count * average + excess
    assert need.pool_bytes(layers, tokens) == sum(
        count_state_slots(tokens) * state * (layer in recurrent)
        + tokens * need.token_bytes * (parallel or layer not in recurrent)
        for layer in range(*layers)
        if layer not in idle
    )
    plan = planned(model, layers, target, budget)
    needs = need.min_bytes(count, opens=first == 0, closes=layers[1] == model.layers)
    if plan is None:
        assert needs > usable_bytes(budget)
    else:
        assert plan.total <= budget
        assert plan.kv >= need.pool_bytes(layers, need.min_tokens)


# --- experts in host memory -----------------------------------------------------------------------

EXPERTS = ExpertFacts(
    num_experts=8,
    top_k=2,
    least=LayerWeights(layer_bytes=640),
    most=LayerWeights(layer_bytes=800),
)
ON_CARD = StageSetup("cuda", host=StageSetup(), step_limits=LOAD)


def plan_mixture(lacking: int, expert_memory: int, experts: ExpertFacts = EXPERTS) -> MemoryPlan:
    """Plan all layers with ``lacking`` bytes less than they need."""
    facts = replace_facts(experts=experts)
    need = Footprint.of_stage(facts, ON_CARD).min_bytes(4, opens=True, closes=True)
    budget = need - lacking
    while usable_bytes(budget) < need - lacking:
        budget += need - lacking - usable_bytes(budget)
    return plan_memory(facts, (0, 4), ON_CARD, budget, expert_memory=expert_memory)


def test_as_few_experts_as_possible_are_in_host_memory() -> None:
    assert plan_mixture(0, 10 * MB).host_experts == 0
    # Moving one expert of a layer frees 80 bytes on the card, and takes 100 of host memory.
    for lacking, moved in ((1, 1), (320, 1), (321, 2), (8 * 320, 8)):
        plan = plan_mixture(lacking, 10 * MB)
        assert (plan.host_experts, plan.host_expert_bytes) == (moved, 4 * moved * 100)
        assert plan.total <= plan.budget
    assert "800 bytes experts in host memory" in str(plan_mixture(321, 10 * MB))


def test_layers_without_experts_move_nothing() -> None:
    dense = LayerWeights(layer_bytes=600)  # the largest layer less 400
    experts = msgspec.structs.replace(EXPERTS, dense_layers=(0, 2), dense=dense)
    assert plan_mixture(2 * 400, 10 * MB, experts).host_experts == 0
    plan = plan_mixture(2 * 400 + 1, 10 * MB, experts)
    assert (plan.host_experts, plan.host_expert_bytes) == (1, 2 * 1 * 100)
    assert plan_mixture(2 * 400 + 8 * 2 * 80, 10 * MB, experts).host_experts == 8
    with pytest.raises(UsageError, match="not even all experts in host memory"):
        plan_mixture(2 * 400 + 8 * 2 * 80 + 1, 10 * MB, experts)


def test_host_memory_that_is_too_small_is_refused_with_numbers() -> None:
    with pytest.raises(UsageError, match=r"--expert-memory \d+ bytes .*, 500 bytes are"):
        plan_mixture(321, 500)
    with pytest.raises(UsageError, match=r"--expert-memory \d+ bytes for experts"):
        plan_mixture(321, 0)
    with pytest.raises(UsageError, match="not even all experts"):
        plan_mixture(8 * 320 + 1, 10 * MB)
