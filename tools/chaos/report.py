"""Render a drill as Markdown."""

import statistics
from collections.abc import Sequence

from molink.swarm.agent.recovery import RECOVERY_PHASES
from tools.chaos.drill import WHOLE_S, Result, Verdict


def render_report(verdict: Verdict) -> str:
    """A row per kind of fault, then everything that went wrong."""
    lines = [
        "| fault | times | same text | lost | changed | pause: median (s) | p99 (s) "
        "| of the asked PC (s) | all continue (s) | all PCs used (s) |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| none | | | | | {_format_median(verdict.calm)} | {_format_p99(verdict.calm)} | | | |",
    ]
    for kind in dict.fromkeys(result.fault.kind for result in verdict.results):
        of_kind = [result for result in verdict.results if result.fault.kind == kind]
        done = [result for result in of_kind if not result.skipped]
        lines.append(
            _format_row(
                kind, done, [end for result in done for end in _format_harmed(verdict, result)]
            )
            if done
            else f"| {kind} | skipped: {of_kind[0].target} | | | | | | | | |"
        )
    ends = [answer.end for answer in verdict.answers]
    exempt = ends.count("endpoint")
    lines += [
        "",
        "A pause is the longest silence of a stream from the fault until all streams continued. "
        "Streams whose own endpoint was frozen or cut off have their own column (the longest), and "
        "those whose endpoint was killed are left out. The last two columns are medians: from the "
        "fault until all continued, and from its end until every PC held layers again.",
        "",
        f"{len(ends)} requests, {exempt} of them at endpoints that were killed.",
        *_format_phases(verdict),
        "",
        *(f"- {trouble}" for trouble in verdict.troubles or ["Nothing went wrong."]),
    ]
    return "\n".join(lines)


def _format_phases(verdict: Verdict) -> list[str]:
    """Median and 99th percentile of each recovery phase by kind, if PCs report them."""
    seen = {name for result in verdict.results for name in result.phases}
    names = [name for name in ("noticed", *RECOVERY_PHASES) if name in seen]
    if not names:
        return []
    lines = [
        "",
        "Phases of the recoveries at each PC, median and 99th percentile in seconds:",
        "",
        f"| fault | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for kind in dict.fromkeys(r.fault.kind for r in verdict.results if r.phases):
        of_kind = [result.phases for result in verdict.results if result.fault.kind == kind]
        taken = [[s for phases in of_kind for s in phases.get(name, [])] for name in names]
        cells = [
            f"{_format_median(seconds)}, {_format_p99(seconds)}" if seconds else ""
            for seconds in taken
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def _format_harmed(verdict: Verdict, result: Result) -> list[str]:
    """Ends of the answers that ran during a fault or its recovery."""
    until = float("inf") if result.recovered is None else result.recovered
    return [
        answer.end
        for answer in verdict.answers
        if answer.begun < until and answer.ended > result.begun and answer.end != "endpoint"
    ]


def _format_row(kind: str, done: Sequence[Result], ends: Sequence[str]) -> str:
    pauses = [pause for result in done for pause in result.pauses]
    asked = [pause for result in done for pause in result.asked]
    again = [r.recovered - r.begun for r in done if r.recovered is not None]
    used = [r.whole - r.mended for r in done if r.whole is not None]
    cells = [
        kind,
        str(len(done)),
        f"{ends.count('same')} of {len(ends)}",
        str(ends.count("lost")),
        str(ends.count("changed")),
        _format_median(pauses),
        _format_p99(pauses),
        f"{max(asked):.2f}" if asked else "",
        _format_median(again),
        _format_median(used) if len(used) == len(done) else f"> {WHOLE_S:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _format_median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else ""


def _format_p99(values: Sequence[float]) -> str:
    """The 99th percentile; the largest of fewer than 100 values."""
    ordered = sorted(values)
    return f"{ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]:.2f}" if ordered else ""
