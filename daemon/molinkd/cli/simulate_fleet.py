"""``molink simulate --pipelines``: simulate many rings."""

import json
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from molink.errors import UsageError
from molink.sim.fleet import FleetOutcome, FleetScenario, simulate_fleet
from molink.sim.scenario import Scenario


def fleet_options(
    pipelines: int | None,
    peers: int | None,
    peers_per_uplink: int | None,
    router: str | None,
    departures_per_hour: float | None,
    away_s: float | None,
) -> dict[str, Any] | None:
    """Return the given options by field of :class:`FleetScenario`; ``None`` for a single ring.

    Raises:
        UsageError: an option needs ``--pipelines``.
    """
    given = {
        "peers": ("--peers", peers),
        "peers_per_uplink": ("--peers-per-uplink", peers_per_uplink),
        "router": ("--router", router),
        "departures_per_hour": ("--churn", departures_per_hour),
        "away_s": ("--away", away_s),
    }
    found = {name: value for name, (_, value) in given.items() if value is not None}
    if pipelines is None and found:
        option = given[next(iter(found))][0]
        raise UsageError(f"{option} needs --pipelines")
    return None if pipelines is None else {"pipelines": pipelines, **found}


def show_fleets(rings: Sequence[Scenario], options: dict[str, Any], as_json: bool) -> None:
    """Simulate a fleet of each of ``rings`` and print the results."""
    found: list[tuple[FleetOutcome, float]] = []
    for ring in rings:
        fleet = FleetScenario(ring, **options)
        with Console(stderr=True).status("simulating …"):
            began = time.process_time()
            outcome = simulate_fleet(fleet)
            found.append((outcome, time.process_time() - began))
    if as_json:
        values = [{**outcome.as_json(), "cpu_s": round(cpu, 2)} for outcome, cpu in found]
        print(json.dumps(values if len(values) > 1 else values[0], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for outcome, _ in found:
        table.add_column(outcome.report.policy, justify="right")
    rows = [dict(_outcome_rows(*each)) for each in found]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    Console().print(table)


def _outcome_rows(outcome: FleetOutcome, cpu: float) -> Iterator[tuple[str, str]]:
    """Yield the rows of a result."""
    report, pipelines = outcome.report, outcome.pipelines
    yield "requests done", str(report.completed)
    yield "lost", str(outcome.num_lost)
    yield "resubmitted", str(outcome.num_resubmitted)
    yield "PCs that left", str(outcome.num_departures)
    yield "rings lost / formed", f"{_total(pipelines, 'lost')} / {_total(pipelines, 'formed')}"
    yield "rings that failed on their own", str(outcome.num_broken)
    for name, summary, places in (("TTFT", report.ttft_s, 2), ("TPOT", report.tpot_s, 4)):
        values = (summary.mean, summary.p50, summary.p90, summary.p99)
        shown = " / ".join(format_seconds(value, places) for value in values)
        yield f"{name}, s: mean / p50 / p90 / p99", shown
    loads = [each.requests for each in pipelines]
    spread = f"{min(loads)} / {fmean(loads):.1f} / {max(loads)}"
    yield "requests per pipeline: least / mean / most", spread
    busy = [100 * share for share in outcome.busy_shares]
    yield (
        "PC busy: least / mean / most",
        f"{min(busy):.0f} / {fmean(busy):.0f} / {max(busy):.0f} %",
    )
    yield "prompt tokens cached", f"{100 * outcome.cached_share:.0f} %"
    yield "virtual minutes", f"{outcome.virtual_s / 60:.1f}"
    yield "CPU seconds per virtual minute", f"{60 * cpu / outcome.virtual_s:.2f}"


def _total(pipelines: Sequence[Any], name: str) -> int:
    return sum(getattr(each, name) for each in pipelines)


def format_seconds(value: float | None, places: int) -> str:
    """Format a time for a table."""
    return "–" if value is None else f"{value:.{places}f}"
