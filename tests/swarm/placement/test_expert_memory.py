"""Placement counts experts in host memory: both memories, and both speeds."""

import itertools
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.checkpoint.hub_catalog import load_catalog
from molink.facts.device import ExpertHost
from molink.facts.footprint import StageSetup
from molink.facts.memory_plan import plan_memory
from molink.facts.model import ExpertFacts, LayerWeights, ModelFacts
from molink.sim.data_sheet_candidates import make_candidate
from molink.sim.model_description import ModelDescription
from molink.swarm.placement.partition import LinearTime, split_layers
from molink.swarm.placement.placement import (
    Candidate,
    Placement,
    PlacementGoal,
    Unplaceable,
    place_model,
    stage_setup,
)
from molink.swarm.placement.read_rates import measured_rate

GB = 10**9
SETUP = StageSetup()


def with_host(candidate: Candidate, gigabytes: float, rate: float = 60e9) -> Candidate:
    host = ExpertHost(
        memory=int(gigabytes * GB),
        read_rate=rate,
        bf16=False,
        narrow_dtypes=("bf16",),
        has_block_kernels=True,
    )
    return replace(candidate, expert_host=host)


#: A PC with 24 GB and 64 GB of RAM, of which experts may use 56, and one with 8 GB and 32 GB.
LARGE, SMALL = make_candidate("large", "rtx4090"), make_candidate("small", "rtx4060")
BOTH = [with_host(LARGE, 56), with_host(SMALL, 26)]


def describe(name: str) -> ModelFacts:
    entry = load_catalog().find_entry(name)
    assert entry is not None
    return ModelDescription.from_catalog(entry).facts


def check_plans(facts: ModelFacts, placed: Placement, candidates: list[Candidate]) -> list[int]:
    """Check each stage by its peer's own plan; returns its numbers of experts in host memory."""
    by_peer, moved = {one.peer: one for one in candidates}, []
    for stage in placed.stages:
        peer = by_peer[stage.peer]
        memory = 0 if peer.expert_host is None else peer.expert_host.memory
        plan = plan_memory(
            facts, stage.layers, stage_setup(peer, SETUP), peer.memory, expert_memory=memory
        )
        assert plan.total <= peer.memory
        assert plan.host_expert_bytes <= memory
        moved.append(plan.host_experts)
    return moved


def test_a_mixture_that_fits_no_cards_fits_two_unequal_pcs() -> None:
    facts = describe("glm4.5:106b-a12b")
    assert isinstance(place_model(facts, [LARGE, SMALL]), Unplaceable)
    for one in BOTH:
        assert isinstance(place_model(facts, [one]), Unplaceable)
    placed = place_model(facts, BOTH)
    assert isinstance(placed, Placement)
    counts = {one.peer: one.layers[1] - one.layers[0] for one in placed.stages}
    # The larger one has 2.4 times the memory.
    assert counts["large"] > 2 * counts["small"] > 0
    moved = check_plans(facts, placed, BOTH)
    assert all(0 < count < 128 for count in moved)


def test_one_pc_is_faster_than_two_where_its_memories_suffice() -> None:
    facts = describe("gpt-oss:120b")
    placed = place_model(facts, BOTH)
    assert isinstance(placed, Placement)
    assert [one.peer for one in placed.stages] == ["large"]
    assert check_plans(facts, placed, BOTH)[0] > 64
    # Both speeds count: the CPU reads its experts, and the card the rest.
    fast, slow = (place_model(facts, [with_host(LARGE, 56, rate)]) for rate in (60e9, 15e9))
    assert isinstance(fast, Placement)
    assert isinstance(slow, Placement)
    assert slow.total_time > 2.5 * fast.total_time
    cpu = make_candidate("cpu", "cpu-8core")
    alone = place_model(facts, [replace(cpu, memory=80 * GB, read_rate=60e9)])
    assert isinstance(alone, Placement)
    assert alone.total_time > 2 * fast.total_time


