"""Forecasts of a ring's performance."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from molink.bench.report import Report, summarize
from molink.bench.workload import PlannedRequest
from molink.errors import UsageError
from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.scheduler.micro_batches import MicroBatchEstimate, choose_best, estimate_counts
from molink.sim.ring_template import DTYPE
from molink.sim.scenario import Scenario
from molink.sim.simulate import SimPipeline

#: Submission time, after the links have been probed.
_START_S = 5.0
#: Virtual seconds after which the single request counts as stuck.
_MAX_DURATION_S = 36_000.0


@dataclass(frozen=True, slots=True)
class RingForecast:
    """The forecast of a ring: placement, the effect of ``K``, and a request's latencies.

    ``layers`` has each stage's half-open range. ``floor_s`` is the minimum seconds per token.
    ``curve`` has an estimate for each number ``K`` of micro-batches with ``streams`` streams; the
    scheduler uses ``micro_batches``. ``ttft_s`` and ``tpot_s`` are simulated for a single request
    of ``prompt_tokens``; ``token_s`` is the seconds per token while ``streams - 1`` other streams
    decode.
    """

    layers: tuple[tuple[int, int], ...]
    floor_s: float
    streams: int
    curve: tuple[MicroBatchEstimate, ...]
    micro_batches: int
    prompt_tokens: int
    ttft_s: float
    tpot_s: float
    token_s: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def plan_ring(
    scenario: Scenario, streams: int, prompt_tokens: int, output_tokens: int
) -> RingForecast:
    """Forecast the ring of ``scenario``.

    Raises:
        UsageError: the model doesn't fit, or a number is out of range.
    """
    if streams < 1:
        raise UsageError(f"--streams must be 1 or more, not {streams}")
    times = ring_times(scenario)
    curve = estimate_counts(times, streams)
    best = choose_best(curve)
    report = _serve_alone(scenario, prompt_tokens, output_tokens)
    return RingForecast(
        layers=_layer_ranges(scenario.layer_split),
        floor_s=times.round_trip_s(1),
        streams=streams,
        curve=tuple(curve),
        micro_batches=best.count,
        prompt_tokens=prompt_tokens,
        ttft_s=report.ttft_s.mean or 0.0,
        tpot_s=report.tpot_s.mean or 0.0,
        token_s=best.token_s,
    )


def ring_times(scenario: Scenario) -> RingTimes:
    """Compute the ring times of ``scenario`` from the rooflines of its devices."""
    model, count = scenario.model_profile, scenario.stages
    profiles = [one.make_profile() for one in scenario.rooflines]
    links = [scenario.link_from(index) for index in range(count)]
    facts = tuple(LinkFacts(link.latency + link.handling, link.rate) for link in links)
    row_bytes = model.hidden * scenario.tensors_per_row * DTYPE_SIZES[DTYPE]
    return RingTimes(profiles, facts if count > 1 else (), row_bytes)


def _serve_alone(scenario: Scenario, prompt_tokens: int, output_tokens: int) -> Report:
    pipeline = SimPipeline(scenario, [PlannedRequest(0, _START_S, prompt_tokens, output_tokens)])
    pipeline.run(_MAX_DURATION_S)
    samples = pipeline.clients.collect_samples(0.0)
    if samples[0].error is not None:
        raise UsageError(f"a prompt of {prompt_tokens} tokens can't be served: {samples[0].error}")
    return summarize(samples, samples[0].latency, policy=scenario.policy)


def _layer_ranges(layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ends = [sum(layers[: index + 1]) for index in range(len(layers))]
    return tuple((end - count, end) for end, count in zip(ends, layers, strict=True))
