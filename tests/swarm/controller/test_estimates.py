from typing import Any

import msgspec
import pytest

from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.swarm.controller.estimates import (
    CACHE_INTERVAL,
    PROMPT_TOKENS,
    CachedEstimates,
    estimate_scale_out,
    predict_ttft,
)
from molink.swarm.controller.events import ConnectionTriedEvent, PeerReportedEvent
from molink.swarm.controller.status import build_status
from molink.swarm.controller.status_schema import ScaleOutStatus
from molink.swarm.placement.links import ASSUMED_LATENCY, ASSUMED_RATE, Links
from molink.wire.messages.instructions import Assign
from tests.support.fake_fleet import GB, FakeFleet, Kit

#: Step times of three of six layers of 1 GB each.
STEP_S = 0.3
CHUNK_S = 0.5
#: 10 ms per row, from 64 rows on.
STAGE = Profile(decode=((1, 0.01),), prefill=((64, 0.64), (1024, 10.24)))
#: A row of 1000 bytes takes 1 ms and a token 0.064 ms; the latency is 50 ms.
LINK = LinkFacts(0.05, 1e6)


def swarm(kit: Kit, memory: int = 4, **serve: Any) -> FakeFleet:
    """A and B hold half of the model each."""
    fake = kit.FakeFleet("a", "b", min_peers=2)
    fake.serve(min_stages=1, **serve)
    for name in "ab":
        fake.report(name, memory=memory * GB)
    fake.handle_event(ConnectionTriedEvent("a", "b", succeeded=True, latency=0.05, rate=1e6))
    fake.handle_event(ConnectionTriedEvent("b", "a", succeeded=True, latency=0.05, rate=1e6))
    fake.wait(1.25, *"ab")
    for peer, message in fake.pop_messages():
        if isinstance(message, Assign):
            profile = Profile(decode=((1, STEP_S),), prefill=((64, CHUNK_S),))
            fake.loaded(message, peer, profile=profile)
    fake.obey()
    return fake


def test_extra_pc_does_not_help_one_stream(kit: Kit) -> None:
    fake = swarm(kit)
    found = estimate_scale_out(fake.reconciler, fake.now)
    (more,) = found.more
    assert more.device == "cpu: CPU"
    assert found.now.stages == more.stages == 2
    assert found.now.round_trip_s == pytest.approx(2 * STEP_S + 0.1, rel=0.01)
    assert more.round_trip_s == pytest.approx(found.now.round_trip_s)


def test_extra_pc_helps_many_streams(kit: Kit) -> None:
    fake = swarm(kit, objective="throughput")
    found = estimate_scale_out(fake.reconciler, fake.now)
    (more,) = found.more
    assert (found.now.stages, more.stages) == (2, 3)
    assert more.tokens_per_s > 1.3 * found.now.tokens_per_s


def test_no_estimate_without_a_placed_ring(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    for name, stage in (("a", "1-3"), ("b", "4-6")):
        fake.report(name, stage=stage)
    fake.wait(1.25, *"ab")
    assert estimate_scale_out(fake.reconciler, fake.now) == ScaleOutStatus(), "not ready"
    fake.obey()
    assert fake.reconciler.is_ready
    found = estimate_scale_out(fake.reconciler, fake.now)
    assert (found.now, found.more) == (None, ())


def test_status_applies_current_slowdowns(kit: Kit) -> None:
    fake = swarm(kit)

    def steps() -> list[float]:
        (pipeline,) = build_status(fake.fleet, "s", (), 1).pipelines
        return [one.decode_s for one in pipeline.stages]

    assert steps() == [STEP_S, STEP_S]
    old = fake.reconciler.registry.sessions["b"].report
    workers = tuple(msgspec.structs.replace(one, slowdown=2.0) for one in old.workers)
    fake.handle_event(PeerReportedEvent("b", msgspec.structs.replace(old, workers=workers)))
    assert sorted(steps()) == [STEP_S, 2 * STEP_S]


def test_new_peer_gets_median_links() -> None:
    links = Links()
    assert links.with_newcomer("n", ["a"]).latency_and_rate("n", "a") == (
        ASSUMED_LATENCY,
        ASSUMED_RATE,
    )
    links.record_measurement("a", "b", 0.01, 1e6)
    links.record_measurement("b", "a", 0.03, None)
    links.record_measurement("a", "gone", 0.9, 1.0)
    joined = links.with_newcomer("n", ["a", "b"])
    assert joined.latency_and_rate("n", "a") == joined.latency_and_rate("b", "n") == (0.02, 1e6)
    assert joined.latency_and_rate("a", "b") == links.latency_and_rate("a", "b")
    assert not links.is_measured("n", "a")


def test_ttft_is_estimated(kit: Kit) -> None:
    fake = swarm(kit)
    (found,) = CachedEstimates(fake.fleet).estimate_at(100.0).values()
    assert found.prompt == PROMPT_TOKENS
    chunks = PROMPT_TOKENS / 64
    assert chunks * CHUNK_S < found.first_token_s < 2 * chunks * CHUNK_S + 0.5


def test_estimates_are_cached(kit: Kit) -> None:
    fake = swarm(kit)
    estimates = CachedEstimates(fake.fleet)
    first = estimates.estimate_at(100.0)
    fake.handle_event(ConnectionTriedEvent("a", "b", succeeded=True, latency=0.5, rate=1e6))
    assert estimates.estimate_at(100.0 + CACHE_INTERVAL - 1) is first
    later = estimates.estimate_at(100.0 + CACHE_INTERVAL)
    assert later["p1"].now.round_trip_s > first["p1"].now.round_trip_s


def test_ttft_of_one_stage() -> None:
    times = RingTimes([STAGE], (), 1000)
    assert predict_ttft(times, 64) == pytest.approx(0.64)
    assert predict_ttft(times, 512) == pytest.approx(5.12)
    assert predict_ttft(times, 64, [3.0]) == pytest.approx(3 * 0.64)


def test_ttft_of_one_chunk() -> None:
    times = RingTimes([STAGE, STAGE], (LINK, LINK), 1000)
    assert predict_ttft(times, 64) == pytest.approx(0.64 + 0.064 + 0.05 + 0.64 + 0.050064)


def test_stages_overlap_chunks() -> None:
    times = RingTimes([STAGE, STAGE], (LINK, LINK), 1000)
    assert 5.12 < predict_ttft(times, 512) < 0.75 * 2 * 5.12


def test_slow_link_serializes_chunks() -> None:
    slow = LinkFacts(0.05, 1e4)
    times = RingTimes([STAGE, STAGE], (slow, slow), 1000)
    assert predict_ttft(times, 512) > 51.2


def test_ttft_needs_measured_stages() -> None:
    assert predict_ttft(RingTimes([STAGE, Profile()], (LINK, LINK), 1000), 64) == 0.0
