import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.facts.footprint import Footprint, StageSetup
from molink.facts.layer_range import format_layers
from molink.facts.memory_plan import MARGIN_DIVISOR, plan_memory
from molink.facts.model import ModelFacts
from molink.swarm.placement.links import Links
from molink.swarm.placement.partition import Gap, StageCosts, StageHost, split_gaps
from molink.swarm.placement.placement import (
    MAX_STAGES,
    Candidate,
    Placement,
    PlacementGoal,
    Unplaceable,
    explain_misfit,
    place_model,
)

GB = 10**9
#: Fraction of a peer's memory that its plan leaves free.
MARGIN = 1 / MARGIN_DIVISOR


def facts(
    layers: int = 8,
    layer: int = GB,
    first: int = GB // 2,
    last: int = GB // 2,
    kv: int = 0,
    context: int = 4096,
    **more: int | str,
) -> ModelFacts:
    """A model whose rows take no memory, unless ``more`` says otherwise."""
    return ModelFacts(
        name="m",
        layers=layers,
        layer_bytes=layer,
        first_bytes=first,
        last_bytes=last,
        kv_bytes=kv,
        max_model_len=context,
        **more,
    )


def peer(
    name: str,
    memory: int = 100 * GB,
    rate: float = 10e9,
    stage: str = "auto",
    bf16: bool = True,
    cuda: bool = False,
) -> Candidate:
    return Candidate(name, name, memory, rate, stage, bf16, cuda, step_overhead=0.0)


def place(model: ModelFacts, peers: list[Candidate], dtype: str = "auto", **more: Any) -> Any:
    """A placement on as many peers as possible."""
    goal = PlacementGoal("throughput", MAX_STAGES)
    return place_model(model, peers, StageSetup(dtype=dtype, **more), goal=goal)


def memory_for(nbytes: float) -> int:
    """Memory with room for ``nbytes`` of weights and a step's needs."""
    return int((nbytes + 10_000_000) / (1 - MARGIN))


def layers_of(placement: Placement) -> dict[str, tuple[int, int]]:
    assert isinstance(placement, Placement), placement
    return {stage.peer: stage.layers for stage in placement.stages}


def test_equal_peers_get_equal_shares_in_joining_order() -> None:
    placed = place(facts(layers=9, last=0), [peer("a"), peer("b"), peer("c")])
    assert layers_of(placed) == {"a": (0, 3), "b": (3, 6), "c": (6, 9)}


def test_output_head_counts_for_the_last_stage() -> None:
    placed = place(facts(layers=9, last=3 * GB), [peer("a"), peer("b"), peer("c")])
    assert layers_of(placed) == {"a": (0, 4), "b": (4, 8), "c": (8, 9)}
    assert placed.slowest_time == pytest.approx(0.4)
    assert placed.total_time == pytest.approx(1.2)


def test_faster_peer_takes_more_layers() -> None:
    placed = place(facts(layers=9, last=0), [peer("a", rate=20e9), peer("b")])
    assert layers_of(placed) == {"a": (0, 6), "b": (6, 9)}


def test_unmeasured_peers_count_as_average() -> None:
    placed = place(facts(layers=8, last=0), [peer("a", rate=0.0), peer("b", rate=3e9)])
    assert layers_of(placed) == {"a": (0, 4), "b": (4, 8)}


def test_memory_limits_a_fast_peer_and_its_order() -> None:
    small = peer("fast", memory=memory_for(3 * GB), rate=100e9)
    placed = place(facts(layers=8), [small, peer("a"), peer("b")])
    # It can hold two layers at an end of the model, three in the middle.
    assert layers_of(placed) == {"a": (0, 3), "fast": (3, 6), "b": (6, 8)}


