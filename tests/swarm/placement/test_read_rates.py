from dataclasses import replace

import msgspec
import pytest

from molink.facts.footprint import StageSetup
from molink.facts.model import ModelFacts
from molink.swarm.placement.placement import (
    STEP_OVERHEAD_S,
    Candidate,
    Placement,
    PlacementGoal,
    place_model,
)
from molink.swarm.placement.read_rates import (
    SLOWDOWN_HOLD,
    SLOWDOWN_TTL,
    ReadRates,
    is_significant,
    measured_rate,
)

GB = 10**9
FACTS = ModelFacts(
    name="toy",
    layers=10,
    layer_bytes=GB,
    first_bytes=GB,
    last_bytes=2 * GB,
    kv_bytes=1000,
    max_model_len=4096,
)


def pc(name: str, rate: float = 100e9, *, cuda: bool = True) -> Candidate:
    return Candidate(name, name, 100 * GB, rate, cuda=cuda)


def rates(paces: ReadRates, *candidates: Candidate) -> list[float]:
    return [one.read_rate for one in paces.apply_rates(candidates)]


def test_read_rate_is_bytes_over_step_time() -> None:
    setup, one = StageSetup(dtype="auto", quantize="none"), pc("a")
    assert measured_rate(FACTS, one, setup, (0, 5), 0.1 + STEP_OVERHEAD_S) == pytest.approx(50e9)
    assert measured_rate(FACTS, one, setup, (5, 10), 0.1 + STEP_OVERHEAD_S) == pytest.approx(70e9)
    assert measured_rate(FACTS, one, setup, (0, 5), STEP_OVERHEAD_S) == pytest.approx(
        10 * GB / STEP_OVERHEAD_S
    )


def test_unmeasured_peers_are_scaled_like_their_kind() -> None:
    paces = ReadRates()
    assert rates(paces, pc("a"), pc("b", 0.0)) == [100e9, 0.0]
    paces.record_profile("a", "profile", 60e9)
    assert rates(paces, pc("a"), pc("b", 200e9), pc("c", 10e9, cuda=False)) == [60e9, 120e9, 10e9]
    paces.drop_peer("a")
    assert rates(paces, pc("a"), pc("b", 200e9)) == [100e9, 200e9]


def test_devices_of_one_kind_are_equal() -> None:
    paces = ReadRates()
    slow, fast = (
        replace(pc("a", 30e9), device="RTX 3060"),
        replace(pc("b", 90e9), device="RTX 3060"),
    )
    other, busy = (
        replace(pc("c", 40e9), device="RTX 2060"),
        replace(pc("d", 2e9), device="RTX 3060"),
    )
    cpu, unknown = replace(pc("e", 30e9, cuda=False), device="RTX 3060"), pc("f", 30e9)
    found = rates(paces, slow, fast, other, busy, cpu, unknown)
    assert found == [90e9, 90e9, 40e9, 90e9, 30e9, 30e9]


def test_stages_of_one_kind_are_equal_until_confirmed() -> None:
    paces = ReadRates()
    one, other, third = (replace(pc(name), device="RTX 3060") for name in "abc")
    paces.record_profile("a", "profile", 60e9)
    paces.record_profile("b", "profile", 85e9)
    assert rates(paces, one, other, third) == [85e9, 85e9, 85e9], "a median of those measured: 72.5"
    assert rates(paces, pc("a"), pc("b")) == [60e9, 85e9], "unknown devices"
    paces.record_profile("a", "on a busy PC", 85e9 / 3)
    assert rates(paces, one, other) == [85e9, 85e9], "it was measured once"
    tell(paces, 1.0, 0.0, SLOWDOWN_HOLD)
    assert rates(paces, one, other) == [85e9, 85e9], "it may be so for a moment"
    tell(paces, 1.0, SLOWDOWN_HOLD, 1)
    assert rates(paces, one, other, third) == [85e9 / 3, 85e9, 85e9]
    tell(paces, 1 / 3, 2 * SLOWDOWN_HOLD, SLOWDOWN_HOLD + 1)
    assert rates(paces, one, other) == [85e9, 85e9]


