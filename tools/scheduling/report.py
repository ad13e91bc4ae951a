"""Render ``docs/results/scheduling.md``: scheduling and routing beside the papers' figures."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

Json = dict[str, Any]
_OURS = ("skip-join-mlfq", "gittins")

_HEAD = """\
# FastServe's and Preble's figures, and ours

Made by `python -m tools.scheduling report` from `scheduling-*.json` and `routing.json`; each
section names its command, and `python -m tools.scheduling --all --trace FILE --conversations FILE`
runs all of them (Azure's and Mooncake's traces). Everything but the section on real processes is
simulated with the product's schedulers and routers (decisions
[16](../decisions/0016-scheduling-policies.md) and [19](../decisions/0019-prefix-aware-routing.md)).

The papers used other engines, models and workloads, so only ratios compare. An *aim* is our own
goal. A *bound* is what an oracle reaches: a policy that knows answer lengths (`srpt`), free swaps
with unlimited host memory (`nothing-lost`), a router that knows all requests (`oracle`). Each run
starts with 256 uncounted requests at half of the ring's capacity, from which `gittins` learns.
Clients allow 4096 tokens per answer; only `srpt` is told the length. Sizes are log-normal with the
means of ShareGPT (161 and 338 tokens) and Alpaca (19 and 58), or those of the trace.
"""
#: FastServe, §6.2 to §6.4 (skip-join beside its own fcfs, and other policies; swaps).
_SLO = """\
FastServe over its own fcfs: 1.6 to 4 times in the mean (aim 2), 1.5 to 2.8 at p95 (aim 1.5), at
least 0.95 at low load. Preempted requests are recomputed, or with `:proactive-swap` kept in 32 GB
of host memory."""
_RATIOS = """\
FastServe's skip-join MLFQ is up to 8.9 times as good as fcfs, 1.87 as naive MLFQ and 13.9 as fixed
priorities. Aim: never worse than the better of the latter two; the last columns are their time
divided by the policy's, per seed."""
_SWAPS = """\
Time relative to `proactive-swap`: mean over the seeds (range). FastServe: recomputing 2.7 (aim 2),
reactive swaps 1.7 (aim 1.4); steps wait for swaps less than 5 % of latency (aim 5 %). Bound: time
relative to `nothing-lost`."""
#: Preble, §5.
_E2 = """\
Latency relative to E2: mean over the seeds (range). Preble over round-robin: 1.5 to 14.5 in the
mean (aim 1.5), 2 to 10 at p99 (aim 2). Aims beside `oracle`: 1, and beside `least-loaded` where
prompts share nothing (`alone`): 0.98."""


def render_report(folder: Path) -> str:
    """The document, from the result files in ``folder``."""
    parts = [_HEAD.strip()]
    for name, section in _SECTIONS.items():
        path = folder / f"{name}.json"
        if path.exists():
            parts += section(json.loads(path.read_text(encoding="utf-8")))
    return "\n\n".join(parts) + "\n"


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cite(text: str) -> str:
    return f"`python -m tools.{text}`"


def _format_spread(mean: float, least: float, most: float) -> str:
    return f"{mean:.2f} ({least:.2f} to {most:.2f})"


def _short_behind_long(found: Json) -> Iterator[str]:
    yield "## A short prompt behind a long one"
    yield (
        f"{_cite('scheduling short-behind-long')}: {found['ring']}; 64 tokens arrive 2 s after"
        " 4096.\nAim: a first token within 1.5 s, and at most 1.10 times the long request's time"
        " alone."
    )
    rows = [
        (f"`{row['policy']}`", f"{row['short_ttft_s']:.2f}", f"{row['long_by_alone']:.3f}")
        for row in found["rows"]
    ]
    yield _format_table(("policy", "first token of the short one, s", "long one / alone"), rows)


def _format_slo(kind: str, found: Json) -> Iterator[str]:
    rows = {row["policy"]: row for row in found["rows"]}
    fcfs = rows["fcfs"]
    more = " --trace FILE" if kind == "trace" else ""
    yield f"## Load within {found['slo_s']:g} s a token: {kind}"
    command = _cite(f"scheduling slo --kinds {kind} --policies {','.join(rows)}{more}")
    yield f"{command}:\n{found['ring']}, {fcfs['seconds']:g} s of arrivals.\n{_SLO}"
    header = (
        "policy",
        "requests/s, mean",
        "/ fcfs",
        "requests/s, p95",
        "/ fcfs",
        "low load: fcfs / it",
    )
    cells = [
        (
            f"`{policy}`",
            f"{row['rate_mean']:.2f}",
            f"{row['rate_mean'] / fcfs['rate_mean']:.2f}",
            f"{row['rate_p95']:.2f}",
            f"{row['rate_p95'] / fcfs['rate_p95']:.2f}",
            f"{fcfs['low_mean_s'] / row['low_mean_s']:.3f}",
        )
        for policy, row in rows.items()
    ]
    yield _format_table(header, cells)