def test_room_for_kv_is_reserved() -> None:
    one = facts(layers=4, first=0, last=0, kv=GB // 2048, context=2048)
    needs = Footprint.of_stage(one, StageSetup()).min_bytes(4, opens=True, closes=True)
    assert needs > 4 * (GB + GB // 2048 * 2048)
    memory = int(needs / (1 - MARGIN)) + 9
    assert isinstance(place(one, [peer("a", memory=memory)]), Placement)
    assert isinstance(place(one, [peer("a", memory=memory - GB)]), Unplaceable)


def test_a_wider_dtype_needs_more() -> None:
    memory = memory_for(10 * GB)
    assert isinstance(place(facts(), [peer("a", memory=memory)]), Placement)
    assert isinstance(place(facts(), [peer("a", memory=memory)], "bf16"), Placement)
    assert isinstance(place(facts(), [peer("a", memory=memory)], "f32"), Unplaceable)


def test_a_cpu_without_bf16_takes_fewer_layers() -> None:
    wide = peer("wide", memory=memory_for(10 * GB), bf16=False)
    found = place(facts(), [wide])
    assert isinstance(found, Unplaceable)
    assert "computes in f32" in found.reason
    assert isinstance(place(facts(), [wide], "bf16"), Placement)
    # Equal rates, but twice the bytes per layer.
    placed = place(facts(layers=9, last=0), [peer("wide", bf16=False), peer("a")])
    assert layers_of(placed) == {"wide": (0, 3), "a": (3, 9)}


def test_draft_model_needs_room_on_the_first_stage() -> None:
    model, memory = facts(layers=8, first=0, last=0), memory_for(5 * GB)
    peers = [replace(peer(name, memory), draft_bytes=2 * GB) for name in "ab"]
    assert layers_of(place(model, peers)) == {"a": (0, 3), "b": (3, 8)}
    without = [replace(one, draft_bytes=0) for one in peers]
    assert layers_of(place(model, without)) == {"a": (0, 4), "b": (4, 8)}
    # One more PC is preferred to dropping the draft model.
    assert len(layers_of(place_model(model, [*peers, peer("c", memory)]))) == 2
    tight = [replace(one, draft_bytes=3 * GB) for one in (*peers, peer("c", memory))]
    assert len(layers_of(place_model(model, tight))) == 3
    # Also with named layers.
    named = [replace(peer("a", memory, stage="1-4"), draft_bytes=GB), peer("b", memory)]
    assert layers_of(place(model, named)) == {"a": (0, 4), "b": (4, 8)}


def test_draft_model_without_room_is_dropped() -> None:
    model, memory = facts(layers=8, first=0, last=0), memory_for(5 * GB)
    peers = [replace(peer(name, memory), draft_bytes=3 * GB) for name in "ab"]
    assert layers_of(place(model, peers)) == {"a": (0, 4), "b": (4, 8)}
    named = [replace(peer("a", memory, stage="1-5"), draft_bytes=GB), peer("b", memory)]
    assert layers_of(place(model, named)) == {"a": (0, 5), "b": (5, 8)}
    found = place(facts(layers=20), peers)
    assert isinstance(found, Unplaceable)
    assert "needs" in found.reason


def test_explicit_ranges_are_respected_and_gaps_filled() -> None:
    placed = place(
        facts(layers=8, last=0),
        [peer("a"), peer("b", stage="3-5"), peer("c"), peer("watcher", stage="none")],
    )
    assert layers_of(placed) == {"a": (0, 2), "b": (2, 5), "c": (5, 8)}


def test_peers_without_room_for_a_layer_are_spares() -> None:
    placed = place(facts(), [peer("tiny", memory=GB // 2), peer("a")])
    assert layers_of(placed) == {"a": (0, 8)}
    assert placed.spare_peers == ("tiny",)


def test_more_peers_than_layers() -> None:
    placed = place(facts(layers=2), [peer("slow", rate=1e9), peer("a"), peer("b")])
    assert layers_of(placed) == {"a": (0, 1), "b": (1, 2)}
    assert placed.spare_peers == ("slow",)


def test_a_ring_has_a_bounded_number_of_stages() -> None:
    placed = place(facts(layers=40), [peer(f"p{i:02}") for i in range(MAX_STAGES + 3)])
    assert len(placed.stages) == MAX_STAGES
    assert len(placed.spare_peers) == 3


def test_peers_that_fit_nowhere_are_spares() -> None:
    # `b` cannot hold both ends; with two peers each holds one.
    placed = place(facts(layers=4, first=5 * GB, last=5 * GB), [peer("a"), peer("b", 4 * GB)])
    assert layers_of(placed) == {"a": (0, 4)}
    assert placed.spare_peers == ("b",)


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([], "no PC offers to hold layers"),
        ([peer("a", stage="none")], "no PC offers to hold layers"),
        (
            [peer("a", 56 * GB // 10), peer("b", 4 * GB)],
            "m needs 9.0 GB and the swarm offers 9.1 GB on 2 peers, but no split fits",
        ),
        (
            [peer("a", 5 * GB)],
            "m needs 9.0 GB, the swarm offers 4.8 GB on 1 peer: room for 4 of 8 layers; add a peer",
        ),
        (
            [peer("a", stage="1-5"), peer("b", stage="5-8")],
            r"the layers of a \(--stage 1-5\) and of b \(--stage 5-8\) overlap",
        ),
        ([peer("a", stage="1-5")], "no PC holds layers 6-8: 0 PCs with --stage auto"),
        ([peer("a", stage="3-9")], "names layers that m doesn't have: it has 8"),
        (
            [peer("a", stage="1-8", memory=2 * GB)],
            r"a \(--stage 1-8\): layers 1-8 of m need at least 9.1 GB \(9.0 GB weights .* budget "
            "is 2.0 GB: 1 layer would fit",
        ),
        (
            [peer("a", stage="1-4"), peer("b", memory=2 * GB)],
            "the rest of m needs 4.5 GB, the swarm offers 1.9 GB on 1 peer",
        ),
    ],
)
def test_reason_names_what_is_missing(candidates: list[Candidate], reason: str) -> None:
    found = place(facts(), candidates)
    assert isinstance(found, Unplaceable)
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize("named", ["1", "1-2", "2-8", "3-8"])
def test_no_peer_may_cut_the_first_layers(named: str) -> None:
    found = place(facts(first_layers=3), [peer("a", stage=named)])
    assert isinstance(found, Unplaceable)
    assert f"a (--stage {named}) cuts layers 1-3 of m, which one stage must hold" in found.reason


def test_a_small_peer_does_not_open_the_ring() -> None:
    peers = [peer("a", 3 * GB), peer("b", 9 * GB)]
    found = place(facts(first_layers=3), peers)
    assert isinstance(found, Placement)
    assert [stage.peer for stage in found.stages] == ["b", "a"]


#: Projections are nine tenths of a layer; quantized they take a half or a quarter.
SHRINKS = {
    "projection_bytes": GB * 9 // 10,
    "int8_bytes": GB * 9 // 20,
    "nf4_bytes": GB * 9 // 40,
}


def test_quantized_layers_are_smaller_and_faster() -> None:
    model = facts(**SHRINKS)
    peers = [peer("a", memory=memory_for(4 * GB))]
    assert isinstance(place(model, peers), Unplaceable)
    assert isinstance(place(model, peers, quantize="int8"), Unplaceable)
    placed = place(model, peers, quantize="nf4")
    assert layers_of(placed) == {"a": (0, 8)}
    # 8 × (0.1 + 0.225) GB and the output head.
    assert placed.slowest_time == pytest.approx((8 * 0.325 + 0.5) / 10)


def test_widening_skips_quantized_projections() -> None:
    model = facts(layers=9, first=0, last=0, **SHRINKS)
    wide = [peer("wide", bf16=False), peer("a")]
    # 0.2 + 0.225 GB for each layer there, 0.1 + 0.225 GB here.
    assert layers_of(place(model, wide, quantize="nf4")) == {"wide": (0, 4), "a": (4, 9)}
    tight = [peer("wide", memory=memory_for(9 * 0.425 * GB + 30_000_000), bf16=False)]
    assert isinstance(place(model, tight, quantize="nf4"), Placement)


def test_prequantized_files_need_no_option() -> None:
    peers = [peer("a", memory=memory_for(4 * GB))]
    assert isinstance(place(facts(**SHRINKS, quantized="nf4"), peers), Placement)


def test_reason_suggests_the_mildest_quantization() -> None:
    model = facts(**SHRINKS)
    for memory, stage, hint in [
        (6 * GB, "auto", r"serve it with --quantize int8$"),
        (4 * GB, "auto", r"serve it with --quantize nf4$"),
        (GB, "auto", r"serve a smaller model$"),
        (6 * GB, "1-8", r"5 layers would fit, or --quantize int8$"),
        (4 * GB, "1-8", r"3 layers would fit, or --quantize nf4$"),
        (GB // 4, "1-8", r"no layer would fit$"),
    ]:
        found = place(model, [peer("a", memory=memory_for(memory), stage=stage)])
        assert isinstance(found, Unplaceable)
        assert re.search(hint, found.reason), found.reason
    found = place(facts(), [peer("a", memory=4 * GB)])  # its projections are unknown
    assert "--quantize" not in found.reason


def test_gpu_reserves_room_for_graphs() -> None:
    memory = memory_for(9 * GB)
    assert isinstance(place(facts(), [peer("a", memory=memory)]), Placement)
    gpu = place(facts(), [peer("a", memory=memory, cuda=True, stage="1-8")])
    assert isinstance(gpu, Unplaceable)
    assert "41.9 MB CUDA graphs" in gpu.reason


def brute_force(gap: Gap, runners: list[StageHost]) -> tuple[float, float] | None:
    """The best (slowest, total) over all orders and compositions."""
    best = None
    n = len(runners)
    for order in itertools.permutations(runners):
        for cuts in itertools.combinations(range(1, gap.layers), n - 1):
            counts = [b - a for a, b in itertools.pairwise((0, *cuts, gap.layers))]
            times = []
            for i, (host, count) in enumerate(zip(order, counts, strict=True)):
                opens, closes = gap.opens and i == 0, gap.closes and i == n - 1
                if host.costs.memory_needed(count, opens=opens, closes=closes) > host.memory:
                    break
                if opens and count < host.costs.first_layers:
                    break
                times.append(host.costs.step_time(count, host.rate, closes=closes))
            else:
                cost = (max(times), sum(times))
                best = cost if best is None else min(best, cost)
    return best


costs = st.builds(
    StageCosts,
    layer_weights=st.integers(0, 6),
    layer_room=st.integers(0, 2),
    first=st.integers(0, 8),
    last=st.integers(0, 8),
    stage=st.integers(0, 2),
    logits=st.integers(0, 2),
    first_layers=st.integers(1, 3),
)
runners = st.lists(
    st.builds(
        StageHost, st.just("p"), st.integers(0, 40), st.sampled_from([1.0, 2.0, 4.0, 8.0]), costs
    ),
    min_size=1,
    max_size=4,
)


@given(runners, st.integers(1, 7), st.booleans(), st.booleans())
@settings(max_examples=75, deadline=None)
def test_split_is_optimal(runners: list[StageHost], layers: int, opens: bool, closes: bool) -> None:
    gap = Gap(0, layers, opens, closes)
    found = split_gaps([gap], runners)
    expected = brute_force(gap, runners)
    assert (
        found and (found[0].slowest_time, found[0].total_time)
    ) == expected  # powers of two: exact


stages = st.one_of(
    st.just("auto"),
    st.just("none"),
    st.tuples(st.integers(0, 6), st.integers(1, 4)).map(
        lambda t: format_layers((t[0], t[0] + t[1]))
    ),
)
swarms = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from([0.0, 1.0, 3.0, 7.5, 1e-320, math.inf, math.nan]),
        stages,
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)
models = st.builds(
    facts,
    st.integers(1, 10),
    layer=st.integers(0, 6 << 20),
    first=st.integers(0, 8 << 20),
    last=st.integers(0, 8 << 20),
    kv=st.integers(0, 512),
    context=st.sampled_from([1, 100, 4096]),
    projection_bytes=st.just(0),
    row_elements=st.integers(0, 100),
    vocabulary=st.integers(0, 1000),
    first_layers=st.integers(1, 3),
)


@given(swarms, models, st.sampled_from(["auto", "f32", "bf16"]))
@settings(max_examples=100, deadline=None)
def test_a_placement_covers_the_model_within_memory(
    swarm: list[tuple[int, float, str, bool, bool]], model: ModelFacts, dtype: str
) -> None:
    candidates = [peer(str(i), memory << 20, *values) for i, (memory, *values) in enumerate(swarm)]
    placed = place(model, candidates, dtype)
    assert placed == place(model, candidates, dtype)
    if isinstance(placed, Unplaceable):
        assert placed.reason
        return
    by_name = {candidate.peer: candidate for candidate in candidates}
    at = 0
    for stage in placed.stages:
        first, last = stage.layers
        assert first == at < last
        assert first or last >= model.first_layers
        at = last
        candidate = by_name.pop(stage.peer)
        assert candidate.stage in ("auto", format_layers((first, last)))
        kind = "cuda" if candidate.cuda else "cpu"
        target = StageSetup(kind=kind, bf16=candidate.bf16, dtype=dtype)
        # The stage fits the memory plan of the peer's own daemon.
        plan = plan_memory(model, stage.layers, target, candidate.memory)
        assert plan.total <= candidate.memory
    assert at == model.layers
    left = [c for c in by_name.values() if c.stage == "auto"]
    assert sorted(placed.spare_peers) == sorted(c.peer for c in left)
    assert all(explain_misfit(c.stage, model) for c in by_name.values() if ":" in c.stage)


@given(models, st.integers(0, 12), st.booleans(), st.booleans(), st.sampled_from(["cpu", "cuda"]))
def test_costs_are_those_of_the_footprint(
    model: ModelFacts, layers: int, opens: bool, closes: bool, kind: str
) -> None:
    need = Footprint.of_stage(model, StageSetup(kind=kind))
    expected = need.min_bytes(layers, opens=opens, closes=closes)
    assert (
        StageCosts.from_footprint(need).memory_needed(layers, opens=opens, closes=closes)
        == expected
    )


# --- over links ----------------------------------------------------------------------------------


def over(latency: float, *names: str) -> Links:
    """Links of ``latency`` seconds between all of these peers."""
    links = Links()
    for by, to in itertools.permutations(names, 2):
        links.record_measurement(by, to, latency, None)
    return links


def ring(placed: Placement | Unplaceable) -> list[str]:
    assert isinstance(placed, Placement), placed
    return [stage.peer for stage in placed.stages]


def test_single_sufficient_peer_is_chosen() -> None:
    placed = place_model(facts(), [peer("a"), peer("b", rate=20e9), peer("c")])
    assert ring(placed) == ["b"]
    assert placed.spare_peers == ("a", "c")
    assert placed.round_trip_time == placed.cost == pytest.approx(8.5 / 20)
    wanted = place_model(
        facts(), [peer("a"), peer("b"), peer("c")], goal=PlacementGoal("latency", 2)
    )
    assert ring(wanted) == ["a", "b"]


def test_throughput_uses_more_stages() -> None:
    peers = [peer("a"), peer("b"), peer("c")]
    assert len(ring(place_model(facts(), peers, goal=PlacementGoal("throughput")))) == 3
    far = place_model(facts(), peers, goal=PlacementGoal("throughput"), links=over(30.0, *"abc"))
    assert len(ring(far)) == 1


def test_room_for_a_conversation_is_worth_a_link() -> None:
    # 8.5 GB of weights, and 1 GB for each 1000 tokens.
    model = facts(kv=GB // 8000, context=32768)
    for memory, stages in ((20, 1), (14, 2)):
        peers = [peer("a", memory_for(memory * GB)), peer("b", memory_for(memory * GB))]
        found = place_model(model, peers, links=over(0.03, *"ab"))
        assert len(ring(found)) == stages
        assert found.kv_tokens == 8192
    alone = place_model(model, [peer("a", memory_for(14 * GB))])
    assert alone.kv_tokens == 2048
    # A serving ring with less context is replaced.
    serving = [("a", (0, 8))]
    assert ring(place_model(model, peers, serving=serving)) != ["a"]


def test_serving_ring_stays_without_a_clear_gain() -> None:
    peers = [peer("a"), peer("b", rate=10.9e9), peer("c", rate=12e9)]
    assert ring(place_model(facts(), peers[:2], serving=[("a", (0, 8))])) == ["a"]
    assert ring(place_model(facts(), peers, serving=[("a", (0, 8))])) == ["c"]
    # Too few stages, an unknown peer, or layers without room.
    pair = place_model(facts(), peers, goal=PlacementGoal("latency", 2), serving=[("a", (0, 8))])
    assert len(ring(pair)) == 2
    assert ring(place_model(facts(), peers[:2], serving=[("z", (0, 8))])) == ["b"]
    small = [peer("a", memory_for(3 * GB)), peer("b")]
    assert ring(place_model(facts(), small, serving=[("a", (0, 8))])) == ["b"]


def test_closed_ports_are_named_if_memory_suffices() -> None:
    closed = frozenset("ab")
    peers = [
        replace(peer(name, memory_for(5 * GB)), unreachable=closed - {name}) for name in ("a", "b")
    ]
    found = place_model(facts(), peers)
    assert isinstance(found, Unplaceable)
    assert "no ring of peers that can connect to each other has room for it" in found.reason


def test_named_layers_bypass_the_search() -> None:
    peers = [peer("a", stage="1-2"), peer("b"), peer("c", rate=1e9)]
    assert sorted(ring(place_model(facts(), peers, links=over(5.0, *"abc")))) == ["a", "b", "c"]


def near_links(*peers: str) -> Links:
    links = Links()
    for one, other in itertools.permutations(peers, 2):
        links.record_measurement(one, other, 0.02, 5e6)
    return links


def place_quickly(links: Links, **more: Any) -> list[str]:
    """The ring on two of the three PCs, for a model that needs two."""
    peers = [peer(name, memory=memory_for(5 * GB)) for name in "abc"]
    placed = place_model(facts(hidden=4096), peers, links=links, **more)
    assert isinstance(placed, Placement)
    return [stage.peer for stage in placed.stages]


def test_lossy_link_is_avoided() -> None:
    links = near_links("a", "b", "c")
    assert place_quickly(links) == ["a", "b"]
    links.record_measurement("b", "a", None, None, 0.02)
    links.record_measurement("a", "c", None, None, 0.001)
    assert place_quickly(links) == ["b", "c"]


def test_slow_uplink_closes_the_ring() -> None:
    links = near_links("a", "b", "c")
    for other in "bc":
        links.record_measurement("a", other, None, 2e5)
    assert place_quickly(links) == ["b", "c"]
    for pair in (("b", "c"), ("c", "b")):
        links.record_measurement(*pair, 0.5, None)
    assert place_quickly(links) == ["b", "a"]


def test_ring_is_near_those_who_ask() -> None:
    links = near_links("a", "b", "c", "endpoint")
    links.record_measurement("endpoint", "b", 0.001, None)
    links.record_measurement("b", "endpoint", 0.001, None)
    assert place_quickly(links, askers={"endpoint": 1.0})[0] == "b"
    assert place_quickly(links, askers={"endpoint": 1.0, "c": 9.0})[0] == "c"
    assert place_quickly(links, askers={"stranger": 0.0}) == ["a", "b"]
