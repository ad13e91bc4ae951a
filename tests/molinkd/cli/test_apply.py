"""``molink apply``: the line of each error."""

from pathlib import Path

import pytest

from molink.errors import RequestError, UsageError
from molinkd.cli.apply import _locate_error
from molinkd.cli.swarm_file import read_swarm_file

TEXT = """\
molink = "9.9"
[[models]]
model = "one"
pcs = ["attic", "den"]
[[models]]
model = "owner/two"
[models.layers]
den = "0:2"
loft = "2:4"
[[models]]
model = "three"
layers = { cellar = "0:9" }
"""


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("the file requires molink 9.9, but attic runs 1.0: update molink there", 1),
        ("one: it needs 9 GB", 2),
        ("one: no PC of this swarm is called den; `molink status` shows them", 4),
        ("one: den-2 is not there", 2),
        ("two: den is named for one too: a PC holds layers of one", 8),
        ("two: loft with layers 2:4 names layers that two doesn't have", 9),
        ("three: cellar with layers 0:9 names layers that three doesn't have", 12),
    ],
)
def test_an_error_names_its_line(tmp_path: Path, said: str, line: int) -> None:
    path = tmp_path / "swarm.toml"
    path.write_text(TEXT, encoding="utf-8")
    file, lines = read_swarm_file(path)
    located = _locate_error(RequestError(said), file, lines)
    assert isinstance(located, UsageError)
    assert str(located) == f"{path}, line {line}: {said}"


def test_errors_without_a_model_are_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "swarm.toml"
    path.write_text(TEXT, encoding="utf-8")
    error = RequestError("only the swarm's first PC may apply a file")
    assert _locate_error(error, *read_swarm_file(path)) is error
