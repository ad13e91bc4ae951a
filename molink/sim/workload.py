"""Workloads: requests from a trace or of one size."""

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from molink.bench.workload import PlannedRequest, TraceRow
from molink.errors import UsageError

#: ``poisson``: a Poisson process; ``trace``: the trace's times, scaled to the rate.
Arrivals = Literal["poisson", "trace"]

#: Maximum number of requests (a sanity limit).
MAX_REQUESTS = 1_000_000
_MAX = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for ``warmup + duration`` seconds, at ``rate`` requests/s on average.

    Requests of the warm-up are served but not counted. The ``trace_rows`` with at most
    ``max_prompt`` and ``max_output`` tokens are used in order, cyclically; without a trace, every
    request has ``input_tokens`` and ``output_tokens``. ``seed`` determines the Poisson arrivals.

    Raises:
        UsageError: a number is out of range.
    """

    rate: float
    duration: float
    warmup: float = 0.0
    trace_rows: tuple[TraceRow, ...] = ()
    arrivals: Arrivals = "poisson"
    seed: int = 0
    input_tokens: int = 512
    output_tokens: int = 128
    max_prompt: int = 2048
    max_output: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or not 0 < self.duration < math.inf:
            raise UsageError(f"--rate and --duration must be above 0: {self.rate}, {self.duration}")
        check_ranges(
            {
                "--warmup": (self.warmup, 0, _MAX),
                "--input-tokens": (self.input_tokens, 1, _MAX),
                "--output-tokens": (self.output_tokens, 1, _MAX),
                "--max-prompt": (self.max_prompt, 1, _MAX),
                "--max-output": (self.max_output, 1, _MAX),
            }
        )
        if self.arrivals not in ("poisson", "trace"):
            raise UsageError(f"--arrivals must be poisson or trace, not {self.arrivals}")
        if self.rate * (self.warmup + self.duration) > MAX_REQUESTS:
            raise UsageError(f"more than {MAX_REQUESTS} requests: lower --rate or --duration")

    @property
    def has_shared_prefixes(self) -> bool:
        """Whether the trace says which prompts share prefixes."""
        return any(row.hash_ids for row in self.trace_rows)

    def plan_requests(self) -> list[PlannedRequest]:
        """Plan requests in order of arrival; ``arrival_s`` counts from the start of the warm-up.

        Raises:
            UsageError: the trace has no request within the limits, or no request arrives in time.
        """
        sizes = self._select_sizes()
        end = self.warmup + self.duration
        planned = []
        for index, (at, size) in enumerate(
            zip(self._arrival_times(sizes), _repeat_sizes(sizes), strict=False)
        ):
            if at >= end:
                break
            request = PlannedRequest(
                index, at, size.input_tokens, size.output_tokens, size.hash_ids
            )
            planned.append(request)
        if not any(request.arrival_s >= self.warmup for request in planned):
            raise UsageError(f"no request arrives in {self.duration:g} s: raise --duration")
        return planned

    def _select_sizes(self) -> Sequence[TraceRow]:
        if not self.trace_rows:
            return [TraceRow(0.0, self.input_tokens, self.output_tokens)]
        fitting = [
            row
            for row in self.trace_rows
            if row.input_tokens <= self.max_prompt and row.output_tokens <= self.max_output
        ]
        if not fitting:
            bounds = f"{self.max_prompt} prompt and {self.max_output} output tokens"
            raise UsageError(f"no request of the trace has at most {bounds}")
        return fitting

    def _arrival_times(self, sizes: Sequence[TraceRow]) -> Iterator[float]:
        if self.arrivals == "trace" and self.trace_rows:
            return self._stretched_times(sizes)
        return self._poisson_times()

    def _poisson_times(self) -> Iterator[float]:
        source = random.Random(self.seed)
        at = 0.0
        while True:
            at += source.expovariate(self.rate)
            yield at

    def _stretched_times(self, sizes: Sequence[TraceRow]) -> Iterator[float]:
        first, span = sizes[0].arrival_s, sizes[-1].arrival_s - sizes[0].arrival_s
        if span <= 0:
            raise UsageError("the trace's requests all arrive at once: use --arrivals poisson")
        # Together with the gap after the last request, n requests take n / rate seconds.
        cycle_s = len(sizes) / self.rate
        scale = cycle_s * (1 - 1 / len(sizes)) / span
        for number in count():
            for row in sizes:
                yield number * cycle_s + (row.arrival_s - first) * scale


def _repeat_sizes(sizes: Sequence[TraceRow]) -> Iterator[TraceRow]:
    while True:
        yield from sizes


def check_ranges(ranges: Mapping[str, tuple[float, float, float]]) -> None:
    """Check each option's value against its minimum and maximum.

    Raises:
        UsageError: a value is out of range.
    """
    for option, (value, minimum, maximum) in ranges.items():
        if not minimum <= value <= maximum:
            bounds = (
                f"from {minimum:g} to {maximum:g}" if maximum < _MAX else f"{minimum:g} or more"
            )
            raise UsageError(f"{option} must be {bounds}, not {value:g}")
