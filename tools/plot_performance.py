"""Draws ``docs/performance.svg`` from the results of the benchmarks in ``docs/results``.

    python -m tools.plot_performance

Each bar is molink's figure by its baseline's, measured in the same run; the marks are the ratios of
the single rounds. Needs ``pip install matplotlib``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path("docs/results")
PLOT = Path("docs/performance.svg")


def main() -> None:
    """Draw."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "molink"
    from matplotlib import pyplot

    rows = list(read_rows())
    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(rows) + 1.4), layout="constrained")
    places = range(len(rows))[::-1]
    axes.barh(places, [ratio for _, ratio, _ in rows], height=0.55, color="#4c78a8")
    for place, (_, ratio, rounds) in zip(places, rows, strict=True):
        axes.plot(rounds, [place] * len(rounds), "|", color="#222222", markersize=9)
        axes.annotate(
            f"{ratio:.2f} x", (max(ratio, *rounds), place), (6, -4), textcoords="offset points"
        )
    axes.axvline(1, color="#888888", linewidth=1, linestyle="--")
    axes.set_yticks(list(places), [label for label, _, _ in rows])
    axes.set_xlabel("tokens/s of molink by those of the other side (1 = equal)")
    axes.margins(x=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(PLOT, metadata={"Date": None})
    print(f"{PLOT}: {len(rows)} bars")


def read_rows() -> Iterator[tuple[str, float, list[float]]]:
    """Label, median ratio and ratios of the rounds."""
    engine = _read("engine")
    yield from (
        _row(label, engine[name])
        for name, label in (
            ("decode", "decode, batch 1\nvs llama.cpp"),
            ("prefill", "prefill of 128 tokens\nvs llama.cpp"),
            ("batch_8", "generation, batch 8\nvs transformers"),
        )
    )
    yield _row("4 clients of the endpoint\nvs llama-server", _read("clients"))
    yield _row("8 streams on 2 stages\nvs one process", _read("pipeline"))


def _row(label: str, found: dict[str, Any]) -> tuple[str, float, list[float]]:
    return label, found["ratio"], found["ratios"]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