def test_a_stage_that_is_a_little_slower_is_equal() -> None:
    paces = ReadRates()
    one, other = (replace(pc(name), device="RTX 3060") for name in "ab")
    paces.record_profile("a", "profile", 60e9)
    paces.record_profile("b", "profile", 85e9)
    tell(paces, 1.0, 0.0, 2 * SLOWDOWN_HOLD)
    assert rates(paces, one, other) == [85e9, 85e9]


def test_tiny_step_does_not_reveal_the_rate() -> None:
    assert not is_significant(pc("a"), 3 * STEP_OVERHEAD_S)
    assert is_significant(pc("a"), 5 * STEP_OVERHEAD_S)


def test_one_noisy_measurement_decides_no_placement() -> None:
    noisy = [
        replace(pc(name, rate), device="x")
        for name, rate in (("a", 30e9), ("b", 11e9), ("c", 28e9))
    ]
    found = place_model(
        msgspec.structs.replace(FACTS, layers=30),
        ReadRates().apply_rates(noisy),
        goal=PlacementGoal(min_stages=3),
    )
    assert isinstance(found, Placement)
    shares = sorted(last - first for first, last in (one.layers for one in found.stages))
    # Embedding and head weigh as much as three layers.
    assert max(shares) - min(shares) <= 4, shares


def ready(paces: ReadRates) -> None:
    paces.record_profile("a", "profile", 100e9)
    paces.mark_placed(paces.apply_rates([pc("a")]))


def tell(paces: ReadRates, pace: float, since: float, seconds: float) -> None:
    for step in range(round(seconds)):
        paces.record_slowdown("a", pace, since + step)


def test_slowdown_counts_after_holding() -> None:
    paces = ReadRates()
    ready(paces)
    tell(paces, 2.0, 0.0, SLOWDOWN_HOLD - 1)
    assert (paces.rate_of("a"), paces.has_changed) == (100e9, False)
    tell(paces, 2.1, SLOWDOWN_HOLD - 1, 2)
    assert (paces.rate_of("a"), paces.has_changed) == (50e9, True)
    paces.mark_placed(paces.apply_rates([pc("a")]))
    assert not paces.has_changed
    tell(paces, 2.2, SLOWDOWN_HOLD, 300)
    assert not paces.has_changed, "small changes are jitter"


def test_small_changes_are_ignored() -> None:
    paces = ReadRates()
    ready(paces)
    tell(paces, 1.2, 0.0, 3 * SLOWDOWN_HOLD)
    assert paces.rate_of("a") == pytest.approx(100e9 / 1.2)
    assert not paces.has_changed


def test_unreported_slowdown_expires() -> None:
    paces = ReadRates()
    ready(paces)
    tell(paces, 3.0, 0.0, 2 * SLOWDOWN_HOLD)
    paces.mark_placed(paces.apply_rates([pc("a")]))
    paces.expire_slowdowns(SLOWDOWN_HOLD + SLOWDOWN_TTL)
    assert not paces.has_changed
    tell(paces, 0.0, 3 * SLOWDOWN_HOLD, 1)
    paces.expire_slowdowns(2 * SLOWDOWN_HOLD + SLOWDOWN_TTL + 1)
    assert not paces.has_changed, "it still serves"
    paces.expire_slowdowns(3 * SLOWDOWN_HOLD + SLOWDOWN_TTL + 1)
    assert (paces.rate_of("a"), paces.has_changed) == (100e9, True)


def test_a_new_profile_replaces_no_confirmed_rate() -> None:
    paces = ReadRates()
    ready(paces)
    tell(paces, 2.0, 0.0, 2 * SLOWDOWN_HOLD)
    paces.record_profile("a", "another", 10e9)
    assert paces.rate_of("a") == 50e9, "the new one was measured once"
    tell(paces, 0.5, 2 * SLOWDOWN_HOLD, SLOWDOWN_HOLD + 1)
    assert paces.rate_of("a") == 20e9
    paces.expire_slowdowns(4 * SLOWDOWN_HOLD + SLOWDOWN_TTL)
    assert paces.rate_of("a") == 20e9, "it is no slower than its profile"


def test_unknown_peers_are_not_recorded() -> None:
    paces = ReadRates()
    tell(paces, 2.0, 0.0, 2 * SLOWDOWN_HOLD)
    assert paces.rate_of("a") is None
