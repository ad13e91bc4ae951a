import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.swarm.partition import Costs, Gap, Runner, share_out
from molink.swarm.placement import (
    MARGIN,
    MAX_STAGES,
    Candidate,
    Placement,
    Unplaceable,
    parse_range,
    place,
)
from molink.wire.control import ModelFacts

GB = 10**9


def facts(layers=8, layer=GB, first=GB // 2, last=GB // 2, kv=0, context=4096):
    return ModelFacts(
        name="m",
        layers=layers,
        layer_bytes=layer,
        first_bytes=first,
        last_bytes=last,
        kv_bytes=kv,
        context=context,
    )


def peer(name, memory=100 * GB, rate=10e9, stage="auto", bf16=True):
    return Candidate(name, name, memory, rate, stage, bf16)


def layers_of(placement):
    assert isinstance(placement, Placement), placement
    return {stage.peer: stage.layers for stage in placement.stages}


def test_equal_peers_share_equally_in_order_of_joining():
    placed = place(facts(layers=9, last=0), [peer("a"), peer("b"), peer("c")])
    assert layers_of(placed) == {"a": (0, 3), "b": (3, 6), "c": (6, 9)}


def test_the_output_head_counts_as_work_of_the_last_stage():
    placed = place(facts(layers=9, last=3 * GB), [peer("a"), peer("b"), peer("c")])
    assert layers_of(placed) == {"a": (0, 4), "b": (4, 8), "c": (8, 9)}
    assert placed.slowest == pytest.approx(0.4)
    assert placed.total == pytest.approx(1.2)


def test_a_faster_peer_takes_more():
    placed = place(facts(layers=9, last=0), [peer("a", rate=20e9), peer("b")])
    assert layers_of(placed) == {"a": (0, 6), "b": (6, 9)}


def test_unmeasured_peers_count_as_average():
    placed = place(facts(layers=8, last=0), [peer("a", rate=0.0), peer("b", rate=3e9)])
    assert layers_of(placed) == {"a": (0, 4), "b": (4, 8)}


def test_memory_limits_a_fast_peer_and_its_order():
    small = peer("fast", memory=int(3 * GB / (1 - MARGIN)) + 9, rate=100e9)
    placed = place(facts(layers=8), [small, peer("a"), peer("b")])
    # At an end of the model it would hold two layers, between the others three.
    assert layers_of(placed) == {"a": (0, 3), "fast": (3, 6), "b": (6, 8)}


def test_room_for_kv_is_kept():
    one = facts(layers=4, first=0, last=0, kv=GB // 2048, context=2048)
    memory = int(4 * (GB + GB // 2048 * 2048) / (1 - MARGIN)) + 9
    assert isinstance(place(one, [peer("a", memory=memory)]), Placement)
    assert isinstance(place(one, [peer("a", memory=memory - GB)]), Unplaceable)


def test_a_wider_dtype_needs_more():
    memory = int(10 * GB / (1 - MARGIN))
    assert isinstance(place(facts(), [peer("a", memory=memory)]), Placement)
    assert isinstance(place(facts(), [peer("a", memory=memory)], "bf16"), Placement)
    assert isinstance(place(facts(), [peer("a", memory=memory)], "f32"), Unplaceable)


def test_a_cpu_without_bf16_takes_fewer_layers():
    wide = peer("wide", memory=int(10 * GB / (1 - MARGIN)), bf16=False)
    found = place(facts(), [wide])
    assert isinstance(found, Unplaceable)
    assert "computes in f32" in found.reason
    assert isinstance(place(facts(), [wide], "bf16"), Placement)
    # Equal rates: it reads twice the bytes for each layer.
    placed = place(facts(layers=9, last=0), [peer("wide", bf16=False), peer("a")])
    assert layers_of(placed) == {"wide": (0, 3), "a": (3, 9)}


def test_explicit_ranges_are_respected_and_gaps_filled():
    placed = place(
        facts(layers=8, last=0),
        [peer("a"), peer("b", stage="2:5"), peer("c"), peer("watcher", stage="none")],
    )
    assert layers_of(placed) == {"a": (0, 2), "b": (2, 5), "c": (5, 8)}


def test_peers_without_room_for_a_layer_are_spares():
    placed = place(facts(), [peer("tiny", memory=GB // 2), peer("a")])
    assert layers_of(placed) == {"a": (0, 8)}
    assert placed.spares == ("tiny",)


def test_more_peers_than_layers():
    placed = place(facts(layers=2), [peer("slow", rate=1e9), peer("a"), peer("b")])
    assert layers_of(placed) == {"a": (0, 1), "b": (1, 2)}
    assert placed.spares == ("slow",)


def test_a_ring_has_a_bounded_number_of_stages():
    placed = place(facts(layers=40), [peer(f"p{i:02}") for i in range(MAX_STAGES + 3)])
    assert len(placed.stages) == MAX_STAGES
    assert len(placed.spares) == 3


def test_peers_that_fit_nowhere_beside_the_others_are_left_out():
    # Both ends are too much for `b`, and with two peers one of them is at each end.
    placed = place(facts(layers=4, first=5 * GB, last=5 * GB), [peer("a"), peer("b", 4 * GB)])
    assert layers_of(placed) == {"a": (0, 4)}
    assert placed.spares == ("b",)


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([], "no peer offers to run layers"),
        ([peer("a", stage="none")], "no peer offers to run layers"),
        (
            [peer("a", 6 * GB), peer("b", 4 * GB)],
            "m needs 9.0 GB and the swarm offers 9.0 GB on 2 peers, but no split fits",
        ),
        ([peer("a", 5 * GB)], "m needs 9.0 GB, the swarm offers 4.5 GB on 1 peer; add a peer"),
        (
            [peer("a", stage="0:5"), peer("b", stage="4:8")],
            r"the layers of a \(--stage 0:5\) and of b \(--stage 4:8\) overlap",
        ),
        ([peer("a", stage="0:5")], "no peer runs layers 5:8: 0 peers with --stage auto"),
        ([peer("a", stage="2:9")], "names layers that m doesn't have: it has 8"),
        ([peer("a", stage="0:8", memory=2 * GB)], "needs 9.0 GB for its layers, but has 1.8 GB"),
        (
            [peer("a", stage="0:4"), peer("b", memory=2 * GB)],
            "the rest of m needs 4.5 GB, the swarm offers 1.8 GB on 1 peer",
        ),
    ],
)
def test_the_reason_says_what_is_missing(candidates, reason):
    found = place(facts(), candidates)
    assert isinstance(found, Unplaceable)
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0:4", (0, 4)), ("auto", None), ("none", None), ("4", None), ("-1:4", None), ("a:b", None)],
)
def test_parse_range(text, expected):
    assert parse_range(text) == expected


def brute_force(gap, runners, costs):
    """The best (slowest, total) over every order and every composition."""
    best = None
    n = len(runners)
    for order in itertools.permutations(runners):
        for cuts in itertools.combinations(range(1, gap.layers), n - 1):
            counts = [b - a for a, b in itertools.pairwise((0, *cuts, gap.layers))]
            times = []
            for i, (runner, count) in enumerate(zip(order, counts, strict=True)):
                opens, closes = gap.opens and i == 0, gap.closes and i == n - 1
                if costs.memory(count, opens=opens, closes=closes) > runner.memory:
                    break
                times.append(costs.seconds(count, runner.rate, closes=closes))
            else:
                cost = (max(times), sum(times))
                best = cost if best is None else min(best, cost)
    return best


runners = st.lists(
    st.builds(Runner, st.just("p"), st.integers(0, 40), st.sampled_from([1.0, 2.0, 4.0, 8.0])),
    min_size=1,
    max_size=4,
)
costs = st.builds(
    Costs,
    layer_weights=st.integers(0, 6),
    layer_kv=st.integers(0, 2),
    first=st.integers(0, 8),
    last=st.integers(0, 8),
)


@given(runners, costs, st.integers(1, 7), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_split_is_better(runners, costs, layers, opens, closes):
    gap = Gap(0, layers, opens, closes)
    found = share_out([gap], runners, costs)
    expected = brute_force(gap, runners, costs)
    assert (found and (found[0].slowest, found[0].total)) == expected  # powers of two: exact


stages = st.one_of(
    st.just("auto"),
    st.just("none"),
    st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda t: f"{t[0]}:{t[0] + t[1]}"),
)
swarms = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0.0, 1.0, 3.0, 7.5]), stages), max_size=6
)


@given(swarms, st.integers(1, 10), costs)
@settings(max_examples=300, deadline=None)
def test_a_placement_covers_the_model_within_memory(swarm, layers, costs):
    model = facts(layers, costs.layer_weights, costs.first, costs.last, costs.layer_kv, 1)
    candidates = [peer(str(i), *values) for i, values in enumerate(swarm)]
    placed = place(model, candidates)
    assert placed == place(model, candidates)
    if isinstance(placed, Unplaceable):
        assert placed.reason
        return
    by_name = {candidate.peer: candidate for candidate in candidates}
    at = 0
    for stage in placed.stages:
        first, last = stage.layers
        assert first == at < last
        at = last
        candidate = by_name.pop(stage.peer)
        assert candidate.stage in ("auto", f"{first}:{last}")
        needs = costs.memory(last - first, opens=first == 0, closes=last == layers)
        assert needs <= candidate.memory * (1 - MARGIN)
    assert at == layers
    left = [c for c in by_name.values() if c.stage == "auto"]
    assert sorted(placed.spares) == sorted(c.peer for c in left)
    assert not [c for c in by_name.values() if ":" in c.stage]