def _format_ratios(found: Json) -> Iterator[str]:
    yield "## Prompts of one to sixteen times the answer"
    seeds = len({row.get("seed", 1) for row in found["rows"]})
    yield (
        f"{_cite('scheduling ratios --seconds 20')}: {found['ring']}, {found['load']:g} times"
        f" capacity; mean seconds per token (p95), {seeds} seeds.\n{_RATIOS}"
    )
    policies = list(dict.fromkeys(row["policy"] for row in found["rows"]))
    rows: list[Sequence[str]] = []
    for ratio in dict.fromkeys(row["ratio"] for row in found["rows"]):
        here = [row for row in found["rows"] if row["ratio"] == ratio]
        mean, p95 = (
            {name: [row[which] for row in here if row["policy"] == name] for name in policies}
            for which in ("mean_s", "p95_s")
        )
        cells = [f"{fmean(mean[name]):.3f} ({fmean(p95[name]):.2f})" for name in policies]
        for ours in _OURS:
            strawmen = zip(mean["mlfq"], mean["fixed-priority"], mean[ours], strict=True)
            each = [min(naive, fixed) / time for naive, fixed, time in strawmen]
            cells.append(_format_spread(fmean(each), min(each), max(each)))
        rows.append((f"{ratio:g}", *cells))
    header = ("prompt / answer", *(f"`{name}`" for name in policies))
    yield _format_table((*header, *(f"best strawman / `{ours}`" for ours in _OURS)), rows)


def _format_preemption(found: Json) -> Iterator[str]:
    yield f"## KV of preempted requests: {found['ring']}"
    command = _cite("scheduling preemption")
    yield f"{command}: {found['seconds']:g} s of arrivals.\n{_SWAPS}"
    waited: dict[tuple[str, float, float], float] = {}
    for row in found["rows"]:
        cell = row["policy"], row["ratio"], row["load"]
        if row["side"] == "proactive-swap":
            waited[cell] = max(row["waited"], waited.get(cell, 0.0))
    times = {
        (row["policy"], row["ratio"], row["load"], row["slow"], row["fast"]): row
        for row in found["against"]
    }
    rows = []
    for (policy, ratio, load), share in waited.items():
        pairs = [
            times[policy, ratio, load, slow, fast]
            for slow in ("recompute", "reactive-swap")
            for fast in ("proactive-swap", "nothing-lost")
        ]
        cells = [_format_spread(row["times"], row["least"], row["most"]) for row in pairs]
        name = f"{ratio:g}" if ratio else "ShareGPT's"
        rows.append((f"`{policy}`", name, f"{load:g}", *cells, f"{100 * share:.1f} %"))
    header = (
        "policy",
        "prompt / answer",
        "load",
        "`recompute`",
        "bound",
        "`reactive-swap`",
        "bound",
    )
    yield _format_table((*header, "largest wait"), rows)


def _format_processes(found: Json) -> Iterator[str]:
    yield "## Real processes"
    yield (
        f"{_cite('scheduling processes')}: two stages of the bundled model, {found['requests']}"
        " requests;\nmean seconds per token, beside the same ring simulated (on a faster PC)."
        " Aim: the same order."
    )
    ordered = sorted(found["rows"], key=lambda row: float(row["real_s"]))
    rows = [
        (f"`{row['policy']}`", f"{row['real_s']:.4f}", f"{row['simulated_s']:.4f}")
        for row in ordered
    ]
    yield _format_table(("policy", "processes", "simulated"), rows)


def _format_routing(found: Json) -> Iterator[str]:
    yield "## Prompts that begin alike"
    yield f"The rows of `tools.routing` that `--all` names: {found['pipelines']}.\n{_E2}"
    rows = [
        (
            row["workload"] + (f", {row['requests']} requests" if row.get("requests") else ""),
            f"{row['rate']:g}",
            str(row["seeds"]),
            ", ".join(f"`{row[name]}`" for name in ("router", "policy") if row[name] != "fcfs"),
            _format_spread(*row["latency_mean_s"]),
            _format_spread(*row["latency_p99_s"]),
        )
        for row in found["by_e2"]
    ]
    yield _format_table(("requests", "per s", "seeds", "router", "mean", "p99"), rows)
    if speed := found["speed"]:
        yield (
            f"Decisions a second of CPU time: {speed['decisions_per_s']:.0f} (aim 2000; Preble's"
            f" global scheduler: 245 to 2931), with\n{speed['tree_tokens']:.0f} tokens in the tree,"
            f" which takes {speed['tree_mb']:.1f} MB."
        )


_SECTIONS: dict[str, Callable[[Json], Iterator[str]]] = {
    "scheduling-short-behind-long": _short_behind_long,
    "scheduling-slo-sharegpt": partial(_format_slo, "sharegpt"),
    "scheduling-slo-alpaca": partial(_format_slo, "alpaca"),
    "scheduling-slo-trace": partial(_format_slo, "trace"),
    "scheduling-ratios": _format_ratios,
    "scheduling-preemption": _format_preemption,
    "scheduling-processes": _format_processes,
    "routing": _format_routing,
}
