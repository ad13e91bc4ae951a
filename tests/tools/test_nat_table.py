"""The table of homes: its results file, cells that are missing, and the times to connect."""

from pathlib import Path

from tools.nat_table import Cell, Pair, format_table, read_pairs, record_pair


def test_a_pair_measured_again_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "homes.json"
    assert read_pairs(file) == []
    failed = Pair("open", "carrier", Cell(failure="no ring"))
    served = Pair("open", "carrier", Cell(("reverse", "direct"), (1.0, 0.5), (0.25,), 30.0))
    other = Pair("open", "open", Cell(("direct", "direct"), (0.5, 0.5), (), 31.0))
    for pair in (failed, other, served):
        record_pair(file, pair)
    assert read_pairs(file) == [other, served]


def test_the_table_has_a_place_for_each_pair_and_the_times_to_connect() -> None:
    table = format_table(
        [
            Pair("port-cone", "symmetric", Cell(("relay", "relay"), (2.0, 4.0), (), 8.4)),
            Pair("open", "port-cone", Cell(("reverse", "direct"), (1.0, 0.5), (0.25,), 30.0)),
            Pair("open", "open", Cell(failure="no ring")),
        ]
    )
    assert table.splitlines() == [
        "| | open | port-cone | symmetric |",
        "|---|---|---|---|",
        "| open | no ring | reverse/direct, 1.0 s, 30 | – |",
        "| port-cone |  | – | relay, 4.0 s, 8 |",
        "",
        "Reached within 1.5 s (median), 4.0 s (99 %); 75% within 3 s.",
        "",
        "Left the relay within 0.2 s (median), 0.2 s (99 %); 100% within 3 s.",
    ]
