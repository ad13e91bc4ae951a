"""Metrics of the endpoint and of the swarm behind it, for Prometheus."""

import asyncio
import platform
import re
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import molink
from molinkd.api.backend import Backend, StageLabels
from molinkd.api.metric_help import describe_metric

#: Seconds between two samples.
SAMPLE_INTERVAL_S = 0.02


class LoopDelaySampler:
    """Samples the delay of the running event loop while answers are streamed.

    All streams of an endpoint share a loop, so a blocked loop delays all of them.
    """

    def __init__(self, observe: Callable[[float], None], is_needed: Callable[[], bool]) -> None:
        """``observe`` receives delays in seconds; sampling stops when ``is_needed`` is false."""
        self._observe = observe
        self._is_needed = is_needed
        self._is_sampling = False

    def start_sampling(self) -> None:
        """Start sampling unless it is running."""
        if not self._is_sampling:
            self._is_sampling = True
            self._schedule_sample(asyncio.get_running_loop())

    def _schedule_sample(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + SAMPLE_INTERVAL_S
        loop.call_at(due, self._take_sample, loop, due)

    def _take_sample(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._observe(max(0.0, loop.time() - due))
        self._is_sampling = self._is_needed()
        if self._is_sampling:
            self._schedule_sample(loop)


_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_LOOP_DELAY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
)
_DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_:]")


class Histogram:
    """A histogram of durations, cheap enough for every token of every stream."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def to_metric(self, name: str, documentation: str) -> HistogramMetricFamily:
        """Return the histogram as a Prometheus metric."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum)


class GenerationTimer:
    """Times one answer."""

    __slots__ = ("_last", "_recorder", "_start")

    def __init__(self, recorder: "RequestRecorder") -> None:
        self._recorder = recorder
        self._start = self._last = time.perf_counter()

    def record_token(self) -> float:
        """Record a token and return its time."""
        now = time.perf_counter()
        recorder = self._recorder
        if self._last == self._start:
            recorder.first_token.observe(now - self._start)
        else:
            recorder.inter_token.observe(now - self._last)
        recorder.generated_tokens += 1
        self._last = now
        return now

    def record_end(self) -> None:
        """Record the end of the answer."""
        self._recorder.running -= 1
        self._recorder.duration.observe(time.perf_counter() - self._start)


class RequestRecorder:
    """Counts events of the endpoint. Used on its event loop only."""

    def __init__(self) -> None:
        self.first_token = Histogram(_TTFT_BUCKETS_S)
        self.inter_token = Histogram(_INTER_TOKEN_BUCKETS_S)
        self.duration = Histogram(_DURATION_BUCKETS_S)
        self.loop_delay = Histogram(_LOOP_DELAY_BUCKETS_S)
        self._loop_sampler = LoopDelaySampler(self.loop_delay.observe, lambda: self.running > 0)
        self.running = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.requests: Counter[tuple[str, str]] = Counter()

    def start_generation(self, prompt_tokens: int) -> GenerationTimer:
        """Start to time an answer."""
        self.running += 1
        self._loop_sampler.start_sampling()
        self.prompt_tokens += prompt_tokens
        return GenerationTimer(self)

    def metric_families(self) -> Iterator[Metric]:
        """Return all metrics for Prometheus."""
        requests = CounterMetricFamily(
            "molink_endpoint_requests",
            "HTTP requests by route and status; 499: the client disconnected.",
            labels=("route", "status"),
        )
        for (route, status), count in self.requests.items():
            requests.add_metric((route, status), count)
        yield requests
        yield GaugeMetricFamily(
            "molink_endpoint_running",
            "Answers being generated for clients of this PC's endpoint.",
            value=self.running,
        )
        yield CounterMetricFamily(
            "molink_endpoint_prompt_tokens",
            "Prompt tokens received by this PC's endpoint.",
            value=self.prompt_tokens,
        )
        yield CounterMetricFamily(
            "molink_endpoint_generated_tokens",
            "Tokens generated for this PC's endpoint.",
            value=self.generated_tokens,
        )
        yield self.first_token.to_metric(
            "molink_endpoint_time_to_first_token_seconds",
            "Time from the start of a generation to its first token, in seconds.",
        )
        yield self.inter_token.to_metric(
            "molink_endpoint_inter_token_seconds",
            "Time between two tokens of an answer, in seconds.",
        )
        yield self.duration.to_metric(
            "molink_endpoint_answer_seconds",
            "Time from the start of a generation to its end, in seconds.",
        )
        yield self.loop_delay.to_metric(
            "molink_endpoint_loop_delay_seconds",
            "Delay of the endpoint's event loop in seconds, sampled 50 times a second "
            "while answers are generated.",
        )


class EndpointCollector(Collector):
    """Collects the metrics of the recorder and the backend on demand."""

    def __init__(self, recorder: RequestRecorder, backend: Backend) -> None:
        self._recorder = recorder
        self._backend = backend

    def collect(self) -> Iterable[Metric]:
        """Return every metric family once."""
        figures = self._backend.collect_metrics()
        families = {
            family.name: family for family in (_build_info(), *self._recorder.metric_families())
        }
        found: dict[str, Metric] = {}
        for name, value in figures.counters.items():
            _add_sample(found, CounterMetricFamily, name, {}, value)
        for name, value in figures.gauges.items():
            _add_sample(found, GaugeMetricFamily, name, {}, value)
        for stage, values in figures.stages.items():
            for name, value in values.counters.items():
                _add_sample(found, CounterMetricFamily, name, _stage_labels(stage, name), value)
            for name, value in values.gauges.items():
                _add_sample(found, GaugeMetricFamily, name, _stage_labels(stage, name), value)
        return {**found, **families}.values()


def _add_sample(
    found: dict[str, Metric],
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    labels: dict[str, str],
    value: float,
) -> None:
    """Add a sample to its family; a name used for two kinds keeps the first."""
    title = _metric_name(name)
    if kind is CounterMetricFamily:
        title = title.removesuffix("_total")
    family = found.setdefault(title, kind(title, describe_metric(title), labels=list(labels)))
    if isinstance(family, kind):
        family.add_metric(list(labels.values()), value)


def _stage_labels(stage: StageLabels, name: str) -> dict[str, str]:
    labels = {"pipeline": stage.pipeline, "stage": stage.layers}
    if name.startswith("link_"):
        inward = name.startswith(("link_received_", "link_unfinished_"))
        labels["link"] = stage.receives if inward else stage.sends
    return labels


def _build_info() -> Metric:
    labels = {
        "version": molink.__version__,
        "python": platform.python_version(),
        "system": sys.platform,
    }
    text = "Always 1; the labels are the versions of molink, Python and the system."
    info = GaugeMetricFamily("molink_build_info", text, labels=list(labels))
    info.add_metric(list(labels.values()), 1.0)
    return info


def create_registry(recorder: RequestRecorder, backend: Backend) -> CollectorRegistry:
    """Create a separate registry, so that two endpoints in one process stay apart."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EndpointCollector(recorder, backend))
    return registry


def render_metrics(registry: CollectorRegistry) -> bytes:
    """Render the text of ``/metrics``."""
    return generate_latest(registry)


def _metric_name(name: str) -> str:
    return "molink_" + _NOT_IN_NAMES.sub("_", name.removeprefix("molink_"))
