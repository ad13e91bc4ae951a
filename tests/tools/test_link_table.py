"""The table of systems over links of several kinds: order, results file, ratios, document."""

from pathlib import Path

import pytest

from tools.serving.document import replace_table
from tools.serving.link_table import (
    Cell,
    Link,
    compute_ratios,
    format_rows,
    format_table,
    order_links,
    read_cells,
    record_cell,
)


def make_cell(mbps: float, factor: float = 1.0) -> Cell:
    """Two loads of molink, and one of a system that takes four times as long."""
    mine = [(1.0, 0.1, 0.2, 2.0), (3.0, 0.3, 0.4, 6.0)]
    return Cell(
        Link(mbps, 15.0, 0.005),
        {
            "molink": [tuple(factor * value for value in load) for load in mine],
            "other": [tuple(4 * factor * value for value in mine[0])],
        },
        0.25,
        f"measure {mbps:g}",
    )


def test_links_of_extremes_come_first_and_each_once() -> None:
    links = order_links([5, 20, 100], [15, 50, 100], [0, 0.005])
    assert len(set(links)) == len(links) == 18
    assert {(link.mbps, link.delay_ms) for link in links[:8]} == {
        (5, 15),
        (5, 100),
        (100, 15),
        (100, 100),
    }
    assert {(link.mbps, link.delay_ms) for link in links[-2:]} == {(20, 50)}


def test_ratios_pair_the_loads_that_both_answered() -> None:
    cell = make_cell(5)
    assert compute_ratios(cell.sides["molink"], cell.sides["other"]) == [(0.25,) * 4]
    assert compute_ratios(cell.sides["molink"], []) == []


def test_rows_show_sides_and_ratios_with_their_range() -> None:
    assert list(format_rows(make_cell(5))) == [
        "| 5 Mbps, 15 ms, 0.5 % | molink"
        " | 2 (1.00–3.00) | 0.2 (0.10–0.30) | 0.3 (0.20–0.40) | 4 (2.00–6.00) |",
        "| 5 Mbps, 15 ms, 0.5 % | other | 4 | 0.4 | 0.8 | 8 |",
        "| 5 Mbps, 15 ms, 0.5 % | molink / other | 0.25 | 0.25 | 0.25 | 0.25 |",
    ]


def test_a_cell_measured_again_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    for cell in (make_cell(5), make_cell(20), make_cell(5, factor=2)):
        record_cell(file, cell)
    assert read_cells(file) == [make_cell(20), make_cell(5, factor=2)]


def test_the_table_shows_medians_and_ratios_of_each_link() -> None:
    lonely = Cell(Link(1, 15, 0), {"molink": [(1.0,) * 4]}, 3.0, "measure 5")
    lines = format_table([make_cell(20), make_cell(5), lonely]).splitlines()
    assert lines[0].startswith("| Mbps | ms | loss, % | molink: first token, s |")
    assert lines[2] == "| 1 | 15 | 0 | 1 | 1 | 1 | – | – | – | 3.0 |"
    assert lines[3] == "| 5 | 15 | 0.5 | 2 | 0.2 | 4 | 0.25 | 0.25 | 0.25 | 0.2 |"
    assert lines[4].startswith("| 20 |")
    assert lines[6] == "Loads in each row: molink 1 to 2, other 0 to 1."
    assert lines[8:] == ["```bash", "measure 20", "measure 5", "```"]


def test_a_table_replaces_what_stands_between_its_marks(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    text = "before\n<!-- links: begin -->\nold\n<!-- links: end -->\nafter\n"
    document.write_text(text, encoding="utf-8")
    for table in ("first", "second"):
        replace_table(document, "links", table)
    assert document.read_text(encoding="utf-8") == text.replace("old", "\nsecond\n")
    with pytest.raises(ValueError, match="homes: begin"):
        replace_table(document, "homes", "third")