def test_a_mixture_that_fits_the_card_stays_there() -> None:
    facts = describe("gpt-oss:20b")
    placed = place_model(facts, [with_host(LARGE, 56)])
    assert isinstance(placed, Placement)
    assert placed == place_model(facts, [LARGE])
    assert check_plans(facts, placed, [with_host(LARGE, 56)]) == [0]


def test_a_stage_reads_only_chosen_experts() -> None:
    facts = describe("gpt-oss:20b")
    (stage,) = place_model(facts, [LARGE]).stages
    assert stage.seconds < 0.006  # 3.6 of 21 billion weights
    rate = measured_rate(facts, LARGE, SETUP, stage.layers, stage.seconds)
    assert rate == pytest.approx(LARGE.read_rate, rel=0.01)
    busy = place_model(facts, [LARGE], goal=PlacementGoal("throughput"))
    assert busy.stages[0].seconds > 2 * stage.seconds  # 16 rows choose more


def test_measured_rates_of_two_memories_change_together() -> None:
    facts, candidate = describe("gpt-oss:120b"), with_host(LARGE, 56)
    (stage,) = place_model(facts, [candidate]).stages
    for factor in (1.0, 2.0):
        rate = measured_rate(facts, candidate, SETUP, stage.layers, factor * stage.seconds)
        assert factor * rate == pytest.approx(candidate.read_rate, rel=0.01)


MIXTURE = ModelFacts(
    name="m",
    layers=6,
    layer_bytes=1000 << 10,
    first_bytes=300 << 10,
    last_bytes=300 << 10,
    kv_bytes=64,
    max_model_len=2048,
    row_elements=20,
    hidden=8,
    vocabulary=100,
    experts=ExpertFacts(
        num_experts=8,
        top_k=2,
        least=LayerWeights(layer_bytes=700 << 10),
        most=LayerWeights(layer_bytes=800 << 10),
        dense_layers=(0, 3),
        dense=LayerWeights(layer_bytes=500 << 10),
    ),
)
pcs = st.lists(
    st.tuples(st.integers(0, 8 << 20), st.integers(0, 6 << 20), st.sampled_from([1e6, 1e8])),
    min_size=1,
    max_size=4,
)


@given(pcs)
@settings(max_examples=60, deadline=None)
def test_every_stage_fits_both_memories(pcs: list[tuple[int, int, float]]) -> None:
    candidates = [
        replace(
            with_host(Candidate(str(i), str(i), memory, 1e9, cuda=True), host / GB), stage="auto"
        )
        for i, (memory, host, _) in enumerate(pcs)
    ]
    placed = place_model(MIXTURE, candidates)
    if isinstance(placed, Placement):
        check_plans(MIXTURE, placed, candidates)
        assert placed.stages[-1].layers[1] == 6


lines = st.builds(
    LinearTime,
    st.integers(1, 6),
    st.integers(0, 4).map(float),
    st.integers(0, 4).map(float),
    st.one_of(st.just(inf), st.integers(-1, 5).map(float)),
    st.integers(0, 4).map(float),
)


@given(st.lists(lines, min_size=1, max_size=3), st.integers(1, 9), st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_splits_over_bent_times_are_optimal(
    stages: list[LinearTime], layers: int, ceiling: int
) -> None:
    for stage in stages:
        fitting = [n for n in range(stage.max_layers + 1) if stage.time_of(n) <= ceiling]
        assert stage.max_within(ceiling) == max(fitting, default=0) or not fitting
    every = [
        sum(stage.time_of(n) for stage, n in zip(stages, counts, strict=True))
        for counts in itertools.product(*(range(1, stage.max_layers + 1) for stage in stages))
        if sum(counts) == layers
        and all(stage.time_of(n) <= ceiling for stage, n in zip(stages, counts, strict=True))
    ]
    found = split_layers(layers, stages, ceiling)
    assert (found is None) == (not every)
    if found is not None:
        assert sum(found) == layers
        total = sum(stage.time_of(n) for stage, n in zip(stages, found, strict=True))
        assert total == pytest.approx(min(every))
