"""A table of systems that answer the same loads over links of several kinds.

A results file holds a cell for each kind of link; the document's table is made from it.
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

#: The figures of a load, in this order, in seconds.
FIGURES = ("first token", "per token", "worst gap", "whole answer")
#: Those in the document's table.
_SHOWN = (0, 1, 3)

Figures = tuple[float, ...]


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """Rate up and down, delay one way, and share of lost packets of every node."""

    mbps: float
    delay_ms: float
    loss: float

    def __str__(self) -> str:
        return f"{self.mbps:g} Mbps, {self.delay_ms:g} ms, {100 * self.loss:g} %"


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures over one kind of link: of each side, for each load.

    ``other_cores`` says how many of the machine's cores other programs used meanwhile.
    """

    link: Link
    sides: dict[str, list[Figures]]
    other_cores: float
    #: The command that measured it.
    command: str


def order_links(
    mbps: Sequence[float], delays_ms: Sequence[float], losses: Sequence[float]
) -> list[Link]:
    """All kinds of links, those of extremes first: an interrupted table spans what it can."""
    axes = (mbps, delays_ms, losses)
    extremes = [{min(axis), max(axis)} for axis in axes]
    links = itertools.starmap(Link, itertools.product(*axes))
    return sorted(
        links,
        key=lambda link: sum(
            value not in ends
            for value, ends in zip((link.mbps, link.delay_ms, link.loss), extremes, strict=True)
        ),
    )


def record_cell(path: Path, cell: Cell) -> None:
    """Add a cell to a results file, or replace that of the same link."""
    cells = read_cells(path) if path.exists() else []
    kept = [each for each in cells if each.link != cell.link]
    data = msgspec.json.encode([*kept, cell])
    path.write_bytes(msgspec.json.format(data, indent=1) + b"\n")


def read_cells(path: Path) -> list[Cell]:
    """Read a results file: cells in the order of their measurement."""
    return msgspec.json.decode(path.read_bytes(), type=list[Cell])


def compute_ratios(one: Sequence[Figures], other: Sequence[Figures]) -> list[Figures]:
    """``one`` by ``other``, load by load, for the loads that both have answered."""
    return [tuple(a / b for a, b in zip(*pair, strict=True)) for pair in zip(one, other)]  # noqa: B905


def format_rows(cell: Cell) -> Iterator[str]:
    """Rows of a Markdown table: each side, and the first one by each other."""
    rows = dict(cell.sides)
    first, *others = cell.sides
    for other in others:
        rows[f"{first} / {other}"] = compute_ratios(cell.sides[first], cell.sides[other])
    for name, loads in rows.items():
        values = map(_format_range, zip(*loads, strict=True))
        yield f"| {cell.link} | {name} | {' | '.join(values)} |"


def _format_range(values: Sequence[float]) -> str:
    """The median, and the range of several values."""
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.3g}{spread}"


def format_table(cells: Sequence[Cell]) -> str:
    """The document's table: the first side's medians, and those by each other side's."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.sides))
    first, *others = names
    heads = [f"{first}: {FIGURES[figure]}, s" for figure in _SHOWN]
    heads += [f"by {other}: {FIGURES[figure]}" for other in others for figure in _SHOWN]
    rows = sorted(cells, key=lambda cell: cell.link)
    lines = [
        f"| Mbps | ms | loss, % | {' | '.join(heads)} | other programs, cores |",
        f"|{'---:|' * (4 + len(heads))}",
        *(_format_row(cell, others) for cell in rows),
        "",
        _describe_loads(cells, names),
        "",
        "```bash",
        *dict.fromkeys(cell.command for cell in cells),
        "```",
    ]
    return "\n".join(lines)


def _format_row(cell: Cell, others: Sequence[str]) -> str:
    own = next(iter(cell.sides.values()))
    values = [f"{statistics.median(load[figure] for load in own):.3g}" for figure in _SHOWN]
    for other in others:
        ratios = compute_ratios(own, cell.sides.get(other, ()))
        values += [
            _format_range([load[figure] for load in ratios]) if ratios else "–" for figure in _SHOWN
        ]
    link = (cell.link.mbps, cell.link.delay_ms, 100 * cell.link.loss)
    return f"| {' | '.join([*map('{:g}'.format, link), *values])} | {cell.other_cores:.1f} |"


def _describe_loads(cells: Sequence[Cell], names: Sequence[str]) -> str:
    counts = {name: sorted({len(cell.sides.get(name, ())) for cell in cells}) for name in names}
    loads = ", ".join(f"{name} {_format_counts(found)}" for name, found in counts.items())
    return f"Loads in each row: {loads}."


def _format_counts(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
