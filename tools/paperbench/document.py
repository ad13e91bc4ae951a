"""Render ``docs/results/paper.md``: our figures beside the paper's."""

from collections.abc import Iterator, Sequence
from typing import Any

from tools.paperbench.published import TABLE_5, TABLES, Figures, Row, Setting
from tools.paperbench.results import Results
from tools.paperbench.targets import Verdict, compute_gain, judge_targets
from tools.paperbench.variants import ABLATION, ALL, CONCURRENT, FIFO, MOLINK, VARIANTS

_TITLES = {
    2: "Table 2: request rates (100 Mbps, 30 ms one way)",
    3: "Table 3: bandwidths (0.2 requests/s, 30 ms)",
    4: "Table 4: latencies (0.2 requests/s, 100 Mbps)",
}
#: Tolerance between real sockets and the simulator.
_NEAR = 0.15
_LEGEND = """\
The baseline sends one tensor per hop, stores and forwards whole prompts, does not compress, and has
as many micro-batches as stages. `concurrent` sends like the paper's vLLM, `fifo` like its Helix,
`molink` by the paper's Algorithm 1 with more micro-batches; all on that baseline. `adaptive` is our
link policy on it. Each line with a `+` adds a switch to the line above (`prefill-only`: chunks also
travel without decode rows). `…, all switches` is another link policy with all switches, `… alone`
is `fifo` with one switch. Lines with two tensors send hidden and residual apart, like vLLM 0.7.
Times are means in seconds, ± half the range over the seeds. The floor is a round trip that waits
for nothing. *Saturated*: KV blocks ran out and requests queued, so figures grow with the run.
"""


def render_document(results: Results, command: str, rig: dict[str, Any] | None) -> str:
    """The whole document."""
    parts = [
        "# The MoLink paper's tables",
        f"Made by `{command}`; the figures are in `paper-simulated.json`"
        + (" and `paper-rig.json`." if rig else "."),
        "## In the simulator",
        "Three RTX 4090 by roofline, Qwen-7B's shapes, Azure's conversation trace (prompts up to"
        " 2048, answers up to 1024 tokens, sampled evenly), Poisson arrivals, seeds"
        f" {results.seed} to {results.seed + results.seeds - 1}. Each setting names its warm-up and"
        " the seconds whose arrivals count; all requests run to their end. The paper ran 60 s +"
        " 1800 s (`--full`).",
        _LEGEND,
        *(_format_table(results, number) for number in TABLES),
        _format_ablation(results),
        _format_gains(results),
        _format_targets(judge_targets(results)),
    ]
    if rig is not None:
        parts.append(_format_rig(rig))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _format_table(results: Results, number: int) -> str:
    lines = [f"### {_TITLES[number]}"]
    for row in TABLES[number]:
        lines += ["", *_format_row(results, row)]
    return "\n".join(lines)


def _format_row(results: Results, row: Row) -> Iterator[str]:
    floor = results.floor(row.setting)
    warmup, duration = results.times(row.setting)
    requests = max(
        found.requests
        for name in results.names(row.setting)
        if (found := results.of(row.setting, name)) is not None
    )
    yield (
        f"**{row.setting.name}**, floor {floor:.4f} s; {warmup:g} s + {duration:g} s,"
        f" {requests} requests"
    )
    yield ""
    yield "| system | TTFT | TPOT | p99 TPOT | latency | by floor | paper: TTFT, TPOT, latency |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    paper = {CONCURRENT.name: row.concurrent, FIFO.name: row.fifo, MOLINK.name: row.molink}
    for name in (variant.name for variant in VARIANTS):
        ours = results.of(row.setting, name)
        if ours is None:
            continue
        theirs = paper.get(name)
        by_floor = "saturated" if ours.saturated else f"{ours.tpot / floor:.2f}"
        yield (
            f"| {_format_name(name)} | {ours.ttft:.2f}{_format_spread(ours.ttft_spread, 2)}"
            f" | {ours.tpot:.4f}{_format_spread(ours.tpot_spread, 4)} | {ours.tpot_p99:.4f}"
            f" | {ours.latency:.1f} | {by_floor} | {_figures(theirs) if theirs else ''} |"
        )


def _format_spread(spread: float, digits: int) -> str:
    return f" ± {spread:.{digits}f}" if spread else ""


def _format_name(name: str) -> str:
    return f"**{name}**" if name == ALL.name else name


def _figures(figures: Figures) -> str:
    return f"{figures.ttft:.2f}, {figures.tpot:.2f}, {figures.latency:g}"


