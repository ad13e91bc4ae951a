"""Plots of the simulated tables as SVG; needs ``pip install matplotlib`` (the extra ``bench``)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from molink.errors import UsageError
from tools.paperbench.published import TABLE_2, TABLE_3, TABLE_4, Figures, Row, Setting
from tools.paperbench.results import Measured, Results
from tools.paperbench.variants import (
    CONCURRENT,
    CONCURRENT_ALL,
    FIFO,
    MOLINK,
    MOLINK_ALL,
    STEPS,
    TWO_TENSORS,
    Variant,
)

_BASELINES = (TWO_TENSORS, CONCURRENT, FIFO, MOLINK, CONCURRENT_ALL, MOLINK_ALL)
_COLOURS = {
    TWO_TENSORS.name: "#9e9e9e",
    CONCURRENT.name: "#8c6d31",
    FIFO.name: "#555555",
    MOLINK.name: "#e6550d",
    STEPS[0].name: "#9ecae1",
    STEPS[1].name: "#4a98c9",
    STEPS[2].name: "#1764ab",
    STEPS[3].name: "#0b4a8f",
    STEPS[4].name: "#08306b",
    CONCURRENT_ALL.name: "#d6b656",
    MOLINK_ALL.name: "#fdae6b",
}
_PAPER = (("concurrent", "vLLM"), ("fifo", "Helix"), ("molink", "MoLink"))
_PAPER_COLOURS = {"concurrent": "#8c6d31", "fifo": "#555555", "molink": "#e6550d"}
_MEASURES = (("tpot", "time per output token (s)"), ("ttft", "time to first token (s)"))


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw all of them into ``folder``.

    Raises:
        UsageError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    rates, links = folder / "paper-rates.svg", folder / "paper-links.svg"
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for axes, (measure, label) in zip(panels, _MEASURES, strict=True):
        _panel(axes, results, TABLE_2, measure, lambda setting: setting.rate)
        axes.set(xlabel="requests/s", ylabel=label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    _save(figure, rates)

    figure, grid = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    sides: Sequence[tuple[Sequence[Row], str, Callable[[Setting], float]]] = (
        (TABLE_3, "Mbps", lambda setting: setting.mbps),
        (TABLE_4, "latency of a hop (ms)", lambda setting: setting.latency_ms),
    )
    for line, (measure, label) in zip(grid, _MEASURES, strict=True):
        for axes, (table, unit, place) in zip(line, sides, strict=True):
            _panel(axes, results, table, measure, place)
            axes.set(xlabel=unit, ylabel=label)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    _save(figure, links)
    return [rates, links]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install 'molink[bench]'") from error
    matplotlib.use("svg")
    # The same bytes for the same figures.
    matplotlib.rcParams["svg.hashsalt"] = "molink"
    from matplotlib import pyplot

    return pyplot


def _panel(
    axes: Any,
    results: Results,
    table: Sequence[Row],
    measure: str,
    place: Callable[[Setting], float],
) -> None:
    """One measure over the rows of a table: baselines, our steps, the paper's points, the floor."""
    rows = sorted(table, key=lambda row: place(row.setting))
    for variant in (*_BASELINES, *STEPS):
        points = [
            (place(row.setting), _value(found, measure))
            for row in rows
            if (found := results.of(row.setting, variant.name)) is not None
        ]
        if len(points) > 1:
            _line(axes, points, variant)
    for name, label in _PAPER:
        figures: list[Figures] = [getattr(row, name) for row in rows]
        axes.plot(
            [place(row.setting) for row in rows],
            [getattr(each, measure) for each in figures],
            linestyle="none",
            marker="x",
            markersize=7,
            color=_PAPER_COLOURS[name],
            label=f"paper: {label}",
        )
    if measure == "tpot":
        axes.plot(
            [place(row.setting) for row in rows],
            [results.floor(row.setting) for row in rows],
            color="#2ca02c",
            linestyle=":",
            linewidth=2,
            label="the ring's floor",
            zorder=5,
        )
    _log_scale(axes)
    axes.grid(alpha=0.3, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _value(found: Measured, measure: str) -> float:
    return float(getattr(found, measure))


def _line(axes: Any, points: Sequence[tuple[float, float]], variant: Variant) -> None:
    axes.plot(
        *zip(*points, strict=True),
        marker="o",
        markersize=4,
        linestyle="--" if variant in _BASELINES else "-",
        color=_COLOURS[variant.name],
        label=variant.name,
    )


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
