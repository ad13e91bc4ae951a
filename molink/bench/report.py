"""Samples of a benchmark run and their statistics."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Sample:
    """Times in seconds on the run's clock.

    ``piece_times`` are the ascending arrival times of the answer's pieces; ``finished_at`` is when
    the last piece or the finish reason arrived. ``output_tokens`` is the server's ``usage``, or the
    number of pieces without it. A failed request has an ``error`` and is excluded from statistics.
    """

    sent_at: float
    piece_times: tuple[float, ...] = ()
    finished_at: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_at(self) -> float:
        """Arrival time of the first piece; the end of the answer if it has no text."""
        return self.piece_times[0] if self.piece_times else self.finished_at

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first_at - self.sent_at

    @property
    def latency(self) -> float:
        """Time to the end of the answer."""
        return self.finished_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; ``None`` below two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.finished_at - self.first_at) / (self.output_tokens - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between successive pieces.

        Several tokens in one piece count as one gap.
        """
        return tuple(b - a for a, b in pairwise(self.piece_times))


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and percentiles in seconds; ``None`` without data."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def from_values(cls, values: Iterable[float]) -> "Summary":
        """Summarize ``values``."""
        ordered = sorted(values)
        if not ordered:
            return cls(None, None, None, None)
        return cls(
            sum(ordered) / len(ordered),
            percentile(ordered, 50),
            percentile(ordered, 90),
            percentile(ordered, 99),
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of a sorted, non-empty sequence, with linear interpolation."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run; its fields are the keys of ``--json``."""

    policy: str
    completed: int
    failed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Summary
    tpot_s: Summary
    itl_s: Summary
    latency_s: Summary
    input_tokens: int
    output_tokens: int
    #: Whether the run was interrupted; the statistics then cover the requests completed by then.
    interrupted: bool = False
    first_error: str | None = None

    def as_json(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return asdict(self)


def summarize(
    samples: Sequence[Sample], duration: float, *, policy: str, interrupted: bool = False
) -> Report:
    """Summarize a run that took ``duration`` seconds from its first request to its last answer."""
    done = [sample for sample in samples if sample.error is None]
    output_tokens = sum(sample.output_tokens for sample in done)
    errors = [sample.error for sample in samples if sample.error is not None]
    return Report(
        policy=policy,
        completed=len(done),
        failed=len(errors),
        duration_s=duration,
        requests_per_s=len(done) / duration if duration > 0 else 0.0,
        output_tokens_per_s=output_tokens / duration if duration > 0 else 0.0,
        ttft_s=Summary.from_values(sample.ttft for sample in done),
        tpot_s=Summary.from_values(sample.tpot for sample in done if sample.tpot is not None),
        itl_s=Summary.from_values(gap for sample in done for gap in sample.itl),
        latency_s=Summary.from_values(sample.latency for sample in done),
        input_tokens=sum(sample.input_tokens for sample in done),
        output_tokens=output_tokens,
        interrupted=interrupted,
        first_error=errors[0] if errors else None,
    )


#: Table rows: label and accessor of each metric.
_ROWS: tuple[tuple[str, Callable[[Report], Summary]], ...] = (
    ("time to first token (TTFT)", lambda report: report.ttft_s),
    ("time per output token (TPOT)", lambda report: report.tpot_s),
    ("inter-token latency (ITL)", lambda report: report.itl_s),
    ("request latency", lambda report: report.latency_s),
)


def report_table(report: Report) -> Table:
    """Render the report as a table in milliseconds, with throughput in the caption."""
    view = Table(
        caption=(
            f"{report.completed} completed, {report.failed} failed in {report.duration_s:.1f} s · "
            f"{report.requests_per_s:.2f} requests/s · "
            f"{report.output_tokens_per_s:.1f} output tokens/s"
        ),
        caption_justify="left",
        caption_style="",
    )
    view.add_column("ms")
    for name in ("mean", "p50", "p90", "p99"):
        view.add_column(name, justify="right")
    for label, pick in _ROWS:
        summary = pick(report)
        values = (summary.mean, summary.p50, summary.p90, summary.p99)
        view.add_row(label, *("–" if value is None else f"{value * 1000:.1f}" for value in values))
    return view