def _format_ablation(results: Results) -> str:
    lines = [
        "### Table 5: the paper's ablation (0.2 requests/s, 100 Mbps, 30 ms)",
        "",
        "The policy's two parts on our baseline, and what each gains over neither.",
        "",
        "| | TTFT | TPOT | latency | gain | paper | gain |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    neither = results.of(Setting(), ABLATION["neither"].name)
    for name, variant in ABLATION.items():
        ours = results.of(Setting(), variant.name)
        if ours is None or neither is None:
            continue
        paper, none = TABLE_5[name], TABLE_5["neither"]
        lines.append(
            f"| {name} | {ours.ttft:.2f} | {ours.tpot:.4f} | {ours.latency:.1f}"
            f" | {_percent(compute_gain(ours.figures, neither.figures))} | {_figures(paper)}"
            f" | {_percent(compute_gain(paper, none))} |"
        )
    return "\n".join(lines)


def _format_gains(results: Results) -> str:
    lines = [
        "### What the paper's policy gains",
        "",
        "How much less `molink` takes than the other two (TTFT, TPOT, latency), where none is"
        " saturated.",
        "",
        "| row | over fifo | paper, over Helix | over concurrent | paper, over vLLM |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in dict.fromkeys(row for table in TABLES.values() for row in table):
        found = [results.of(row.setting, each.name) for each in (MOLINK, FIFO, CONCURRENT)]
        if any(each is None or each.saturated for each in found):
            continue
        ours, fifo, concurrent = (each.figures for each in found if each is not None)
        cells = (
            compute_gain(ours, fifo),
            compute_gain(row.molink, row.fifo),
            compute_gain(ours, concurrent),
            compute_gain(row.molink, row.concurrent),
        )
        lines.append(f"| {row.setting.name} | {' | '.join(map(_percent, cells))} |")
    return "\n".join(lines)


def _percent(share: Figures) -> str:
    return ", ".join(
        f"{round(100 * each):+d} %" if round(100 * each) else "0 %"
        for each in (share.ttft, share.tpot, share.latency)
    )


def _format_targets(verdicts: Sequence[Verdict]) -> str:
    met = sum(verdict.met for verdict in verdicts)
    lines = [
        "### Targets",
        "",
        f"{met} of {len(verdicts)} are met. *Best* is the least of `adaptive`, `molink` and"
        " `concurrent` with all switches; *comparable* are those within 5 % of its time per token;"
        " *plain* are `concurrent`, `fifo` and `molink` on the baseline. Saturated runs are left"
        " out.",
        "",
        "| where | what | value | target | |",
        "|---|---|---:|---:|---|",
    ]
    for verdict in verdicts:
        sign = "≥" if verdict.at_least else "≤"
        lines.append(
            f"| {verdict.where} | {verdict.what} | {verdict.value:.3f} | {sign} {verdict.bound:.3f}"
            f" | {'met' if verdict.met else '**missed**'} |"
        )
    return "\n".join(lines)


def _format_rig(rig: dict[str, Any]) -> str:
    lines = [
        "## On real processes and sockets",
        "",
        f"Made by `{rig['command']}`. Three worker processes in network namespaces with 100 Mbps,"
        " 30 ms one way and queues of 256 KB; real TCP, encryption, links and schedulers. Compute"
        " is emulated: a step sleeps as long as the roofline says. Rows are"
        f" {rig['activations']}. {rig['repeats']} runs per row with different requests:"
        f" {rig['warmup_s']:g} s of warm-up, {rig['duration_s']:g} s counted. Runs are cut off, and"
        " requests count with the tokens they have by then, in the simulator too. The JSON has each"
        " run.",
        "",
        "| req/s | TCP | system | TTFT, real | simulated | ratio | TPOT, real | simulated | ratio |"
        " p99 TPOT, real | steps late by | within 15 % |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rig["rows"]:
        real, planned, by = row["rig"], row["simulated"], row["rig_by_simulated"]
        near = all(abs(value - 1) <= _NEAR for value in by.values()) and len(by) == 2
        lines.append(
            f"| {row['rate']:g} | {row['congestion']} | {row['system']}"
            f" | {_format(real['ttft_s'])} | {_format(planned['ttft_s'])} | {by.get('ttft', 0):.2f}"
            f" | {_format(real['tpot_s'])} | {_format(planned['tpot_s'])} | {by.get('tpot', 0):.2f}"
            f" | {real['tpot_s']['p99'] or 0:.3f} | {100 * max(row['late_share']):.0f} %"
            f" | {'yes' if near else '**no**'} |"
        )
    lines += [
        "",
        "The simulator models the same congestion control, drop-tail queues and 1.1 ms to hand a"
        " message on (measured on one hop); [what it leaves"
        " out](../decisions/0029-simulation-and-tests.md). TCP `none` is the ideal medium: no TCP"
        " in the simulator; here a full initial window that is kept in pauses, and queues that drop"
        " nothing. Steps end late because processes share few cores.",
    ]
    return "\n".join(lines)


def _format(summary: dict[str, float | None]) -> str:
    mean = summary["mean"]
    return "–" if mean is None else f"{mean:.3f}"
