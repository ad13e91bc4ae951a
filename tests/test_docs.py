"""What the documents name is there: files, modules of ``tools``, and the targets of links."""

import re
from pathlib import Path

import pytest

from molinkd.cli.swarm_file import ModelSection, SwarmFile, read_swarm_file
from molinkd.peer.settings import SETTING_NAMES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_PATH = re.compile(r"(?<![\w./-])(?:molink|daemon|configs|tools|tests|docs)/[\w./-]*\w")
_TOOL = re.compile(r"\btools\.(\w+)")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def headings(text: str) -> set[str]:
    """The anchors that a code host makes of headings."""
    return {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in _HEADING.findall(text)
    }


def missing(document: Path) -> list[str]:
    """What ``document`` names and isn't there."""
    text = document.read_text(encoding="utf-8")
    found = [
        path for path in _PATH.findall(text) if "NAME" not in path and not (ROOT / path).exists()
    ]
    for name in _TOOL.findall(text):
        if not any((ROOT / "tools" / place).exists() for place in (name, f"{name}.py")):
            found.append(f"tools.{name}")
    for place, anchor in _LINK.findall(text):
        target = document.parent / place if place else document
        if not target.exists():
            found.append(place)
        elif anchor and anchor not in headings(target.read_text(encoding="utf-8")):
            found.append(f"{place}#{anchor}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_names_is_there(document: Path) -> None:
    assert missing(document) == []


def test_a_wrong_name_is_found(tmp_path: Path) -> None:
    document = tmp_path / "wrong.md"
    document.write_text(
        "# Title\n`molink/nowhere.py`, `tools.nothing`, [a](b.md), [c](#d), [fine](#title)\n",
        encoding="utf-8",
    )
    assert missing(document) == ["molink/nowhere.py", "tools.nothing", "b.md", "#d"]


def test_every_setting_is_described() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(SETTING_NAMES)


def test_the_swarm_file_is_described(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "swarm-file.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [*SwarmFile.__struct_fields__, *ModelSection.__struct_fields__]
    example = tmp_path / "swarm.toml"
    example.write_text(text.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    assert len(read_swarm_file(example)[0].models) == 2
