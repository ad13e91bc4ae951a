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
den = "1-2"
loft = "3-4"
[[models]]
model = "three"
layers = { cellar = "1-9" }
"""


@pytest.mark.parametrize(
    ("param", "line"),
    [
        ("molink", 1),
        ("models[0]", 2),
        ("models[0].pins[1]", 4),
        ("models[1]", 5),
        ("models[1].pins[0]", 8),
        ("models[1].pins[1]", 9),
        ("models[2].pins[0]", 12),
    ],
)
def test_an_error_names_its_line(tmp_path: Path, param: str, line: int) -> None:
    path = tmp_path / "swarm.toml"
    path.write_text(TEXT, encoding="utf-8")
    file, lines = read_swarm_file(path)
    located = _locate_error(RequestError("it needs 9 GB", param), file, lines)
    assert isinstance(located, UsageError)
    assert str(located) == f"{path}, line {line}: it needs 9 GB"


@pytest.mark.parametrize("param", [None, "models", "target", "models[3]"])
def test_errors_without_a_model_are_unchanged(tmp_path: Path, param: str | None) -> None:
    path = tmp_path / "swarm.toml"
    path.write_text(TEXT, encoding="utf-8")
    error = RequestError("one: only an owner may apply a file", param)
    assert _locate_error(error, *read_swarm_file(path)) is error
